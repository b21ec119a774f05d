// What libtransfer_engine_cxx exports: the members of the classes, and the few functions that the process shares. All else of its
// symbols is hidden. A program that hides its own by default still sees one type information of each class, whichever module asks.
#pragma once

#define TRANSFER_ENGINE_CXX_API __attribute__((visibility("default")))
