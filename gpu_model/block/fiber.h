// Switching between the stacks of a block's threads.
//
// A switch must cost nanoseconds, because there are 32 of them for every warp-wide instruction. On
// x86-64 it is a dozen instructions; elsewhere it is _setjmp and _longjmp (swapcontext would make a
// system call each time: four times slower overall).
//
// A thread that is abandoned after an error is never unwound: what a kernel keeps on its stack has
// to be trivially destructible, as on a GPU.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if defined(__x86_64__) && !defined(BU_FIBER_SETJMP)
#define BU_FIBER_ASM 1
#else
#define BU_FIBER_ASM 0
#include <setjmp.h>
#include <ucontext.h>
#endif

#if BU_FIBER_ASM
extern "C" void bu_switch_stack(void** from, void* to);
// At top level, so that the compiler takes it for a function that may change anything.
asm(R"(
  .pushsection .text
  .weak bu_switch_stack
  .hidden bu_switch_stack
  .type bu_switch_stack, @function
bu_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size bu_switch_stack, . - bu_switch_stack
  .popsection
)");
#endif

namespace bert_unpad::block_model {

// A suspended thread of execution.
class Fiber {
 public:
  // The next switch to it calls `entry`, which never returns, on the stack that ends at `top`.
  void prepare(char* bottom, char* top, void (*entry)());
  static void switch_to(Fiber& from, Fiber& to);

 private:
#if BU_FIBER_ASM
  void* stack_ = nullptr;
#else
  jmp_buf point_;
  ucontext_t start_;
  bool fresh_ = false;
#endif
};

#if BU_FIBER_ASM
inline void Fiber::prepare(char*, char* top, void (*entry)()) {
  // As a function's first instruction finds it: a return address at 8 below a multiple of 16.
  auto** word = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15});
  *--word = nullptr;
  *--word = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--word = nullptr;  // the saved registers
  stack_ = word;
}

inline void Fiber::switch_to(Fiber& from, Fiber& to) { bu_switch_stack(&from.stack_, to.stack_); }
#else
inline void Fiber::prepare(char* bottom, char* top, void (*entry)()) {
  getcontext(&start_);
  start_.uc_stack.ss_sp = bottom;
  start_.uc_stack.ss_size = static_cast<size_t>(top - bottom);
  start_.uc_link = nullptr;
  makecontext(&start_, entry, 0);
  fresh_ = true;
}

inline void Fiber::switch_to(Fiber& from, Fiber& to) {
  if (_setjmp(from.point_) != 0) return;
  if (to.fresh_) {
    to.fresh_ = false;
    setcontext(&to.start_);
  }
  _longjmp(to.point_, 1);
}
#endif

// Stacks for the threads of a block, kept from launch to launch. Below each lies a page that may
// not be touched.
class Stacks {
 public:
  static constexpr size_t kBytes = 128 * 1024;

  Stacks() = default;
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  ~Stacks() { release(); }

  void reserve(unsigned count) {
    if (count <= count_) return;
    release();
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, count * kBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<char*>(memory);
    count_ = count;
    guard_ = page;
    for (unsigned i = 0; i < count; ++i) mprotect(memory_ + i * kBytes, page, PROT_NONE);
  }

  char* bottom(unsigned i) const { return memory_ + i * kBytes + guard_; }
  // Tops at the same offset within a page would all fall into the same lines of the L1 cache.
  char* top(unsigned i) const { return memory_ + (i + 1) * kBytes - (i % 16) * 192; }

 private:
  void release() {
    if (memory_ != nullptr) munmap(memory_, count_ * kBytes);
    memory_ = nullptr;
    count_ = 0;
  }

  char* memory_ = nullptr;
  unsigned count_ = 0;
  size_t guard_ = 0;
};

}  // namespace bert_unpad::block_model
