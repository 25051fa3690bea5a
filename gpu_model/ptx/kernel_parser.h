// Decodes a kernel: its parameters, registers, memory, labels and instructions.
#pragma once

#include <cxxabi.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gpu_model/ptx/instructions.h"

namespace bert_unpad::ptx {

// ".align 8 .b8 name[88]" or ".u64 name": also of memory in all state spaces.
struct Variable {
  std::string_view name, initialiser;
  uint32_t align = 1, element = 1;
  uint64_t bytes = 0;
};

inline uint64_t parse_number(std::string_view text) {
  uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

inline Variable parse_variable(std::string_view text) {
  Variable v;
  if (const size_t equals = text.find('='); equals != std::string_view::npos) {
    v.initialiser = trim(text.substr(equals + 1));
    text = trim(text.substr(0, equals));
  }
  bool aligned = false;
  while (text.starts_with('.')) {
    text.remove_prefix(1);
    const std::string_view word = take_name(text);
    if (word == "align") {
      v.align = static_cast<uint32_t>(parse_number(take_name(text)));
      aligned = true;
    } else if (const Type type = parse_type(word); type != Type::kNone) {
      v.element = bits_of(type) / 8;
    }
  }
  if (!aligned) v.align = v.element;
  v.name = take_name(text);
  v.bytes = v.element;
  while (text.starts_with('[')) {
    const size_t close = text.find(']');
    v.bytes *= parse_number(trim(text.substr(1, close - 1)));
    text = trim(text.substr(close + 1));
  }
  return v;
}

template <class T>
T aligned(T value, uint32_t align) {
  return (value + align - 1) / align * align;
}

inline std::string readable(std::string_view mangled) {
  const std::string name(mangled);
  int status = 0;
  char* text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  const std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

// What a kernel's parser gets from its module.
struct ModuleContext {
  const std::unordered_map<std::string, Symbol>& symbols;
  const std::unordered_map<unsigned, const char*>& files;  // of .file
  const char* name;
  uint32_t shared_bytes;  // of the module's own variables
  bool has_dynamic_shared;
};

class KernelParser {
 public:
  KernelParser(const ModuleContext& module, std::string_view text, size_t at, unsigned line)
      : module_(module), cursor_(text, at, line), decoder_(kernel_, module.symbols) {
    kernel_.places.push_back({module.name, 0});
    kernel_.static_shared_bytes = module.shared_bytes;
  }

  // The cursor is after ".entry".
  Kernel parse() {
    cursor_.skip_blank();
    std::string_view head = cursor_.until('(');
    kernel_.name = readable(trim(head));
    for (const std::string_view parameter : split(cursor_.until(')'))) add_parameter(parameter);
    kernel_.parameter_bytes = static_cast<uint32_t>(aligned(kernel_.parameter_bytes, 8));
    head = cursor_.until('{');
    for (std::string_view word : {"maxntid", "reqntid"})
      if (const size_t at = head.find(word); at != std::string_view::npos) limit(head.substr(at));
    parse_body();
    return std::move(kernel_);
  }

 private:
  struct Jump {
    size_t instruction, scope;
    std::string label;
    unsigned line;
  };

  void add_parameter(std::string_view text) {
    const Variable v = parse_variable(text);
    const uint32_t offset = aligned(kernel_.parameter_bytes, v.align);
    kernel_.parameters.push_back({offset, static_cast<uint32_t>(v.bytes)});
    decoder_.declare_symbol(v.name, kParameterBase + offset);
    kernel_.parameter_bytes = offset + static_cast<uint32_t>(v.bytes);
  }

  void limit(std::string_view text) {
    text.remove_prefix(7);
    kernel_.max_threads = 1;
    for (const std::string_view n : split(text.substr(0, text.find_first_of(".\n"))))
      kernel_.max_threads *= static_cast<uint32_t>(parse_number(n));
  }

  void parse_body() {
    size_t depth = 0;
    for (;;) {
      cursor_.skip_blank();
      if (cursor_.done()) throw std::runtime_error("PTX: " + kernel_.name + " has no end");
      if (cursor_.peek() == '{') {
        cursor_.next();
        ++depth;
        decoder_.open_scope();
      } else if (cursor_.peek() == '}') {
        cursor_.next();
        if (depth-- == 0) break;
        decoder_.close_scope();
      } else if (cursor_.at_loc()) {
        set_place(cursor_.skip_line());
      } else if (const std::string_view label = cursor_.take_label(); !label.empty()) {
        labels_[{decoder_.scope(), std::string(label)}] = kernel_.code.size();
      } else {
        const unsigned line = cursor_.line();
        take_statement(cursor_.until(';'), line);
      }
    }
    // Falling off the end is an exit.
    add(decode_instruction(decoder_, Statement("ret", cursor_.line())));
    for (const Jump& jump : jumps_) resolve(jump);
    if (!kernel_.wgmma.empty()) note_uses();
  }

  // ".loc FILE LINE COLUMN[, function_name NAME[+N], inlined_at FILE LINE COLUMN]". An inlined
  // primitive counts as the place that calls it, as the model of a block has it; lines of the
  // callers come before those of what is inlined there.
  void set_place(std::string_view text) {
    text.remove_prefix(4);
    Spot spot = take_spot(text);
    const size_t at = text.find("inlined_at");
    if (at == std::string_view::npos) {
      callers_.erase(spot);
    } else {
      text = text.substr(at + 10);
      callers_[spot] = take_spot(text);
    }
    for (int depth = 0; depth < 16 && is_primitive(spot[0]); ++depth) {
      const auto caller = callers_.find(spot);
      if (caller == callers_.end()) break;
      spot = caller->second;
    }
    const auto found = module_.files.find(spot[0]);
    if (spot[1] == 0 || found == module_.files.end()) return;
    const auto [entry, fresh] = place_numbers_.try_emplace({spot[0], spot[1]}, 0);
    if (fresh) {
      entry->second = static_cast<uint32_t>(kernel_.places.size());
      kernel_.places.push_back({found->second, spot[1]});
    }
    place_ = entry->second;
  }

  using Spot = std::array<unsigned, 3>;  // number of the file, line, column
  static Spot take_spot(std::string_view& text) {
    Spot spot;
    for (unsigned& number : spot) number = static_cast<unsigned>(parse_number(take_name(text)));
    return spot;
  }

  // The functions of csrc/cuda/primitives.h, and what is not of this tree.
  bool is_primitive(unsigned number) const {
    const auto file = module_.files.find(number);
    if (file == module_.files.end()) return true;
    const std::string_view name = file->second;
    for (const char* header : {"block.h", "memory.h", "async_copy.h", "mma.h", "wgmma.h"})
      if (name == std::string("csrc/cuda/") + header) return true;
    return name.starts_with('/');
  }

  void take_statement(std::string_view text, unsigned line) {
    text = trim(text);
    if (text.empty()) return;
    try {
      if (text.starts_with('.'))
        take_directive(text);
      else
        take_instruction(Statement(text, line));
    } catch (const std::exception& e) {
      throw std::runtime_error(std::string(module_.name) + ", line " + std::to_string(line) + ", " +
                               std::string(text) + ": " + e.what());
    }
  }

  void take_directive(std::string_view text) {
    text.remove_prefix(1);
    std::string_view rest = text;
    const std::string_view word = take_name(rest);
    if (word == "reg") {
      rest.remove_prefix(1);
      const Type type = parse_type(take_name(rest));
      if (type == Type::kNone) throw std::runtime_error("unknown type of register");
      decoder_.declare(type, rest);
    } else if (word == "param") {
      // Of a call; only that of a failed assertion is known, and its message is what counts.
      call_arguments_[std::string(parse_variable(rest).name)] = kNoOffset;
    } else if (word == "shared") {
      if (module_.has_dynamic_shared)
        throw std::runtime_error("a kernel's own shared memory beside dynamic one is not known");
      const Variable v = parse_variable(rest);
      kernel_.static_shared_bytes = aligned(kernel_.static_shared_bytes, v.align);
      decoder_.declare_symbol(v.name, kSharedBase + kernel_.static_shared_bytes);
      kernel_.static_shared_bytes += static_cast<uint32_t>(v.bytes);
    } else if (word == "local") {
      const Variable v = parse_variable(rest);
      kernel_.local_bytes = aligned(kernel_.local_bytes, v.align);
      decoder_.declare_symbol(v.name, kLocalBase + kernel_.local_bytes);
      kernel_.local_bytes += static_cast<uint32_t>(v.bytes);
    } else if (word != "pragma") {
      throw std::runtime_error("unknown directive");
    }
  }

  void take_instruction(const Statement& s) {
    if (s.base == "bra") return take_branch(s);
    if (s.base == "call") return take_call(s);
    const bool argument = s.base == "st" && !s.modifiers.empty() && s.modifiers[0] == "param";
    if (argument) return take_argument(s);
    add(decode_instruction(decoder_, s));
  }

  void add(Instruction i) {
    i.place = place_;
    kernel_.code.push_back(i);
    uses_.push_back(decoder_.take_uses());
  }

  // Which instructions use registers of wgmma.
  void note_uses() {
    std::unordered_map<uint32_t, uint32_t> numbers;
    for (const WgmmaRegister& r : kernel_.wgmma_registers)
      numbers.emplace(r.offset, static_cast<uint32_t>(numbers.size()));
    for (size_t at = 0; at < kernel_.code.size(); ++at) {
      Instruction& i = kernel_.code[at];
      i.uses_begin = static_cast<uint32_t>(kernel_.uses.size());
      for (const uint32_t offset : uses_[at])
        if (const auto found = numbers.find(offset); i.run != wgmma && found != numbers.end())
          kernel_.uses.push_back(found->second);
      i.uses_end = static_cast<uint32_t>(kernel_.uses.size());
      i.uses_wgmma = i.uses_begin != i.uses_end;
    }
  }

  void take_branch(const Statement& s) {
    Statement plain = s;
    const bool uniform = plain.take("uni");
    plain.base = "ret";  // for its guard
    Instruction i = decode_instruction(decoder_, plain);
    i.wide = uniform;
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      if (i.wide && lanes != w.mask)
        w.fail(i, lanes, "bra.uni that only some of the lanes here take");
      w.branch(static_cast<uint32_t>(i.immediate), lanes);
    };
    jumps_.push_back(
        {kernel_.code.size(), decoder_.scope(), std::string(s.operands.at(0)), s.line});
    add(i);
  }

  void resolve(const Jump& jump) {
    for (size_t scope = jump.scope;; scope = decoder_.parent(scope)) {
      const auto found = labels_.find({scope, jump.label});
      if (found != labels_.end()) {
        kernel_.code[jump.instruction].immediate = static_cast<int64_t>(found->second);
        return;
      }
      if (scope == 0)
        throw std::runtime_error(std::string(module_.name) + ", line " + std::to_string(jump.line) +
                                 ": unknown label " + jump.label);
    }
  }

  // st.param.b64 [param0+0], %rd1
  void take_argument(const Statement& s) {
    std::string_view name = s.operands.at(0);
    name.remove_prefix(1);
    name = take_name(name);
    const auto found = call_arguments_.find(std::string(name));
    if (found == call_arguments_.end()) throw std::runtime_error("unknown parameter of a call");
    const Type type = parse_type(s.modifiers.back());
    found->second = decoder_.in(s.operands.at(1), as_bits(type));
  }

  void take_call(const Statement& s) {
    Statement plain = s;
    plain.take("uni");
    if (plain.operands.size() != 2 || plain.operands[0] != "__assertfail")
      throw std::runtime_error("only calls of __assertfail are known");
    std::string_view list = plain.operands[1];
    const auto names = split(list.substr(1, list.size() - 2));
    plain.base = "trap";
    plain.operands.clear();
    Instruction i = decode_instruction(decoder_, plain);
    i.a[0] = call_arguments_.at(std::string(names.at(0)));
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      const uint64_t message = w.in<uint64_t>(i.a[0])[std::countr_zero(lanes)];
      w.fail(i, lanes, reinterpret_cast<const char*>(message));
    };
    add(i);
  }

  const ModuleContext& module_;
  Cursor cursor_;
  Kernel kernel_;
  Decoder decoder_;
  std::map<std::pair<size_t, std::string>, size_t> labels_;
  std::vector<Jump> jumps_;
  std::vector<std::vector<uint32_t>> uses_;  // of each instruction: registers
  std::unordered_map<std::string, uint32_t> call_arguments_;
  std::map<Spot, Spot> callers_;
  std::map<std::pair<unsigned, unsigned>, uint32_t> place_numbers_;
  uint32_t place_ = 0;
};

}  // namespace bert_unpad::ptx
