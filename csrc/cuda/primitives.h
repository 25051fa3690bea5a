// What kernels are made of: the one header of this folder that a kernel needs.
//
// Kernels touch threads, shared memory, asynchronous copies, tensor cores and global memory through
// these functions only. nvcc takes them from the headers beside this one, where each is a few PTX
// instructions. A plain C++ compiler takes functions of the same names from gpu_model, which runs a
// block's threads one at a time on a CPU and checks what they do (gpu_model/README.md).
#pragma once

#ifdef __CUDACC__
#include "cuda/async_copy.h"
#include "cuda/block.h"
#include "cuda/memory.h"
#include "cuda/mma.h"
#include "cuda/wgmma.h"
#else
#include BU_GPU_MODEL  // the header of a stand-in for a GPU, which its build names
#endif
