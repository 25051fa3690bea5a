// ld, st, atom, red, cvta and asynchronous copies.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "gpu_model/ptx/access.h"
#include "gpu_model/ptx/decoder.h"
#include "gpu_model/ptx/ops_integer.h"

namespace bert_unpad::ptx {

// T: as it lies in memory; signed types are extended with their sign.
template <class T, Space kSpace>
void load(Warp& w, const Instruction& i, uint32_t lanes) {
  const auto bytes = static_cast<uint32_t>(sizeof(T)) * i.count;
  for_lanes(lanes, [&](int l) {
    const unsigned char* p = bytes_at<kSpace>(w, i, address_of(w, i, l), bytes, l, Access::kLoad);
    for (int k = 0; k < i.count; ++k) {
      T value;
      std::memcpy(&value, p + sizeof(T) * static_cast<size_t>(k), sizeof(T));
      unsigned char* out = w.file + i.a[1 + k];
      if (i.wide_data)
        reinterpret_cast<uint64_t*>(out)[l] = static_cast<uint64_t>(value);
      else
        reinterpret_cast<uint32_t*>(out)[l] = static_cast<uint32_t>(value);
    }
  });
}

template <class T, Space kSpace>
void store(Warp& w, const Instruction& i, uint32_t lanes) {
  const auto bytes = static_cast<uint32_t>(sizeof(T)) * i.count;
  for_lanes(lanes, [&](int l) {
    unsigned char* p = bytes_at<kSpace>(w, i, address_of(w, i, l), bytes, l, Access::kStore);
    for (int k = 0; k < i.count; ++k) {
      const unsigned char* in = w.file + i.a[1 + k];
      const T value = static_cast<T>(i.wide_data ? reinterpret_cast<const uint64_t*>(in)[l]
                                                 : reinterpret_cast<const uint32_t*>(in)[l]);
      std::memcpy(p + sizeof(T) * static_cast<size_t>(k), &value, sizeof(T));
    }
  });
}

// The state space of a memory instruction; generic addresses without one.
inline Space take_space(Statement& s) {
  if (s.take("global") || s.take("const")) return Space::kGlobal;
  if (s.take("shared") || s.take("shared::cta")) return Space::kShared;
  if (s.take("param") || s.take("param::entry") || s.take("param::func")) return Space::kParameter;
  if (s.take("local")) return Space::kLocal;
  return Space::kGeneric;
}

// What changes no result here: caching, ordering stronger than that of one block after the other.
inline void skip_cache_modifiers(Statement& s) {
  for (const char* name : {"volatile",
                           "relaxed",
                           "acquire",
                           "release",
                           "acq_rel",
                           "weak",
                           "cta",
                           "gpu",
                           "sys",
                           "ca",
                           "cg",
                           "cs",
                           "lu",
                           "cv",
                           "wb",
                           "wt",
                           "L1::no_allocate",
                           "L1::evict_last",
                           "L1::evict_first",
                           "L1::evict_normal",
                           "L1::evict_unchanged",
                           "L2::64B",
                           "L2::128B",
                           "L2::256B"})
    s.take(name);
}

inline void note_grain(Decoder& d, Space space, uint32_t bytes) {
  Kernel& kernel = d.kernel();
  if (space == Space::kShared || space == Space::kGeneric)
    kernel.grain = std::min(kernel.grain, bytes);
  if (space == Space::kGlobal || space == Space::kGeneric)
    kernel.global_grain = std::min(kernel.global_grain, bytes);
}

template <template <class, Space> class Access>
Handler for_space(Type type, Space space) {
  const auto of_type = [&]<class T>() -> Handler {
    switch (space) {
      case Space::kGlobal:
        return Access<T, Space::kGlobal>::run;
      case Space::kShared:
        return Access<T, Space::kShared>::run;
      case Space::kParameter:
        return Access<T, Space::kParameter>::run;
      case Space::kLocal:
        return Access<T, Space::kLocal>::run;
      case Space::kGeneric:
        return Access<T, Space::kGeneric>::run;
    }
    return nullptr;
  };
  if (type == Type::kU8) return of_type.template operator()<uint8_t>();
  if (type == Type::kS8) return of_type.template operator()<int8_t>();
  return for_integer(type, of_type);
}

template <class T, Space kSpace>
struct Load {
  static constexpr Handler run = load<T, kSpace>;
};
template <class T, Space kSpace>
struct Store {
  static constexpr Handler run = store<T, kSpace>;
};

inline void decode_access(Decoder& d, Statement& s, Instruction& i) {
  const bool is_load = s.base == "ld" || s.base == "ldu";
  const Space space = take_space(s);
  i.read_only = is_load && s.take("nc");
  if (i.read_only) d.kernel().has_read_only_loads = true;
  skip_cache_modifiers(s);
  i.count = s.take("v2") ? 2 : s.take("v4") ? 4 : s.take("v8") ? 8 : 1;
  Type type = parse_type(s.take_last());
  if (is_float(type)) type = as_bits(type);
  i.bytes = static_cast<uint8_t>(bits_of(type) / 8);
  d.address(s.operands.at(is_load ? 1 : 0), i, 0);
  const auto elements = Decoder::elements(s.operands.at(is_load ? 0 : 1));
  if (elements.size() != i.count) throw std::runtime_error("wrong number of elements");
  for (size_t k = 0; k < elements.size(); ++k) {
    unsigned bits = bits_of(type);
    if (!is_load)
      i.a[1 + k] = d.in_wider(elements[k], type, bits);
    else if (elements[k] == "_")
      i.a[1 + k] = d.out("_", bits);
    else
      i.a[1 + k] = d.out(elements[k], bits = std::max(bits, d.register_bits(elements[k])));
    i.wide_data = bits == 64;
  }
  note_grain(d, space, uint32_t{i.bytes} * i.count);
  i.run = is_load ? for_space<Load>(type, space) : for_space<Store>(type, space);
}

// A lane after the other, as atomics are ordered in some way.
template <class T, class F>
void atomic(Warp& w, const Instruction& i, uint32_t lanes, Space space, const F& f) {
  for_lanes(lanes, [&](int l) {
    const uint64_t address = address_of(w, i, l);
    unsigned char* p =
        space == Space::kShared ? shared_bytes(w, i, address, sizeof(T), l, Access::kAtomic)
        : space == Space::kGlobal
            ? global_bytes(w, i, address, sizeof(T), l, Access::kAtomic)
            : bytes_at<Space::kGeneric>(w, i, address, sizeof(T), l, Access::kAtomic);
    if (i.orders_blocks && w.block->accesses != nullptr) {
      View seen;
      w.block->clocks.leave(w.id, seen);
      w.block->accesses->order(address, w.block->number, seen.ordered.actors);
    }
    T old;
    std::memcpy(&old, p, sizeof(T));
    const T next = f(old, w.in<T>(i.a[2])[l], w.in<T>(i.a[3])[l]);
    std::memcpy(p, &next, sizeof(T));
    if (i.a[1] != kNoOffset) reinterpret_cast<Raw<T>*>(w.file + i.a[1])[l] = to_raw<T>(old);
  });
}

template <class T, auto kOperation, Space kSpace>
void run_atomic(Warp& w, const Instruction& i, uint32_t lanes) {
  atomic<T>(w, i, lanes, kSpace, kOperation);
}

template <class T, auto kOperation>
Handler atomic_in(Space space) {
  return space == Space::kShared   ? run_atomic<T, kOperation, Space::kShared>
         : space == Space::kGlobal ? run_atomic<T, kOperation, Space::kGlobal>
                                   : run_atomic<T, kOperation, Space::kGeneric>;
}

inline Handler atomic_handler(std::string_view op, Type type, Space space) {
  if (op == "add" && type == Type::kF32)
    return atomic_in<float, [](float x, float y, float) { return x + y; }>(space);
  if (op == "add" && type == Type::kF64)
    return atomic_in<double, [](double x, double y, double) { return x + y; }>(space);
  return for_integer(type, [&]<class T>() -> Handler {
    if (op == "add") return atomic_in<T, [](T x, T y, T) { return plus(x, y); }>(space);
    if (op == "min") return atomic_in<T, [](T x, T y, T) { return std::min(x, y); }>(space);
    if (op == "max") return atomic_in<T, [](T x, T y, T) { return std::max(x, y); }>(space);
    if (op == "and") return atomic_in<T, [](T x, T y, T) { return static_cast<T>(x & y); }>(space);
    if (op == "or") return atomic_in<T, [](T x, T y, T) { return static_cast<T>(x | y); }>(space);
    if (op == "xor") return atomic_in<T, [](T x, T y, T) { return static_cast<T>(x ^ y); }>(space);
    if (op == "exch") return atomic_in<T, [](T, T y, T) { return y; }>(space);
    if (op == "cas") return atomic_in<T, [](T x, T y, T z) { return x == y ? z : x; }>(space);
    if (op == "inc")
      return atomic_in<T, [](T x, T y, T) { return static_cast<T>(x >= y ? 0 : x + 1); }>(space);
    if (op == "dec")
      return atomic_in<T, [](T x, T y, T) {
        return static_cast<T>(x == 0 || x > y ? y : static_cast<T>(x - 1));
      }>(space);
    return nullptr;
  });
}

// atom has a destination, red has none.
inline void decode_atomic(Decoder& d, Statement& s, Instruction& i) {
  const bool returns = s.base == "atom";
  const Space space = take_space(s);
  i.orders_blocks = space == Space::kGlobal && s.take("acq_rel") && !s.take("cta");
  skip_cache_modifiers(s);
  s.take("noftz");
  const Type type = parse_type(s.take_last());
  const std::string_view op = s.take_last();
  size_t next = 0;
  i.a[1] = returns ? d.out(s.operands.at(next++), type) : kNoOffset;
  d.address(s.operands.at(next++), i, 0);
  i.a[2] = d.in(s.operands.at(next), type);
  i.a[3] = op == "cas" ? d.in(s.operands.at(next + 1), type) : i.a[2];
  note_grain(d, space, bits_of(type) / 8);
  i.run = atomic_handler(op, type, space);
}

// Between a window's own addresses and generic ones.
inline void decode_cvta(Decoder& d, Statement& s, Instruction& i) {
  const bool to = s.take("to");
  const Space space = take_space(s);
  const Type type = parse_type(s.take_last());
  if (type != Type::kU64) throw std::runtime_error("expected 64-bit addresses");
  const uint64_t window = space == Space::kShared      ? kSharedWindow
                          : space == Space::kParameter ? kParameterWindow
                          : space == Space::kLocal     ? kLocalWindow
                                                       : 0;
  i.immediate = static_cast<int64_t>(to ? 0 - window : window);
  i.a[0] = d.out(s.operands.at(0), type);
  i.a[1] = d.in(s.operands.at(1), type);
  i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
    const auto x = w.in<uint64_t>(i.a[1]);
    write_lanes<uint64_t>(w.file, i.a[0], lanes,
                          [&](int l) { return x[l] + static_cast<uint64_t>(i.immediate); });
  };
}

