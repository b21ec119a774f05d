// glog, which programs expect these headers to bring along; where it is not installed, what stands in for it.
//
// TRANSFER_ENGINE_WITHOUT_GLOG takes the stand-in although glog is there.
#pragma once

#if !defined(TRANSFER_ENGINE_WITHOUT_GLOG) && __has_include(<glog/logging.h>)
#include <glog/logging.h>
#else
#include "../stand_in/glog/logging.h"
#endif
