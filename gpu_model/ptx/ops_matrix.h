// Tensor cores of sm_80: mma.sync, and ldmatrix and stmatrix between shared memory and its layout.
//
// Lane l with g = l / 4, t = l % 4 holds (PTX ISA, "Matrix Fragments for mma"):
//   A [16 x k], 16-bit: register i: row g + 8 (i % 2), columns 2t + 8 (i / 2) and the next
//   A [16 x k], tf32:   register i: row g + 8 (i % 2), column t + 4 (i / 2)
//   B [k x 8], 16-bit:  register i: rows 2t + 8 i and the next, column g
//   B [k x 8], tf32:    register i: row t + 4 i, column g
//   C [16 x 8], fp32:   register i: row g + 8 (i / 2), column 2t + i % 2
//   C [16 x 8], fp16:   register i: row g + 8 i, columns 2t and the next
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "gpu_model/block/convert.h"
#include "gpu_model/ptx/access.h"
#include "gpu_model/ptx/decoder.h"

namespace bert_unpad::ptx {

struct TF32 {
  uint32_t bits;
};

// A register's elements: two of 16 bits, or one of tf32, whose last 13 bits are not looked at.
template <class T>
inline constexpr int kElements = sizeof(T) == 2 ? 2 : 1;

template <class T>
float element(uint32_t word, int n) {
  if constexpr (sizeof(T) == 2)
    return block_model::decode(T{static_cast<uint16_t>(word >> (16 * n))});
  else
    return std::bit_cast<float>(word & 0xffffe000u);
}

// Products of two such values are exact in fp32; the sums are rounded one by one, in the order of
// k. C: fp32 or fp16. a: registers of D, A, B, C one after the other.
template <class T, int kDepth, class C>
void mma(Warp& w, const Instruction& i, uint32_t lanes) {
  using Row = float __attribute__((vector_size(32)));  // GCC's and Clang's
  constexpr int kPer = kElements<T>, kStep = 4 * kPer;
  constexpr int kA = 2 * kDepth / kStep, kB = kDepth / kStep, kC = sizeof(C) == 4 ? 4 : 2;
  if (lanes != kAllLanes) w.fail(i, lanes, "mma by a warp of less than 32 threads");
  ++w.block->launch->statistics->collectives;
  ++w.block->launch->statistics->mma;
  float a[16][kDepth], b[kDepth][8], c[16][8];
  for (int k = 0; k < kA; ++k) {
    const auto words = w.in<uint32_t>(i.a[kC + k]);
    for (int l = 0; l < kLanes; ++l)
      for (int n = 0; n < kPer; ++n)
        a[l / 4 + 8 * (k % 2)][kPer * (l % 4) + kStep * (k / 2) + n] = element<T>(words[l], n);
  }
  for (int k = 0; k < kB; ++k) {
    const auto words = w.in<uint32_t>(i.a[kC + kA + k]);
    for (int l = 0; l < kLanes; ++l)
      for (int n = 0; n < kPer; ++n)
        b[kPer * (l % 4) + kStep * k + n][l / 4] = element<T>(words[l], n);
  }
  for (int k = 0; k < kC; ++k) {
    const uint32_t in = i.a[kC + kA + kB + k];
    for (int l = 0; l < kLanes; ++l) {
      if constexpr (kC == 4) {
        c[l / 4 + 8 * (k / 2)][2 * (l % 4) + k % 2] = w.in<float>(in)[l];
      } else {
        for (int n = 0; n < 2; ++n)
          c[l / 4 + 8 * k][2 * (l % 4) + n] = element<f16>(w.in<uint32_t>(in)[l], n);
      }
    }
  }
  for (int row = 0; row < 16; ++row) {
    Row sum, right;
    std::memcpy(&sum, c[row], sizeof(sum));
    for (int k = 0; k < kDepth; ++k) {
      std::memcpy(&right, b[k], sizeof(right));
      sum += a[row][k] * right;
    }
    std::memcpy(c[row], &sum, sizeof(sum));
  }
  for (int k = 0; k < kC; ++k) {
    if constexpr (kC == 4) {
      write_lanes<float>(w.file, i.a[k], lanes,
                         [&](int l) { return c[l / 4 + 8 * (k / 2)][2 * (l % 4) + k % 2]; });
    } else {
      write_lanes<uint32_t>(w.file, i.a[k], lanes, [&](int l) {
        const float* pair = &c[l / 4 + 8 * k][2 * (l % 4)];
        return block_model::encode<f16>(pair[0]).bits |
               static_cast<uint32_t>(block_model::encode<f16>(pair[1]).bits) << 16;
      });
    }
  }
}

inline void decode_mma(Decoder& d, Statement& s, Instruction& i) {
  i.kind = Kind::kCollective;
  for (const char* name : {"sync", "aligned", "row", "col"})
    if (!s.take(name)) throw std::runtime_error(std::string("expected .") + name);
  const bool half_sums = s.modifiers.size() == 5 && s.modifiers[1] == "f16";
  const Type sum = half_sums ? Type::kF16x2 : Type::kF32;
  const std::string_view c = s.take_last(), b = s.take_last(), a = s.take_last();
  const std::string_view out = s.take_last();
  if (a != b || c != out || (c != "f32" && c != "f16"))
    throw std::runtime_error("unknown types of mma");
  const std::string_view shape = s.take_last();
  const auto is = [&](std::string_view type, std::string_view of_shape) {
    return a == type && shape == of_shape;
  };
  if (!half_sums) {
    if (is("bf16", "m16n8k16")) i.run = mma<bf16, 16, float>;
    if (is("bf16", "m16n8k8")) i.run = mma<bf16, 8, float>;
    if (is("f16", "m16n8k16")) i.run = mma<f16, 16, float>;
    if (is("f16", "m16n8k8")) i.run = mma<f16, 8, float>;
    if (is("tf32", "m16n8k8")) i.run = mma<TF32, 8, float>;
    if (is("tf32", "m16n8k4")) i.run = mma<TF32, 4, float>;
  } else {
    if (is("f16", "m16n8k16")) i.run = mma<f16, 16, f16>;
    if (is("f16", "m16n8k8")) i.run = mma<f16, 8, f16>;
  }
  if (i.run == nullptr) throw std::runtime_error("unknown shape of mma");
  const size_t sums = half_sums ? 2 : 4;
  const size_t depth = shape == "m16n8k16" ? 16 : shape == "m16n8k8" ? 8 : 4;
  const size_t step = a == "tf32" ? 4 : 8;
  const size_t sizes[] = {sums, 2 * depth / step, depth / step, sums};
  size_t next = 0;
  for (size_t matrix = 0; matrix < 4; ++matrix) {
    const auto elements = Decoder::elements(s.operands.at(matrix));
    if (elements.size() != sizes[matrix])
      throw std::runtime_error("wrong number of registers of a matrix");
    for (const std::string_view name : elements)
      i.a[next++] = matrix == 0 ? d.out(name, 32) : d.in(name, matrix == 3 ? sum : Type::kU32);
  }
}

// Extra cycles for 8 rows of 16 bytes: all rows of one group of 4 banks go one by one, but the same
// row twice is read once.
inline int bank_conflicts(const uint64_t* rows) {
  int rows_of_group[8] = {}, most = 1;
  for (int row = 0; row < 8; ++row) {
    const bool repeated = std::find(rows, rows + row, rows[row]) != rows + row;
    int& count = rows_of_group[rows[row] / 16 % 8];
    count += !repeated;
    most = std::max(most, count);
  }
  return most - 1;
}

// Lane 8 m + r gives the address of row r of matrix m. A row's parts go to four lanes, so the whole
// warp reads it.
template <bool kTransposed>
void load_matrices(Warp& w, const Instruction& i, uint32_t lanes) {
  if (lanes != kAllLanes) w.fail(i, lanes, "ldmatrix by a warp of less than 32 threads");
  block_model::Statistics& statistics = *w.block->launch->statistics;
  ++statistics.collectives;
  ++statistics.load_matrices;
  SharedMemory& shared = w.block->shared;
  uint16_t matrices[4][8][8];
  for (int m = 0; m < i.count; ++m) {
    uint64_t rows[8];
    for (int row = 0; row < 8; ++row) {
      const int lane = 8 * m + row;
      rows[row] = address_of(w, i, lane) & kWindowMask;
      const uint64_t offset = rows[row] - kSharedBase;
      if (!shared.in_range(offset, 16))
        w.fail(i, 1u << lane, "ldmatrix" + shared.range_problem(offset, 16));
      const auto at = static_cast<uint32_t>(offset);
      const auto conflict = shared.read(at, 16, accessor(w, i, lane, true));
      if (conflict.what != SharedMemory::Problem::kNone)
        fail_conflict(w, i, lane, conflict, "ldmatrix");
      std::memcpy(matrices[m][row], shared.data(at), 16);
    }
    statistics.bank_conflict_cycles += bank_conflicts(rows);
  }
  for (int m = 0; m < i.count; ++m) {
    write_lanes<uint32_t>(w.file, i.a[1 + m], lanes, [&](int l) {
      const int row = l / 4, column = 2 * (l % 4);
      const auto& x = matrices[m];
      const uint32_t low = kTransposed ? x[column][row] : x[row][column];
      return low | static_cast<uint32_t>(kTransposed ? x[column + 1][row] : x[row][column + 1])
                       << 16;
    });
  }
}

template <bool kTransposed>
void store_matrices(Warp& w, const Instruction& i, uint32_t lanes) {
  if (lanes != kAllLanes) w.fail(i, lanes, "stmatrix by a warp of less than 32 threads");
  ++w.block->launch->statistics->collectives;
  for (int m = 0; m < i.count; ++m) {
    uint16_t matrix[8][8];
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t pair = w.in<uint32_t>(i.a[1 + m])[l];
      for (int n = 0; n < 2; ++n) {
        const int row = l / 4, column = 2 * (l % 4) + n;
        (kTransposed ? matrix[column][row] : matrix[row][column]) =
            static_cast<uint16_t>(pair >> (16 * n));
      }
    }
    for (int row = 0; row < 8; ++row) {
      const int lane = 8 * m + row;
      std::memcpy(
          shared_bytes(w, i, address_of(w, i, lane) & kWindowMask, 16, lane, Access::kStore),
          matrix[row], 16);
    }
  }
}

inline void decode_matrices(Decoder& d, Statement& s, Instruction& i) {
  const bool is_load = s.base == "ldmatrix";
  i.kind = Kind::kCollective;
  for (const char* name : {"sync", "aligned", "m8n8", "b16"})
    if (!s.take(name)) throw std::runtime_error(std::string("expected .") + name);
  s.take("shared");
  s.take("shared::cta");
  i.count = s.take("x4") ? 4 : s.take("x2") ? 2 : s.take("x1") ? 1 : 0;
  const bool transposed = s.take("trans");
  d.address(s.operands.at(is_load ? 1 : 0), i, 0);
  const auto elements = Decoder::elements(s.operands.at(is_load ? 0 : 1));
  if (elements.size() != i.count) throw std::runtime_error("wrong number of registers");
  for (size_t m = 0; m < elements.size(); ++m)
    i.a[1 + m] = is_load ? d.out(elements[m], 32) : d.in(elements[m], Type::kU32);
  if (is_load)
    i.run = transposed ? load_matrices<true> : load_matrices<false>;
  else
    i.run = transposed ? store_matrices<true> : store_matrices<false>;
}

}  // namespace bert_unpad::ptx
