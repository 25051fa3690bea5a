// The architecture that device code is compiled for. Elsewhere that of most GPUs.
#pragma once

#include <cstdint>

namespace bert_unpad {

#ifdef __CUDA_ARCH__
inline constexpr bool kTuring = __CUDA_ARCH__ < 800;       // sm_75
inline constexpr bool kBlackwell = __CUDA_ARCH__ >= 1000;  // and later
#else
inline constexpr bool kTuring = false, kBlackwell = false;
#endif

// Bytes of shared memory that a block can have, where kernels may need more.
inline constexpr uint32_t kMostShared = kTuring ? 64 * 1024 : UINT32_MAX;

}  // namespace bert_unpad
