// What a test library exports besides its own functions, for block_model.py. Include it once,
// first, in the .cpp that is built into the library.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "gpu_model/block/primitives.h"

#define BU_EXPORT extern "C" __attribute__((visibility("default")))

namespace bert_unpad::block_model {

inline std::string last_error, site_text;

// 0, or 1 and the message in bu_last_error(). Every exported function that launches is wrapped in
// it: no exception may reach Python.
template <class F>
int guarded(const F& f) {
  try {
    f();
    return 0;
  } catch (const std::exception& e) {
    last_error = e.what();
    return 1;
  }
}

}  // namespace bert_unpad::block_model

BU_EXPORT const char* bu_last_error() { return bert_unpad::block_model::last_error.c_str(); }

BU_EXPORT void bu_configure(int policy, uint64_t seed, int races) {
  bert_unpad::block_model::configuration = {static_cast<bert_unpad::block_model::Policy>(policy),
                                            seed};
  bert_unpad::block_model::shared_memory.races = races != 0;
}

BU_EXPORT void bu_set_device(int multiprocessors, int shared_bytes, int major, int minor) {
  bert_unpad::block_model::device = {multiprocessors, shared_bytes, major, minor};
}

BU_EXPORT int bu_register(const void* p, uint64_t bytes, int writable) {
  return bert_unpad::block_model::guarded(
      [&] { bert_unpad::block_model::global_memory.add(p, bytes, writable != 0); });
}
BU_EXPORT void bu_clear() { bert_unpad::block_model::global_memory.clear(); }

// A line "kind passes line file" for every barrier and wait.
BU_EXPORT const char* bu_sites() {
  std::string& text = bert_unpad::block_model::site_text;
  text.clear();
  for (const auto& site : bert_unpad::block_model::sites.entries()) {
    text += std::string(site.kind) + " " + std::to_string(site.passes) + " " +
            std::to_string(site.line) + " " + site.file + "\n";
  }
  return text.c_str();
}
BU_EXPORT void bu_ignore_site(const char* file, unsigned line) {
  bert_unpad::block_model::sites.ignore(file, line);
}
BU_EXPORT void bu_restore_sites() { bert_unpad::block_model::sites.restore(); }
BU_EXPORT void bu_forget_sites() { bert_unpad::block_model::sites.forget(); }

// Launches run compiled kernels from here on; with null their source again.
BU_EXPORT void bu_use_compiled(void* run, void* module) {
  bert_unpad::block_model::compiled_kernels = {
      reinterpret_cast<bert_unpad::block_model::RunCompiled>(run), module};
}

// mma, load_matrices, bank conflict cycles, warp-wide operations, switches between threads.
BU_EXPORT void bu_statistics(int64_t* out) {
  const bert_unpad::block_model::Statistics& s = bert_unpad::block_model::statistics;
  const int64_t values[] = {s.mma, s.load_matrices, s.bank_conflict_cycles, s.collectives,
                            bert_unpad::block_model::block.switches + s.switches};
  for (const int64_t value : values) *out++ = value;
}
BU_EXPORT void bu_reset_statistics() {
  bert_unpad::block_model::statistics = {};
  bert_unpad::block_model::block.switches = 0;
}
