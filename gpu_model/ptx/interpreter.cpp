// Runs kernels as nvcc compiled them: the library that gpu_model/ptx/interpreter.py loads.
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gpu_model/ptx/block.h"
#include "gpu_model/ptx/module.h"
#include "gpu_model/ptx/symbols.h"

#define BU_EXPORT extern "C" __attribute__((visibility("default")))

namespace bert_unpad::ptx {
namespace {

// The files of PTX that belong to one library of kernels.
struct Program {
  std::vector<std::unique_ptr<Module>> modules;
  std::string error, text;
};

std::pair<Module*, const Kernel*> find_kernel(Program& program, const std::string& name) {
  for (const auto& module : program.modules)
    if (const Kernel* kernel = module->find(name); kernel != nullptr) return {module.get(), kernel};
  throw std::runtime_error("no kernel " + name + " in the PTX");
}

std::vector<unsigned char> parameters_of(const Kernel& kernel, const CompiledLaunch& launch) {
  if (launch.argument_count != kernel.parameters.size())
    throw std::runtime_error(std::to_string(launch.argument_count) +
                             " arguments; the kernel takes " +
                             std::to_string(kernel.parameters.size()));
  std::vector<unsigned char> bytes(kernel.parameter_bytes, 0xff);
  for (uint32_t i = 0; i < launch.argument_count; ++i) {
    const Parameter& parameter = kernel.parameters[i];
    if (launch.argument_bytes[i] != parameter.bytes)
      throw std::runtime_error("argument " + std::to_string(i) + " has " +
                               std::to_string(launch.argument_bytes[i]) +
                               " bytes; the kernel takes " + std::to_string(parameter.bytes));
    std::memcpy(&bytes[parameter.offset], launch.arguments[i], parameter.bytes);
  }
  return bytes;
}

Timing timing = Timing::kSeeded;  // of all launches

// Blocks run one after the other, in an order that depends on the seed, as a GPU promises none.
void run_grid(Program& program, const CompiledLaunch& launch) {
  const std::string name = launch.entry != nullptr ? launch.entry : symbol_name(launch.kernel);
  const auto [module, kernel] = find_kernel(program, name);
  const uint64_t threads = uint64_t{launch.block[0]} * launch.block[1] * launch.block[2];
  if (threads > kernel->max_threads)
    throw std::runtime_error("a block of " + std::to_string(threads) +
                             " threads; the kernel is compiled for " +
                             std::to_string(kernel->max_threads));
  static Block block;  // its memory is used again
  block.kernel = kernel;
  block.launch = &launch;
  block.timing = timing;
  block.constants = &module->constants();
  block.parameters = parameters_of(*kernel, launch);
  block.random = block_model::Random(launch.seed);
  block.shared.races = launch.races && block.is_checked();
  static GlobalAccesses accesses;
  accesses.begin(kernel->global_grain);
  const unsigned* grid = launch.grid;
  std::vector<uint64_t> order(uint64_t{grid[0]} * grid[1] * grid[2]);
  std::iota(order.begin(), order.end(), uint64_t{0});
  if (static_cast<Policy>(launch.policy) != Policy::kInOrder)
    for (uint64_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[block.random.next() % i]);
  block.accesses =
      launch.races && (order.size() > 1 || kernel->has_read_only_loads) ? &accesses : nullptr;
  for (const uint64_t i : order) {
    block.number = static_cast<uint32_t>(i);
    block.index[0] = static_cast<unsigned>(i % grid[0]);
    block.index[1] = static_cast<unsigned>(i / grid[0] % grid[1]);
    block.index[2] = static_cast<unsigned>(i / (uint64_t{grid[0]} * grid[1]));
    block.run();
  }
}

template <class F>
const char* guarded(Program& program, const F& f) {
  try {
    f();
    return nullptr;
  } catch (const std::exception& e) {
    program.error = e.what();
    return program.error.c_str();
  }
}

}  // namespace
}  // namespace bert_unpad::ptx

using bert_unpad::block_model::LaunchSettings;
using bert_unpad::ptx::CompiledLaunch;
using bert_unpad::ptx::Program;

namespace {

bert_unpad::block_model::Buffers registered;
bert_unpad::block_model::Statistics counted;

}  // namespace

BU_EXPORT void* ptx_program() { return new Program; }
BU_EXPORT void ptx_free(void* program) { delete static_cast<Program*>(program); }

// Functions that can fail give null, or what went wrong.
BU_EXPORT const char* ptx_add(void* program, const char* name, const char* text) {
  auto& p = *static_cast<Program*>(program);
  return bert_unpad::ptx::guarded(
      p, [&] { p.modules.push_back(std::make_unique<bert_unpad::ptx::Module>(name, text)); });
}

// The kernels' names, a line each.
BU_EXPORT const char* ptx_kernels(void* program) {
  auto& p = *static_cast<Program*>(program);
  p.text.clear();
  for (const auto& module : p.modules)
    for (const std::string& name : module->names()) p.text += name + "\n";
  return p.text.c_str();
}

// Decodes a kernel without running it.
BU_EXPORT const char* ptx_decode(void* program, const char* name) {
  auto& p = *static_cast<Program*>(program);
  return bert_unpad::ptx::guarded(p, [&] { bert_unpad::ptx::find_kernel(p, name); });
}

BU_EXPORT void ptx_set_timing(int value) {
  bert_unpad::ptx::timing = static_cast<bert_unpad::ptx::Timing>(value);
}

// RunCompiled of gpu_model/block/compiled.h.
BU_EXPORT const char* ptx_run(void* program, const CompiledLaunch& launch) {
  auto& p = *static_cast<Program*>(program);
  return bert_unpad::ptx::guarded(p, [&] {
    try {
      bert_unpad::ptx::run_grid(p, launch);
    } catch (const std::runtime_error& e) {
      const std::string text = e.what(), op = launch.op;
      throw std::runtime_error(text.starts_with(op) ? text : op + ": " + text);
    }
  });
}

// For kernels without a launcher, and the memory they may touch.
BU_EXPORT void ptx_clear() { registered.clear(); }
BU_EXPORT const char* ptx_register(const void* p, uint64_t bytes, int writable) {
  static Program unnamed;
  return bert_unpad::ptx::guarded(unnamed, [&] { registered.add(p, bytes, writable != 0); });
}

BU_EXPORT const char* ptx_launch(void* program, const char* kernel,
                                 const LaunchSettings& settings) {
  const auto pass = [](const char*, const char*, unsigned, int64_t) { return true; };
  return ptx_run(program, {settings, kernel, nullptr, kernel, true, &registered, &counted, pass});
}
