// Lets one source serve nvcc, where functions and kernels need attributes, and a plain C++
// compiler.
#pragma once

#ifdef __CUDACC__
#define BU_HD __host__ __device__ __forceinline__
#define BU_DEVICE __device__ __forceinline__
// A kernel's head: at most `threads` threads a block, and few enough registers for `blocks` blocks
// to share an SM.
#define BU_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
// A kernel's parameter struct, read in place.
#define BU_PARAMS const __grid_constant__
#else
#define BU_HD inline
#define BU_DEVICE inline
#define BU_KERNEL(threads, blocks) void
#define BU_PARAMS const
#endif
