// Starting kernels: dtype dispatch and launch geometry, without torch.
//
// The only file with <<<>>>; a launcher calls launch() and never the kernel. Without nvcc launch()
// runs the kernel in the model of a block (gpu_model), whose cuda_runtime.h is found first.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <set>
#include <utility>

#include "common/types.h"
#include "cuda/error.h"
#ifndef __CUDACC__
#include BU_GPU_MODEL
#endif

namespace bert_unpad::cuda {

// Dynamic shared memory that a kernel gets without asking.
inline constexpr size_t kUnaskedSharedBytes = 48 * 1024;

#ifdef __CUDACC__
// Lets a kernel use as much as a block can have, once on each device. Not what a launch needs: a
// limit that went down again would fail the launch of another thread, or of a captured graph.
inline void allow_shared_memory(const char* op, const void* kernel) {
  static std::mutex mutex;
  static std::set<std::pair<int, const void*>> allowed;
  int device = 0, bytes = 0;
  check_cuda(cudaGetDevice(&device), op);
  const std::scoped_lock lock(mutex);
  if (allowed.contains({device, kernel})) return;
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), op);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
  allowed.emplace(device, kernel);
}
#endif

// cudaGetLastError also reports an error of earlier, asynchronous work; the message names the
// operator that met it.
template <class... Params, class... Args>
void launch(const char* op, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, const Args&... args) {
#ifdef __CUDACC__
  if (shared_bytes > kUnaskedSharedBytes)
    allow_shared_memory(op, reinterpret_cast<const void*>(kernel));
  kernel<<<grid, block, shared_bytes, stream>>>(args...);
#else
  static_cast<void>(stream);
  block_model::run_kernel(op, kernel, grid, block, shared_bytes, args...);
#endif
  check_cuda(cudaGetLastError(), op);
}

// f.operator()<T>() for the storage type of `dtype`.
template <class F>
void dispatch(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f.template operator()<float>();
    case DType::kBFloat16:
      return f.template operator()<bf16>();
    case DType::kFloat16:
      return f.template operator()<f16>();
  }
}

inline int sm_count(const char* op) {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), op);
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), op);
  return count;
}

inline bool is_aligned(const void* p, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Blocks of 128 threads over a [rows, columns] matrix. A thread keeps its columns, so that what
// belongs to a column is read once, and goes through every (grid.y * block.y)-th row. Narrow
// matrices put several rows into a block.
struct ColumnGrid {
  static constexpr int kThreads = 128;
  dim3 grid, block;

  // `column_vectors`: columns / elements per thread; `blocks` fill the device. A block is at most
  // `widest` threads wide.
  ColumnGrid(int64_t rows, int64_t column_vectors, int64_t blocks, int64_t widest = kThreads) {
    unsigned width = 1;
    while (width < kThreads && 2 * width <= widest && width < column_vectors) width *= 2;
    block = dim3(width, kThreads / width);
    const int64_t across = (column_vectors + width - 1) / width;
    const int64_t most = (rows + block.y - 1) / block.y;
    const int64_t down = std::clamp<int64_t>(std::min(blocks / across, most), 1, 65535);
    grid = dim3(static_cast<unsigned>(across), static_cast<unsigned>(down));
  }
};

}  // namespace bert_unpad::cuda
