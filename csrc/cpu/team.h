// Threads that stay together for one call of an operator that has many short stages.
//
// Each parallel region costs some microseconds. If another process has a core, it also ends late:
// it waits for every thread to be given a core again, even one that had no task left. In a team the
// calling thread leads: it hands out the tasks of a stage, and waits only for tasks that another
// thread has begun. If it had to wait for long, it works alone for the next 100 ms.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <thread>

namespace bert_unpad {

class Team {
 public:
  // The team that the calling thread leads; null: none.
  static Team*& led() {
    thread_local Team* team = nullptr;
    return team;
  }

  // fn(i) for i in [0, n), n < 2^31, by the thread that leads, and by those that help. An exception
  // in one of them is thrown again here.
  template <class F>
  void run(int64_t n, const F& fn) {
    led() = nullptr;  // what a task runs in parallel is not the team's
    const auto begun = Clock::now();
    call_ = [](const void* f, int64_t i) { (*static_cast<const F*>(f))(i); };
    context_ = &fn;
    done_.store(0, std::memory_order_relaxed);
    // Released with the tasks, and read by who takes one of them.
    tasks_.store(static_cast<uint64_t>(n) << 32, std::memory_order_release);
    while (take_task()) continue;
    const auto since = Clock::now();
    wait([&] { return done_.load(std::memory_order_acquire) == n; });
    if (note_wait(since, 2 * (since - begun))) finish();
    led() = this;
    if (failed_.exchange(false)) std::rethrow_exception(error_);
  }

  using Clock = std::chrono::steady_clock;

  // Whether the cores were wanted by others, a short time ago.
  static bool crowded() { return Clock::now().time_since_epoch() < crowded_until().load(); }

  // Notes that the leader had to wait since then; returns whether that was for longer than `usual`,
  // the time that tasks of this length may take, by far.
  static bool note_wait(Clock::time_point since, Clock::duration usual) {
    constexpr std::chrono::microseconds kLong(500), kAlone(100'000);
    const auto now = Clock::now();
    if (now - since < usual + kLong) return false;
    crowded_until().store((now + kAlone).time_since_epoch());
    return true;
  }

  // Runs fn() on this thread, which leads meanwhile. Then, or after an exception, helpers go.
  template <class F>
  void lead(const F& fn) {
    struct Finish {
      Team& team;
      ~Finish() {
        led() = nullptr;
        team.finish();
      }
    } const finish{*this};
    led() = this;
    fn();
  }

  // Helps until the leader has finished.
  void help() {
    while (!finished_.load(std::memory_order_acquire))
      if (!open() || !take_task())
        wait([&] { return open() || finished_.load(std::memory_order_acquire); });
  }

 private:
  using Call = void (*)(const void*, int64_t);

  void finish() { finished_.store(true, std::memory_order_release); }

  // The number of tasks in the upper half, that of tasks taken in the lower; it may be larger.
  alignas(64) std::atomic<uint64_t> tasks_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  std::atomic<bool> finished_{false}, failed_{false};
  std::exception_ptr error_;
  Call call_ = nullptr;
  const void* context_ = nullptr;

  static std::atomic<Clock::duration>& crowded_until() {
    static std::atomic<Clock::duration> until{};
    return until;
  }
  static bool remain(uint64_t tasks) { return (tasks & 0xffffffffu) < tasks >> 32; }
  bool open() const { return remain(tasks_.load(std::memory_order_relaxed)); }

  bool take_task() {
    const uint64_t tasks = tasks_.fetch_add(1, std::memory_order_acq_rel);
    if (!remain(tasks)) return false;
    try {
      call_(context_, static_cast<int64_t>(tasks & 0xffffffffu));
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
    done_.fetch_add(1, std::memory_order_acq_rel);
    return true;
  }

  template <class Condition>
  static void wait(const Condition& met) {
    constexpr int kSpins = 2000;  // some ten microseconds; then others may have the core
    for (int i = 0; !met(); ++i) {
      if (i >= kSpins) std::this_thread::yield();
#if defined(__x86_64__)
      else
        __builtin_ia32_pause();
#elif defined(__aarch64__)
      else
        asm volatile("yield");
#endif
    }
  }
};

}  // namespace bert_unpad
