// Barriers, and what the lanes of a warp do together: shuffles, votes, reductions.
#pragma once

#include <cstdint>
#include <string>

#include "gpu_model/ptx/block.h"
#include "gpu_model/ptx/decoder.h"

namespace bert_unpad::ptx {

// bar{.cta}.sync and bar.arrive. bar is short for barrier.sync.aligned: all lanes of a warp come to
// the same one.
inline void decode_barrier(Decoder& d, Statement& s, Instruction& i) {
  i.kind = Kind::kCollective;
  s.take("cta");
  s.take("aligned");
  if (s.take("warp")) {
    if (!s.take("sync")) throw std::runtime_error("expected bar.warp.sync");
    i.members = d.in(s.operands.at(0), Type::kU32);
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      if (lanes != w.members)
        w.fail(i, lanes, "bar.warp.sync of some lanes only, which is not modelled");
      ++w.block->launch->statistics->collectives;
      if (w.block->pass("sync_warp", w, i)) w.block->clocks.sync(w.id);
    };
    return;
  }
  const bool waits = s.take("sync");
  if (!waits && !s.take("arrive")) throw std::runtime_error("unknown kind of barrier");
  i.wide = waits;
  i.a[0] = d.in(s.operands.at(0), Type::kU32);
  i.a[1] = s.operands.size() > 1 ? d.in(s.operands[1], Type::kU32) : d.constant(0, false);
  i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
    if (!w.block->pass("sync_block", w, i)) return;
    const int first = std::countr_zero(lanes);
    w.block->arrive(w, i, w.in<uint32_t>(i.a[0])[first], w.in<uint32_t>(i.a[1])[first], i.wide);
  };
}

enum class Shuffle : uint8_t { kUp, kDown, kButterfly, kIndex };

// The lane to read from, and whether it is in range (PTX ISA, shfl.sync): c holds a mask that
// splits the warp into segments, and a bound.
template <Shuffle kMode>
bool shuffle_source(int lane, uint32_t b, uint32_t c, int& source) {
  const int bound = static_cast<int>(c & 31), segment = static_cast<int>(c >> 8 & 31);
  const int most = (lane & segment) | (bound & ~segment), least = lane & segment;
  const int step = static_cast<int>(b & 31);
  bool in_range = false;
  if constexpr (kMode == Shuffle::kUp) {
    source = lane - step;
    in_range = source >= most;
  } else if constexpr (kMode == Shuffle::kDown) {
    source = lane + step;
    in_range = source <= most;
  } else if constexpr (kMode == Shuffle::kButterfly) {
    source = lane ^ step;
    in_range = source <= most;
  } else {
    source = least | (step & ~segment);
    in_range = source <= most;
  }
  if (!in_range) source = lane;
  return in_range;
}

template <Shuffle kMode>
void shuffle(Warp& w, const Instruction& i, uint32_t lanes) {
  ++w.block->launch->statistics->collectives;
  const auto value = w.in<uint32_t>(i.a[2]), b = w.in<uint32_t>(i.a[3]);
  const auto c = w.in<uint32_t>(i.a[4]);
  uint32_t result[kLanes] = {}, in_range = 0;
  for_lanes(lanes, [&](int l) {
    int source = l;
    in_range |= static_cast<uint32_t>(shuffle_source<kMode>(l, b[l], c[l], source)) << l;
    if ((lanes >> source & 1) == 0)
      w.fail(i, 1u << l,
             "reads from lane " + std::to_string(source) + ", which takes no part in the shuffle");
    result[l] = value[source];
  });
  write_lanes<uint32_t>(w.file, i.a[0], lanes, [&](int l) { return result[l]; });
  if (i.a[1] != kNoOffset) write_predicate(w.file, i.a[1], lanes, in_range);
}

inline void decode_shuffle(Decoder& d, Statement& s, Instruction& i) {
  i.kind = Kind::kCollective;
  s.take("sync");
  s.take("b32");
  const std::string_view mode = s.take_last();
  i.run = mode == "bfly"   ? shuffle<Shuffle::kButterfly>
          : mode == "up"   ? shuffle<Shuffle::kUp>
          : mode == "down" ? shuffle<Shuffle::kDown>
          : mode == "idx"  ? shuffle<Shuffle::kIndex>
                           : nullptr;
  const std::string_view out = s.operands.at(0);
  const size_t bar = out.find('|');
  i.a[0] = d.out(trim(out.substr(0, bar)), 32);
  i.a[1] = bar == std::string_view::npos ? kNoOffset : d.predicate_out(trim(out.substr(bar + 1)));
  for (size_t k = 1; k < 4; ++k) i.a[1 + k] = d.in(s.operands.at(k), Type::kU32);
  i.members = d.in(s.operands.at(4), Type::kU32);
}

// vote.sync: the source predicate may be negated.
template <class F>
void vote(Warp& w, const Instruction& i, uint32_t lanes, const F& f) {
  ++w.block->launch->statistics->collectives;
  f((w.pred(i.a[1]) ^ i.a[2]) & lanes);
}

