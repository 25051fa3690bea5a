// From names in PTX to places in a register file.
#pragma once

#include <charconv>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gpu_model/ptx/program.h"
#include "gpu_model/ptx/registers.h"
#include "gpu_model/ptx/statement.h"

namespace bert_unpad::ptx {

// The address that a name in memory stands for, in its own window.
struct Symbol {
  uint64_t address;
};

class Decoder {
 public:
  Decoder(Kernel& kernel, const std::unordered_map<std::string, Symbol>& symbols)
      : kernel_(kernel), module_symbols_(symbols) {
    scopes_.push_back({});
  }

  // Scopes: an inline asm block's registers are its own.
  void open_scope() {
    scopes_.push_back({current_, {}});
    current_ = scopes_.size() - 1;
  }
  void close_scope() {
    if (current_ == 0) throw std::runtime_error("PTX: a scope is closed twice");
    current_ = scopes_[current_].parent;
  }
  size_t scope() const { return current_; }
  size_t parent(size_t scope) const { return scopes_[scope].parent; }

  // ".reg .b32 %r<53>" and ".reg .f16 low, high".
  void declare(Type type, std::string_view list) {
    for (std::string_view name : split(list)) {
      const size_t angle = name.find('<');
      auto& registers = scopes_[current_].registers;
      if (angle == std::string_view::npos) {
        registers[std::string(name)] = {type, kNoOffset};
        continue;
      }
      unsigned count = 0;
      std::from_chars(name.data() + angle + 1, name.data() + name.size(), count);
      for (unsigned i = 0; i < count; ++i)
        registers[std::string(name.substr(0, angle)) + std::to_string(i)] = {type, kNoOffset};
    }
  }
  void declare_symbol(std::string_view name, uint64_t address) {
    symbols_[std::string(name)] = {address};
  }

  // A register that is written: `bits` wide, or wider where the instruction allows it.
  uint32_t out(std::string_view name, unsigned bits) { return use(name, bits, false); }
  uint32_t out(std::string_view name, Type type) { return out(name, bits_of(type)); }

  // A register, constant or symbol that is read as `type`.
  uint32_t in(std::string_view text, Type type) {
    if (text.empty()) throw std::runtime_error("an operand is missing");
    if (is_register(text)) return use(text, bits_of(type), false);
    if (const auto kind = special(text); kind >= 0) return special_offset(kind);
    return constant(value_of(text, type), bits_of(type) == 64);
  }

  // The same, but the register may be wider: st and cvt take its lower bits.
  uint32_t in_wider(std::string_view text, Type type, unsigned& bits) {
    bits = is_register(text) ? register_bits(text) : bits_of(type);
    return is_register(text) ? use(text, bits, false) : in(text, type);
  }

  uint32_t predicate_in(std::string_view text) {
    if (is_register(text)) return use(text, 1, true);
    int64_t value = 0;
    parse_integer(text, value);
    return constant(value != 0 ? ~uint64_t{0} : 0, false);
  }
  uint32_t predicate_out(std::string_view text) { return use(text, 1, true); }

  // 16 for registers of 8 bits too.
  unsigned register_bits(std::string_view name) const {
    const Register* found = find(name);
    if (found == nullptr) throw std::runtime_error("unknown register " + std::string(name));
    return bits_of(found->type);
  }
  bool is_register(std::string_view name) const { return find(name) != nullptr; }

  // "[%rd2+16]", "[name+8]", "[64]": a register or constant and a displacement.
  void address(std::string_view text, Instruction& i, int operand) {
    if (!text.starts_with('[') || !text.ends_with(']'))
      throw std::runtime_error("expected an address in brackets, got " + std::string(text));
    text = trim(text.substr(1, text.size() - 2));
    const size_t plus = text.find('+');
    i.immediate = 0;
    if (plus != std::string_view::npos) {
      if (!parse_integer(trim(text.substr(plus + 1)), i.immediate))
        throw std::runtime_error("expected a number in the address " + std::string(text));
      text = trim(text.substr(0, plus));
    }
    i.wide = !is_register(text) || register_bits(text) == 64;
    i.a[operand] = in(text, i.wide ? Type::kU64 : Type::kU32);
  }

  // "{%r1, %r2}" or one register.
  static std::vector<std::string_view> elements(std::string_view text) {
    if (!text.starts_with('{')) return {text};
    return split(text.substr(1, text.size() - 2));
  }

  int64_t number(std::string_view text) const {
    int64_t value = 0;
    if (!parse_integer(text, value))
      throw std::runtime_error("expected a number, got " + std::string(text));
    return value;
  }

  uint32_t constant(uint64_t bits, bool wide) {
    if (!wide) bits &= 0xffffffffu;
    const auto [entry, fresh] = constants_.try_emplace({bits, wide}, 0);
    if (fresh) {
      entry->second = allocate(wide ? 8 : 4);
      for (int l = 0; l < kLanes; ++l)
        std::memcpy(&kernel_.image[entry->second + static_cast<unsigned>(l) * (wide ? 8 : 4)],
                    &bits, wide ? 8 : 4);
    }
    return entry->second;
  }

  Kernel& kernel() { return kernel_; }

  // The registers that were looked up since the last call.
  std::vector<uint32_t> take_uses() { return std::exchange(uses_, {}); }

 private:
  struct Register {
    Type type;
    uint32_t offset;
  };
  struct Scope {
    size_t parent = 0;
    std::unordered_map<std::string, Register> registers;
  };