// A copy may read its source at once or as late as it lands.
inline void copy_async(Warp& w, const Instruction& i, uint32_t lanes) {
  const uint32_t bytes = i.bytes;
  for_lanes(lanes, [&](int l) {
    const uint64_t source =
        w.in<uint64_t>(i.a[1])[l] + static_cast<uint64_t>(i.source_displacement);
    const uint32_t filled = w.in<uint32_t>(i.a[2])[l];
    if (filled > bytes)
      w.fail(i, 1u << l,
             "asynchronous copy of " + std::to_string(filled) + " of " + std::to_string(bytes) +
                 " bytes");
    if (source % bytes != 0)
      w.fail(i, 1u << l,
             "asynchronous copy of " + std::to_string(bytes) +
                 " bytes from an address that is no multiple of that");
    unsigned char* to = shared_bytes(w, i, address_of(w, i, l), bytes, l, Access::kCopy);
    PendingCopy copy{static_cast<uint32_t>(to - w.block->shared.data(0)),
                     bytes,
                     filled,
                     static_cast<uint32_t>(l),
                     w.copy_groups[l],
                     accessor(w, i, l).pc,
                     w.copy_count++,
                     nullptr,
                     {}};  // zeros
    std::memset(to, 0xff, bytes);
    if (filled > 0) {
      // Of a part only what is read has to lie in a buffer.
      const void* from = global_bytes(w, i, source, filled == bytes ? bytes : 1, l, Access::kCopy);
      if (filled < bytes) global_bytes(w, i, source + filled - 1, 1, l, Access::kCopy);
      if (w.block->draw_early())
        std::memcpy(copy.data, from, filled);
      else
        copy.source = from;
    }
    w.copies.push_back(copy);
  });
}

