// What a program calls of the two extension modules: they are loaded apart from each other (RTLD_LOCAL) and hide all else.
#pragma once

#include <typeinfo>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// A std::shared_ptr<mooncake::TransferEngine> that an interpreter holds for both modules, and a batch of it.
struct Handed {
    void* engine;
    unsigned long batch;
};

using MakeEngine = Handed (*)();               // first
using Release = void (*)();                    // first: gives up its own reference
using UseEngine = bool (*)(Handed handed);     // second: frees the batch, moves bytes, and drops the reference that was handed over
using Configuration = void* (*)();             // both
using WriteConfiguration = void (*)(bool, unsigned long);  // first
using ReadConfiguration = unsigned long (*)(bool);         // second
using EngineType = const std::type_info* (*)();            // both
