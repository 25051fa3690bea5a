// Lets a helper that many kernels call name its caller in the messages of the model of a block.
//
//   BU_DEVICE float load(const float* p BU_SITE) { return load_global<float>(p BU_FROM_SITE); }
//
// On the host BU_SITE is a last parameter, the place of the call; nvcc sees neither.
#pragma once

#ifdef __CUDACC__
#define BU_SITE
#define BU_FROM_SITE
#else
#include <source_location>
#define BU_SITE , std::source_location site = std::source_location::current()
#define BU_FROM_SITE , site
#endif
