// What is counted and configured for all launches, and the loop over a grid's blocks.
#pragma once

#include <array>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "gpu_model/block/block.h"
#include "gpu_model/block/compiled.h"
#include "gpu_model/block/device.h"
#include "gpu_model/block/global_memory.h"
#include "gpu_model/block/shared_memory.h"
#include "gpu_model/block/site.h"

namespace bert_unpad::block_model {

struct Configuration {
  Policy policy = Policy::kInOrder;
  uint64_t seed = 0;
};

inline Statistics statistics;
inline Configuration configuration;
inline SiteList sites;

inline void check_launch(const char* name, dim3 grid, dim3 shape, size_t shared_bytes) {
  const auto require = [&](bool ok, const std::string& text) {
    if (!ok) throw std::runtime_error(std::string(name) + ": launch of " + text);
  };
  const uint64_t threads = uint64_t{shape.x} * shape.y * shape.z;
  require(threads >= 1 && threads <= kMaxThreads && shape.z <= 64,
          "a block of " + triple(shape.x, shape.y, shape.z) + " threads; 1 to 1024 are possible");
  require(grid.x >= 1 && grid.y >= 1 && grid.z >= 1 && grid.x <= 0x7fffffffu && grid.y <= 65535 &&
              grid.z <= 65535,
          "a grid of " + triple(grid.x, grid.y, grid.z) +
              " blocks; 1 to (2147483647, 65535, 65535) are possible");
  require(shared_bytes <= static_cast<size_t>(device.shared_bytes),
          std::to_string(shared_bytes) + " bytes of shared memory; the device has " +
              std::to_string(device.shared_bytes) + " for a block");
}

// Runs body(argument) as every thread of the grid. Blocks run one after the other, in an order that
// depends on the seed, as a GPU promises none.
inline void run_grid(const char* name, dim3 grid, dim3 shape, size_t shared_bytes,
                     void (*body)(void*), void* argument) {
  check_launch(name, grid, shape, shared_bytes);
  if (block.self != nullptr) throw std::logic_error(std::string(name) + ": launch from a kernel");
  block.policy = configuration.policy;
  block.random = Random(configuration.seed);
  std::vector<uint64_t> order(uint64_t{grid.x} * grid.y * grid.z);
  std::iota(order.begin(), order.end(), uint64_t{0});
  if (block.policy != Policy::kInOrder) {
    for (uint64_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[block.random.next() % i]);
  }
  gridDim = grid;
  blockDim = shape;
  for (const uint64_t i : order) {
    blockIdx = {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                static_cast<unsigned>(i / (uint64_t{grid.x} * grid.y))};
    shared_memory.reset(static_cast<uint32_t>(shared_bytes));
    block.run(name, shape, body, argument);
  }
}

inline bool pass_site(const char* kind, const char* file, unsigned line, int64_t threads) {
  return sites.pass(kind, file, line, threads);
}

// Runs what nvcc made of `kernel`.
template <class... Params>
void run_compiled(const char* name, const void* kernel, dim3 grid, dim3 shape, size_t shared_bytes,
                  const std::tuple<Params...>& arguments) {
  check_launch(name, grid, shape, shared_bytes);
  const uint32_t bytes[] = {sizeof(Params)..., 0};
  const auto pointers = std::apply(
      [](const Params&... each) { return std::array<const void*, sizeof...(Params)>{&each...}; },
      arguments);
  const CompiledLaunch launch{{{grid.x, grid.y, grid.z},
                               {shape.x, shape.y, shape.z},
                               static_cast<uint32_t>(shared_bytes),
                               pointers.data(),
                               bytes,
                               sizeof...(Params),
                               static_cast<int>(configuration.policy),
                               configuration.seed},
                              name,
                              kernel,
                              nullptr,
                              shared_memory.races,
                              &global_memory,
                              &statistics,
                              pass_site};
  const char* error = compiled_kernels.run(compiled_kernels.module, launch);
  if (error != nullptr) throw std::runtime_error(error);
}

// kernel(args...) as every thread of the grid.
template <class... Params, class... Args>
void run_kernel(const char* name, void (*kernel)(Params...), dim3 grid, dim3 shape,
                size_t shared_bytes, const Args&... args) {
  struct Call {
    void (*kernel)(Params...);
    std::tuple<Params...> arguments;
  } call{kernel, std::tuple<Params...>(args...)};
  if (compiled_kernels.run != nullptr)
    return run_compiled(name, reinterpret_cast<const void*>(kernel), grid, shape, shared_bytes,
                        call.arguments);
  run_grid(
      name, grid, shape, shared_bytes,
      [](void* p) { std::apply(static_cast<Call*>(p)->kernel, static_cast<Call*>(p)->arguments); },
      &call);
}

}  // namespace bert_unpad::block_model
