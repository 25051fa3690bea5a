// Thread-level helpers for the CPU bindings, on PyTorch's own thread pool.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "cpu/team.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace bert_unpad {

// fn(first, last) for ranges of [begin, end), at least `grain` long, in parallel. An exception in
// one of them is thrown again here; PyTorch would replace its message.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& fn) {
  std::atomic<bool> failed{false};
  std::exception_ptr error;
  torch::stable::parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    try {
      fn(first, last);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

// fn(i) for i in [0, n), handed out one by one in order, so that unequal tasks sorted longest first
// keep all threads busy. Which thread runs a task must not change its result.
template <class F>
void parallel_tasks(int64_t n, const F& fn) {
  if (Team* team = Team::led()) return team->run(n, fn);
  std::atomic<int64_t> next{0};
  const int64_t threads = torch::stable::get_num_threads();
  parallel_for(0, threads < n ? threads : n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker)
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) fn(i);
  });
}

// Runs lead() on this thread. All threads help with the tasks that it gives to `parallel_tasks`.
template <class F>
void with_team(const F& lead) {
  Team team;
  Team::Clock::time_point end;
  const int64_t threads = Team::crowded() ? 1 : torch::stable::get_num_threads();
  parallel_for(0, threads, 1, [&](int64_t worker, int64_t) {
    if (worker != 0) return team.help();
    team.lead(lead);
    end = Team::Clock::now();
  });
  Team::note_wait(end, {});
}

// Scratch memory of the calling thread, at least `floats` long, 64-byte aligned, kept for the next
// call: fresh pages for every call cost more than small kernels do. Each `kUse` has its own.
template <int kUse = 0>
float* thread_scratch(int64_t floats) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<float, Free> buffer;
  thread_local int64_t capacity = 0;
  if (floats > capacity) {
    const int64_t bytes = (floats * 4 + 4095) / 4096 * 4096;
    buffer.reset();
    capacity = 0;
    buffer.reset(static_cast<float*>(std::aligned_alloc(4096, bytes)));
    if (!buffer)
      throw std::runtime_error("out of memory: a thread could not get " + std::to_string(bytes) +
                               " bytes of scratch memory");
    capacity = bytes / 4;
  }
#if defined(__SANITIZE_ADDRESS__)
  // Of a larger earlier call; to AddressSanitizer it is all one allocation.
  ASAN_UNPOISON_MEMORY_REGION(buffer.get(), capacity * 4);
  ASAN_POISON_MEMORY_REGION(buffer.get() + floats, (capacity - floats) * 4);
#endif
  return buffer.get();
}

}  // namespace bert_unpad