  const Register* find(std::string_view name) const {
    const std::string key(name);
    for (size_t scope = current_;; scope = scopes_[scope].parent) {
      const auto found = scopes_[scope].registers.find(key);
      if (found != scopes_[scope].registers.end()) return &found->second;
      if (scope == 0) return nullptr;
    }
  }

  uint32_t use(std::string_view name, unsigned bits, bool is_predicate) {
    if (name == "_") return sink(bits);
    auto* entry = const_cast<Register*>(find(name));
    if (entry == nullptr) throw std::runtime_error("unknown register " + std::string(name));
    const bool predicate = entry->type == Type::kPred;
    const unsigned own = bits_of(entry->type);
    // Registers of up to 32 bits are stored alike.
    if (predicate != is_predicate || (!predicate && (own == 64) != (bits == 64)))
      throw std::runtime_error("register " + std::string(name) + " has another size than the type");
    if (entry->offset == kNoOffset)
      entry->offset = predicate ? allocate_predicate() : allocate(own == 64 ? 8 : 4);
    uses_.push_back(entry->offset);
    return entry->offset;
  }

  uint32_t sink(unsigned bits) {
    uint32_t& offset = bits == 64 ? wide_sink_ : sink_;
    if (offset == kNoOffset) offset = allocate(bits == 64 ? 8 : 4);
    return offset;
  }

  uint32_t allocate(unsigned lane_bytes) {
    const auto offset = static_cast<uint32_t>(kernel_.image.size());
    // Nonsense that is the same every time; as a float it is about -1.2e-17.
    kernel_.image.resize(offset + lane_bytes * kLanes);
    for (size_t i = offset; i < kernel_.image.size(); i += 4)
      std::memcpy(&kernel_.image[i], "\xad\xde\x5e\xa3", 4);
    return offset;
  }
  uint32_t allocate_predicate() {
    if (free_predicates_ == 0) {
      next_predicate_ = allocate(4);
      free_predicates_ = kLanes;
    }
    --free_predicates_;
    return std::exchange(next_predicate_, next_predicate_ + 4);
  }

  static int special(std::string_view name) {
    static constexpr std::string_view kNames[] = {
        "%tid.x",          "%tid.y",       "%tid.z",
        "%ntid.x",         "%ntid.y",      "%ntid.z",
        "%ctaid.x",        "%ctaid.y",     "%ctaid.z",
        "%nctaid.x",       "%nctaid.y",    "%nctaid.z",
        "%laneid",         "%warpid",      "%nwarpid",
        "%lanemask_eq",    "%lanemask_lt", "%lanemask_le",
        "%lanemask_gt",    "%lanemask_ge", "%dynamic_smem_size",
        "%total_smem_size"};
    for (size_t i = 0; i < std::size(kNames); ++i)
      if (kNames[i] == name) return static_cast<int>(i);
    return -1;
  }
  uint32_t special_offset(int kind) {
    const auto wanted = static_cast<Special>(kind);
    for (const auto& known : kernel_.specials)
      if (known.kind == wanted) return known.offset;
    kernel_.specials.push_back({wanted, allocate(4)});
    return kernel_.specials.back().offset;
  }

  static bool parse_integer(std::string_view text, int64_t& value) {
    text = trim(text);
    const bool negative = text.starts_with('-');
    if (negative) text.remove_prefix(1);
    int base = 10;
    if (text.starts_with("0x") || text.starts_with("0X")) {
      base = 16;
      text.remove_prefix(2);
    }
    if (text.ends_with('U')) text.remove_suffix(1);
    uint64_t magnitude = 0;
    const auto [end, error] =
        std::from_chars(text.data(), text.data() + text.size(), magnitude, base);
    if (error != std::errc{} || end != text.data() + text.size()) return false;
    value = static_cast<int64_t>(negative ? 0 - magnitude : magnitude);
    return true;
  }

  // Bits of a constant or a symbol's address.
  uint64_t value_of(std::string_view text, Type type) const {
    int64_t integer = 0;
    const bool is_single = text.starts_with("0f") || text.starts_with("0F");
    if (is_single || text.starts_with("0d") || text.starts_with("0D")) {
      if (bits_of(type) != (is_single ? 32 : 64))
        throw std::runtime_error("constant " + std::string(text) +
                                 " has another size than the type");
      uint64_t bits = 0;
      std::from_chars(text.data() + 2, text.data() + text.size(), bits, 16);
      return bits;
    }
    if (parse_integer(text, integer)) {
      const unsigned bits = bits_of(type);
      const auto value = static_cast<uint64_t>(integer);
      return bits < 32 ? value & ((1u << bits) - 1) : value;
    }
    const std::string key(text);
    if (const auto own = symbols_.find(key); own != symbols_.end()) return own->second.address;
    if (const auto found = module_symbols_.find(key); found != module_symbols_.end())
      return found->second.address;
    throw std::runtime_error("unknown operand " + key);
  }

  Kernel& kernel_;
  const std::unordered_map<std::string, Symbol>& module_symbols_;
  std::unordered_map<std::string, Symbol> symbols_;
  std::vector<Scope> scopes_;
  size_t current_ = 0;
  std::map<std::pair<uint64_t, bool>, uint32_t> constants_;
  std::vector<uint32_t> uses_;
  uint32_t sink_ = kNoOffset, wide_sink_ = kNoOffset;
  uint32_t next_predicate_ = 0;
  unsigned free_predicates_ = 0;
};

}  // namespace bert_unpad::ptx