inline void decode_vote(Decoder& d, Statement& s, Instruction& i) {
  i.kind = Kind::kCollective;
  s.take("sync");
  const bool ballot = s.take("ballot");
  s.take(ballot ? "b32" : "pred");
  std::string_view source = s.operands.at(1);
  i.a[2] = source.starts_with('!') ? ~0u : 0;
  if (source.starts_with('!')) source.remove_prefix(1);
  i.a[1] = d.predicate_in(trim(source));
  i.members = d.in(s.operands.at(2), Type::kU32);
  if (ballot) {
    i.a[0] = d.out(s.operands[0], 32);
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      vote(w, i, lanes, [&](uint32_t votes) {
        write_lanes<uint32_t>(w.file, i.a[0], lanes, [&](int) { return votes; });
      });
    };
    return;
  }
  i.a[0] = d.predicate_out(s.operands[0]);
  const std::string_view mode = s.take_last();
  if (mode == "all")
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      vote(w, i, lanes, [&](uint32_t votes) {
        write_predicate(w.file, i.a[0], lanes, votes == lanes ? ~0u : 0);
      });
    };
  if (mode == "any")
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      vote(w, i, lanes,
           [&](uint32_t votes) { write_predicate(w.file, i.a[0], lanes, votes != 0 ? ~0u : 0); });
    };
  if (mode == "uni")
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      vote(w, i, lanes, [&](uint32_t votes) {
        write_predicate(w.file, i.a[0], lanes, votes == lanes || votes == 0 ? ~0u : 0);
      });
    };
}

template <class T, auto kOperation>
void reduce(Warp& w, const Instruction& i, uint32_t lanes) {
  ++w.block->launch->statistics->collectives;
  const auto x = w.in<T>(i.a[1]);
  T total = x[std::countr_zero(lanes)];
  for_lanes(lanes & (lanes - 1), [&](int l) { total = kOperation(total, x[l]); });
  write_lanes<T>(w.file, i.a[0], lanes, [&](int) { return total; });
}

inline void decode_redux(Decoder& d, Statement& s, Instruction& i) {
  i.kind = Kind::kCollective;
  s.take("sync");
  const std::string_view name = s.take_last(), op = s.take_last();
  const bool bitwise = op == "and" || op == "or" || op == "xor";
  if (bitwise ? name != "b32" : name != "u32" && name != "s32")
    throw std::runtime_error("unknown type of redux");
  const Type type = parse_type(name);
  i.a[0] = d.out(s.operands.at(0), type);
  i.a[1] = d.in(s.operands.at(1), type);
  i.members = d.in(s.operands.at(2), Type::kU32);
  const bool is_signed = type == Type::kS32;
  if (op == "add") i.run = reduce<uint32_t, [](uint32_t x, uint32_t y) { return x + y; }>;
  if (op == "and") i.run = reduce<uint32_t, [](uint32_t x, uint32_t y) { return x & y; }>;
  if (op == "or") i.run = reduce<uint32_t, [](uint32_t x, uint32_t y) { return x | y; }>;
  if (op == "xor") i.run = reduce<uint32_t, [](uint32_t x, uint32_t y) { return x ^ y; }>;
  if (op == "min")
    i.run = is_signed ? reduce<int32_t, [](int32_t x, int32_t y) { return std::min(x, y); }>
                      : reduce<uint32_t, [](uint32_t x, uint32_t y) { return std::min(x, y); }>;
  if (op == "max")
    i.run = is_signed ? reduce<int32_t, [](int32_t x, int32_t y) { return std::max(x, y); }>
                      : reduce<uint32_t, [](uint32_t x, uint32_t y) { return std::max(x, y); }>;
}

inline void decode_activemask(Decoder& d, Statement& s, Instruction& i) {
  s.take("b32");
  i.a[0] = d.out(s.operands.at(0), 32);
  i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
    write_lanes<uint32_t>(w.file, i.a[0], lanes, [&](int) { return lanes; });
  };
}

// One lane, the lowest that takes part, gets a true predicate; all get its number.
inline void decode_elect(Decoder& d, Statement& s, Instruction& i) {
  i.kind = Kind::kCollective;
  s.take("sync");
  const std::string_view out = s.operands.at(0);
  const size_t bar = out.find('|');
  if (bar == std::string_view::npos) throw std::runtime_error("expected d|p");
  i.a[0] = d.out(trim(out.substr(0, bar)), 32);
  i.a[1] = d.predicate_out(trim(out.substr(bar + 1)));
  i.members = d.in(s.operands.at(1), Type::kU32);
  i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
    const auto leader = static_cast<uint32_t>(std::countr_zero(lanes));
    write_lanes<uint32_t>(w.file, i.a[0], lanes, [&](int) { return leader; });
    write_predicate(w.file, i.a[1], lanes, 1u << leader);
  };
}

}  // namespace bert_unpad::ptx
