// Which registers wgmma in flight use, and which were used since the last wgmma.fence.
//
// No instruction may touch an accumulator, or a register with a part of A, before wgmma.wait_group
// has waited for the wgmma. And between any other use of such a register and a wgmma that uses it
// lies a wgmma.fence; wgmma of one shape may follow each other on the same accumulators without.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu_model/ptx/program.h"

namespace bert_unpad::ptx {

// Of one warp. Registers go by the numbers that Kernel::wgmma_registers gives them.
class WgmmaRegisters {
 public:
  void reset(size_t count) {
    registers_.assign(count, Register{});
    fenced_ = false;
  }

  // An instruction other than wgmma uses a register; false where it must not.
  bool touch(uint32_t number, uint32_t pc) {
    Register& r = registers_[number];
    if (r.flights != 0) return false;
    r.last = Use::kOther;
    r.last_pc = pc;
    return true;
  }
  // How many wgmma in flight use a register.
  uint32_t flights(uint32_t number) const { return registers_[number].flights; }
  uint32_t flight_pc(uint32_t number) const { return registers_[number].flight_pc; }

  void fence() {
    fenced_ = true;
    for (Register& r : registers_) r.last = Use::kNone;
  }
  bool fenced() const { return fenced_; }

  // A wgmma begins; null or the register that it may not use now. The instruction that stands
  // against that is in `other`.
  const char* start(const WgmmaForm& form, uint32_t pc, uint32_t& number, uint32_t& other) {
    for (const uint32_t n : form.sums)
      if (const char* problem = check(n, Use::kSum, form.columns, number, other)) return problem;
    for (const uint32_t n : form.inputs)
      if (const char* problem = check(n, Use::kInput, form.columns, number, other)) return problem;
    for (const uint32_t n : form.sums) take(n, Use::kSum, form.columns, pc);
    for (const uint32_t n : form.inputs) take(n, Use::kInput, form.columns, pc);
    return nullptr;
  }
  void finish(const WgmmaForm& form) {
    for (const uint32_t n : form.sums) --registers_[n].flights;
    for (const uint32_t n : form.inputs) --registers_[n].flights;
  }

 private:
  enum class Use : uint8_t { kNone, kOther, kSum, kInput };
  struct Register {
    Use last = Use::kNone;  // since the last fence
    Use flight = Use::kNone;
    uint16_t flights = 0;
    uint32_t columns = 0;  // of the last wgmma, which is its shape
    uint32_t last_pc = 0, flight_pc = 0;
  };

  const char* check(uint32_t number, Use use, uint32_t columns, uint32_t& at, uint32_t& other) {
    const Register& r = registers_[number];
    at = number;
    const bool follows = use == Use::kInput || r.columns == columns;
    if (r.flights != 0 && (r.flight != use || !follows)) {
      other = r.flight_pc;
      return "wgmma that was not waited for";
    }
    if (r.last != Use::kNone && (r.last != use || !follows)) {
      other = r.last_pc;
      return "use that no wgmma.fence follows";
    }
    return nullptr;
  }
  void take(uint32_t number, Use use, uint32_t columns, uint32_t pc) {
    Register& r = registers_[number];
    r.last = r.flight = use;
    ++r.flights;
    r.columns = columns;
    r.last_pc = r.flight_pc = pc;
  }

  std::vector<Register> registers_;
  bool fenced_ = false;
};

}  // namespace bert_unpad::ptx