inline void land_copy(Warp& w, const PendingCopy& copy) {
  SharedMemory& shared = w.block->shared;
  std::memcpy(shared.data(copy.offset), copy.data, copy.bytes);
  if (copy.source != nullptr) std::memcpy(shared.data(copy.offset), copy.source, copy.filled);
  shared.land_copy(copy.offset, copy.bytes, {w.id, copy.lane, false, copy.pc});
}

// Lands the copies of all committed groups of each lane but the youngest `pending`; of all groups,
// committed or not, if that is negative.
inline void copy_wait(Warp& w, const Instruction& i, uint32_t lanes) {
  if (!w.block->pass("copy_async_wait", w, i)) return;
  const int64_t pending = i.immediate;
  std::erase_if(w.copies, [&](const PendingCopy& copy) {
    if ((lanes >> copy.lane & 1) == 0) return false;
    if (pending >= 0 && copy.group + pending >= w.copy_groups[copy.lane]) return false;
    land_copy(w, copy);
    return true;
  });
}

inline void decode_copy(Decoder& d, Statement& s, Instruction& i) {
  if (!s.take("async")) throw std::runtime_error("only asynchronous copies are known");
  if (s.take("commit_group")) {
    i.run = [](Warp& w, const Instruction&, uint32_t lanes) {
      for_lanes(lanes, [&](int l) { ++w.copy_groups[l]; });
    };
  } else if (s.take("wait_group") || s.take("wait_all")) {
    i.immediate = s.operands.empty() ? -1 : d.number(s.operands[0]);
    i.run = copy_wait;
  } else {
    const bool global_only = s.take("cg");  // past L1
    if (!global_only && !s.take("ca")) throw std::runtime_error("unknown kind of copy");
    for (const char* name : {"shared", "shared::cta", "global"}) s.take(name);
    skip_cache_modifiers(s);
    Instruction source;
    d.address(s.operands.at(1), source, 0);
    i.a[1] = source.a[0];
    i.source_displacement = source.immediate;
    d.address(s.operands.at(0), i, 0);
    i.bytes = static_cast<uint8_t>(d.number(s.operands.at(2)));
    if (i.bytes != 16 && (global_only || (i.bytes != 4 && i.bytes != 8)))
      throw std::runtime_error(global_only ? "expected a copy of 16 bytes"
                                           : "expected a copy of 4, 8 or 16 bytes");
    note_grain(d, Space::kShared, i.bytes);
    note_grain(d, Space::kGlobal, i.bytes);
    i.a[2] = s.operands.size() > 3 ? d.in(s.operands[3], Type::kU32) : d.constant(i.bytes, false);
    i.run = copy_async;
  }
}

}  // namespace bert_unpad::ptx
