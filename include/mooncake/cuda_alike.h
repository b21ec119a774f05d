// What GPU memory is called. With USE_CUDA it brings the CUDA runtime along.
#pragma once

#include <string>

#ifdef USE_CUDA
#include <cuda.h>
#include <cuda_runtime.h>
#endif

// Locations of GPU memory are this and the ordinal: "cuda:0".
const static std::string GPU_PREFIX = "cuda:";
