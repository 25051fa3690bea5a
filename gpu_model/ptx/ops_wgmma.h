// Tensor cores of sm_90a: wgmma, which a warpgroup issues and waits for later, and setmaxnreg.
//
// Lane l of warp w of the group, with g = l / 4, t = l % 4, holds (PTX ISA, "Register Fragments" of
// wgmma.mma_async.m64nNk16):
//   A [64 x 16], 16-bit: register i: row 16 w + g + 8 (i % 2), columns 2t + 8 (i / 2) and the next
//   D [64 x N], fp32:    register i: row 16 w + g + 8 (i / 2 % 2), column 8 (i / 4) + 2t + i % 2
#pragma once

#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "gpu_model/ptx/access.h"
#include "gpu_model/ptx/decoder.h"
#include "gpu_model/ptx/matrix_descriptor.h"
#include "gpu_model/ptx/ops_matrix.h"

namespace bert_unpad::ptx {

inline constexpr uint32_t kWarpRows = 16, kWgmmaDepth = 16, kMaxColumns = 256;

// f(address) of the 16-byte pieces of shared memory that an operation reads: of A for one of its
// warps, and of B.
template <class F>
void for_pieces_of_a(const WgmmaOperation& o, uint32_t warp, const F& f) {
  if (!o.form->a_in_registers)
    MatrixDescriptor::decode(o.a).for_pieces(
        o.form->a_k_major, warp * kWarpRows, kWarpRows,
        [&](uint32_t address, uint32_t, uint32_t) { f(address); });
}
template <class F>
void for_pieces_of_b(const WgmmaOperation& o, const F& f) {
  MatrixDescriptor::decode(o.b).for_pieces(
      o.form->b_k_major, 0, o.form->columns,
      [&](uint32_t address, uint32_t, uint32_t) { f(address); });
}

// Of 16-bit elements in shared memory as floats [row][16] or, `kByColumn`, [16][row].
template <class T, bool kByColumn, size_t kPitch>
void gather(Block& block, uint64_t bits, bool k_major, uint32_t first_row, uint32_t rows,
            float* to) {
  MatrixDescriptor::decode(bits).for_pieces(
      k_major, first_row, rows, [&](uint32_t address, uint32_t row, uint32_t column) {
        uint16_t elements[8];
        std::memcpy(elements, block.shared.data(address), sizeof(elements));
        for (uint32_t n = 0; n < 8; ++n) {
          const uint32_t r = row - first_row + (k_major ? 0 : n), k = column + (k_major ? n : 0);
          to[kByColumn ? k * kPitch + r : r * kPitch + k] = block_model::decode(T{elements[n]});
        }
      });
}

// Products are exact in fp32; the sums are rounded one by one, in the order of k.
template <class T>
void multiply(Block& block, uint32_t first_warp, const WgmmaOperation& o) {
  const WgmmaForm& form = *o.form;
  const Kernel& kernel = *block.kernel;
  static float b[kWgmmaDepth][kMaxColumns];
  gather<T, true, kMaxColumns>(block, o.b, form.b_k_major, 0, form.columns, b[0]);
  for (uint32_t warp = 0; warp < Warpgroup::kWarps; ++warp) {
    Warp& w = block.warps[first_warp + warp];
    unsigned char* const file = w.file;
    const auto offset = [&](uint32_t number) { return kernel.wgmma_registers[number].offset; };
    float a[kWarpRows][kWgmmaDepth], sums[kMaxColumns];
    if (form.a_in_registers) {
      for (uint32_t i = 0; i < 4; ++i) {
        const Source<uint32_t> words(file, offset(form.inputs[i]));
        for (uint32_t l = 0; l < kLanes; ++l)
          for (uint32_t n = 0; n < 2; ++n)
            a[l / 4 + 8 * (i % 2)][2 * (l % 4) + 8 * (i / 2) + n] =
                element<T>(words[static_cast<int>(l)], static_cast<int>(n));
      }
    } else {
      gather<T, false, kWgmmaDepth>(block, o.a, form.a_k_major, warp * kWarpRows, kWarpRows, a[0]);
    }
    for (uint32_t row = 0; row < kWarpRows; ++row) {
      const auto place = [&](uint32_t column) -> float& {
        const uint32_t number = form.sums[4 * (column / 8) + 2 * (row / 8) + column % 2];
        float* const lanes = block.is_late() ? &w.late_sums[size_t{number} * kLanes]
                                             : reinterpret_cast<float*>(file + offset(number));
        return lanes[4 * (row % 8) + column % 8 / 2];
      };
      for (uint32_t n = 0; n < form.columns; ++n) sums[n] = o.adds ? place(n) : 0;
      for (uint32_t k = 0; k < kWgmmaDepth; ++k) {
        const float left = form.negated ? -a[row][k] : a[row][k];
        for (uint32_t n = 0; n < form.columns; ++n) sums[n] += left * b[k][n];
      }
      for (uint32_t n = 0; n < form.columns; ++n) place(n) = sums[n];
    }
  }
}

// Lets all operations up to `end` happen, which all warps have issued.
inline void do_operations(Block& block, uint32_t number, uint64_t end) {
  block.warpgroups[number].for_operations(end, [&](WgmmaOperation& o, uint64_t) {
    if (o.done) return;
    o.done = true;
    const uint32_t first_warp = number * Warpgroup::kWarps;
    o.form->is_bf16 ? multiply<bf16>(block, first_warp, o) : multiply<f16>(block, first_warp, o);
  });
}

// The warpgroup that a warp belongs to, which executes `step` of the group's instructions.
inline Warpgroup& step_of(Warp& w, const Instruction& i, uint32_t lanes,
                          const Warpgroup::Step& step) {
  Block& block = *w.block;
  const uint32_t number = w.id / Warpgroup::kWarps;
  if (number >= block.warpgroups.size() || lanes != kAllLanes)
    w.fail(i, lanes, "an instruction of a warpgroup, but there are not 4 whole warps");
  Warpgroup& group = block.warpgroups[number];
  if (const auto* other = group.take_step(w.id % Warpgroup::kWarps, step); other != nullptr)
    w.fail(i, lanes,
           other->pc == step.pc
               ? "the warps of a warpgroup give different operands to one wgmma"
               : "the warps of a warpgroup have to execute the same, but another one came to " +
                     block.where(other->pc) + " in the place of this");
  return group;
}

inline uint64_t uniform(const Warp& w, const Instruction& i, uint32_t lanes, uint32_t offset) {
  const auto values = w.in<uint64_t>(offset);
  for_lanes(lanes, [&](int l) {
    if (values[l] != values[0])
      w.fail(i, 1u << l, "the lanes of a warp give different matrix descriptors");
  });
  return values[0];
}

// Fails unless a warp's part of an operation may read shared memory: its own rows of A, all of B.
inline void check_operands(Warp& w, const Instruction& i, const WgmmaOperation& o) {
  for (const uint64_t bits : {o.a, o.b})
    if (const std::string problem = MatrixDescriptor::problem(bits); !problem.empty())
      w.fail(i, kAllLanes, problem);
  SharedMemory& shared = w.block->shared;
  const Accessor by = accessor(w, i, 0, true);
  const auto check = [&](uint32_t piece) {
    if (!shared.in_range(piece, MatrixDescriptor::kPieceBytes))
      w.fail(i, kAllLanes, "wgmma" + shared.range_problem(piece, MatrixDescriptor::kPieceBytes));
    const auto conflict = shared.read_later(piece, MatrixDescriptor::kPieceBytes, by);
    if (conflict.what != SharedMemory::Problem::kNone) fail_conflict(w, i, 0, conflict, "wgmma");
  };
  for_pieces_of_a(o, w.id % Warpgroup::kWarps, check);
  for_pieces_of_b(o, check);
}

// Of late products: takes sums out of a warp's registers where the first wgmma begins that adds to
// them, and puts them back where the last one has been waited for.
inline void take_sums(Warp& w, const WgmmaForm& form) {
  for (const uint32_t number : form.sums) {
    if (w.wgmma_registers.flights(number) != 1) continue;
    unsigned char* const lanes = w.file + w.kernel->wgmma_registers[number].offset;
    std::memcpy(&w.late_sums[size_t{number} * kLanes], lanes, kLanes * sizeof(float));
    std::memset(lanes, 0xff, kLanes * sizeof(float));
  }
}
inline void give_sums(Warp& w, const WgmmaForm& form) {
  for (const uint32_t number : form.sums)
    if (w.wgmma_registers.flights(number) == 0)
      std::memcpy(w.file + w.kernel->wgmma_registers[number].offset,
                  &w.late_sums[size_t{number} * kLanes], kLanes * sizeof(float));
}

inline void wgmma(Warp& w, const Instruction& i, uint32_t lanes) {
  Block& block = *w.block;
  const WgmmaForm& form = w.kernel->wgmma[static_cast<size_t>(i.immediate)];
  const uint32_t pc = accessor(w, i, 0).pc, adds = w.pred(i.a[2]) ^ i.a[3];
  WgmmaOperation operation{pc, &form, 0, uniform(w, i, lanes, i.a[1]), (adds & 1) != 0};
  if (!form.a_in_registers) operation.a = uniform(w, i, lanes, i.a[0]);
  if (adds != 0 && adds != ~0u) w.fail(i, lanes, "the lanes of a warp differ in scale-d");
  Warpgroup& group = step_of(w, i, lanes, {pc, operation.a, operation.b, operation.adds});
  if (!w.wgmma_registers.fenced()) w.fail(i, lanes, "the first wgmma, with no wgmma.fence before");
  uint32_t number = 0, other = 0;
  if (const char* problem = w.wgmma_registers.start(form, pc, number, other); problem != nullptr)
    w.fail(i, lanes,
           "wgmma uses register " + w.kernel->wgmma_registers[number].name + " after a " + problem +
               ", at " + block.where(other));
  if (block.is_late()) take_sums(w, form);
  check_operands(w, i, operation);
  ++block.launch->statistics->collectives;
  const uint32_t warp = w.id % Warpgroup::kWarps;
  WgmmaOperation& own = group.issue(warp, operation);
  const auto hold = [&](uint32_t piece) { block.shared.hold(piece, accessor(w, i, 0, true)); };
  for_pieces_of_a(own, warp, hold);
  if (std::popcount(own.issued) == 1) for_pieces_of_b(own, hold);
  if (std::popcount(own.issued) != Warpgroup::kWarps) return;
  block.launch->statistics->mma += 4 * form.columns / 8;
  if (block.draw_early()) do_operations(block, w.id / Warpgroup::kWarps, group.issued(warp));
  block.wake(Warp::State::kAtWarpgroup);
}

// wgmma.wait_group; `immediate`: how many groups may be in flight.
inline void wgmma_wait(Warp& w, const Instruction& i, uint32_t lanes) {
  Block& block = *w.block;
  const uint32_t number = w.id / Warpgroup::kWarps, warp = w.id % Warpgroup::kWarps;
  const uint32_t pc = accessor(w, i, 0).pc;
  if (number < block.warpgroups.size()) {
    const Warpgroup& group = block.warpgroups[number];
    if (!group.all_issued(group.end_of_groups(warp, static_cast<uint64_t>(i.immediate)))) {
      w.state = Warp::State::kAtWarpgroup;  // comes here again
      w.pc = w.barrier_pc = pc;
      return;
    }
  }
  Warpgroup& group = step_of(w, i, lanes, {pc});
  if (!block.pass("wgmma_wait", w, i)) return;
  const uint64_t end = group.end_of_groups(warp, static_cast<uint64_t>(i.immediate));
  do_operations(block, number, end);
  const uint32_t actor = block.clocks.group(number);
  group.wait(warp, end, [&](WgmmaOperation& o, uint64_t at) {
    w.wgmma_registers.finish(*o.form);
    if (block.is_late()) give_sums(w, *o.form);
    if (std::exchange(o.waited_for, true)) return;
    const auto let_go = [&](uint32_t piece) {
      block.shared.let_go(piece, actor, static_cast<uint32_t>(at) + 1, o.pc);
    };
    for (uint32_t n = 0; n < Warpgroup::kWarps; ++n) for_pieces_of_a(o, n, let_go);
    for_pieces_of_b(o, let_go);
  });
  block.clocks.observe(w.id, actor, static_cast<uint32_t>(end) + 1);
}

// m64n{8 .. 256}k16
inline uint32_t columns_of_shape(std::string_view shape) {
  uint32_t columns = 0;
  if (shape.starts_with("m64n") && shape.ends_with("k16"))
    std::from_chars(shape.data() + 4, shape.data() + shape.size() - 3, columns);
  if (columns == 0 || columns > kMaxColumns || columns % 8 != 0)
    throw std::runtime_error("unknown shape of wgmma");
  return columns;
}

// Of the kernel's registers with sums and A, the number of one; `out` tells the decoder the rest.
inline uint32_t wgmma_register(Kernel& kernel, uint32_t offset, std::string_view name) {
  auto& all = kernel.wgmma_registers;
  for (size_t n = 0; n < all.size(); ++n)
    if (all[n].offset == offset) return static_cast<uint32_t>(n);
  all.push_back({offset, std::string(name)});
  return static_cast<uint32_t>(all.size()) - 1;
}

inline void decode_wgmma_product(Decoder& d, Statement& s, Instruction& i) {
  Kernel& kernel = d.kernel();
  const std::string_view b = s.take_last(), a = s.take_last(), sum = s.take_last();
  WgmmaForm form;
  form.is_bf16 = a == "bf16";
  if (a != b || sum != "f32" || (a != "bf16" && a != "f16"))
    throw std::runtime_error("unknown types of wgmma");
  form.columns = columns_of_shape(s.take_last());
  const auto sums = Decoder::elements(s.operands.at(0));
  if (sums.size() != form.columns / 2)
    throw std::runtime_error("expected " + std::to_string(form.columns / 2) + " registers of sums");
  for (const std::string_view name : sums)
    form.sums.push_back(wgmma_register(kernel, d.out(name, 32), name));
  form.a_in_registers = s.operands.at(1).starts_with('{');
  if (form.a_in_registers) {
    const auto inputs = Decoder::elements(s.operands[1]);
    if (inputs.size() != 4) throw std::runtime_error("expected 4 registers of A");
    for (const std::string_view name : inputs)
      form.inputs.push_back(wgmma_register(kernel, d.in(name, Type::kU32), name));
  } else {
    i.a[0] = d.in(s.operands[1], Type::kU64);
  }
  i.a[1] = d.in(s.operands.at(2), Type::kU64);
  std::string_view adds = s.operands.at(3);
  i.a[3] = adds.starts_with('!') ? ~0u : 0;
  if (adds.starts_with('!')) adds.remove_prefix(1);
  i.a[2] = d.predicate_in(trim(adds));
  const auto one_of = [&](size_t operand, int64_t low, int64_t high) {
    const int64_t value = d.number(s.operands.at(operand));
    if (value != low && value != high)
      throw std::runtime_error("expected " + std::to_string(low) + " or " + std::to_string(high) +
                               ", got " + std::to_string(value));
    return value == high;
  };
  form.negated = one_of(4, -1, 1) != one_of(5, -1, 1);
  if (!form.a_in_registers) form.a_k_major = !one_of(6, 0, 1);
  form.b_k_major = !one_of(form.a_in_registers ? 6 : 7, 0, 1);
  i.immediate = static_cast<int64_t>(kernel.wgmma.size());
  kernel.wgmma.push_back(std::move(form));
  i.run = wgmma;
}

inline void decode_wgmma(Decoder& d, Statement& s, Instruction& i) {
  i.kind = Kind::kCollective;
  const std::string kind(s.modifiers.empty() ? "" : s.modifiers.front());
  for (const std::string& name : {kind, std::string("sync"), std::string("aligned")})
    if (!s.take(name)) throw std::runtime_error("expected ." + name);
  if (kind == "mma_async") {
    decode_wgmma_product(d, s, i);
  } else if (kind == "fence") {
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      step_of(w, i, lanes, {accessor(w, i, 0).pc});
      if (w.block->pass("wgmma_fence", w, i)) w.wgmma_registers.fence();
    };
  } else if (kind == "commit_group") {
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      step_of(w, i, lanes, {accessor(w, i, 0).pc}).commit(w.id % Warpgroup::kWarps);
    };
  } else if (kind == "wait_group") {
    i.immediate = d.number(s.operands.at(0));
    i.run = wgmma_wait;
  }
}

// A hint; the registers of the interpreter are the PTX's own.
inline void decode_setmaxnreg(Decoder& d, Statement& s, Instruction& i) {
  i.kind = Kind::kCollective;
  for (const char* name : {"sync", "aligned", "u32"})
    if (!s.take(name)) throw std::runtime_error(std::string("expected .") + name);
  if (s.take("inc") == s.take("dec")) throw std::runtime_error("expected .inc or .dec");
  const int64_t count = d.number(s.operands.at(0));
  if (count < 24 || count > 256 || count % 8 != 0)
    throw std::runtime_error("expected a multiple of 8 from 24 to 256 registers, got " +
                             std::to_string(count));
  i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
    if (!w.block->warpgroups.empty()) step_of(w, i, lanes, {accessor(w, i, 0).pc});
  };
}

}  // namespace bert_unpad::ptx
