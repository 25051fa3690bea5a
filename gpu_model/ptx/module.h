// A file of PTX: where its kernels are, and the variables they share. A kernel is decoded when it
// is first launched.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "gpu_model/block/buffers.h"
#include "gpu_model/ptx/kernel_parser.h"

namespace bert_unpad::ptx {

// A copy that lives as long as the process: lists of barriers keep names of files.
inline const char* interned(std::string_view text) {
  static std::set<std::string, std::less<>> all;
  return all.emplace(text).first->c_str();
}

// nvcc and the C++ compiler name an unnamed namespace differently: _GLOBAL__N_1 and
// _GLOBAL__N__8f42bc_7_gelu_cu_12ab. The length before it differs too.
inline std::string common_name(std::string_view mangled) {
  static constexpr std::string_view kUnnamed = "_GLOBAL__N_";
  std::string name;
  for (;;) {
    const size_t at = mangled.find(kUnnamed);
    if (at == std::string_view::npos) return name.append(mangled);
    size_t digits = at;
    while (digits > 0 && std::isdigit(static_cast<unsigned char>(mangled[digits - 1])) != 0)
      --digits;
    const uint64_t length = parse_number(mangled.substr(digits, at - digits));
    name.append(mangled.substr(0, digits)).append("(unnamed)");
    mangled.remove_prefix(std::min(mangled.size(), at + length));
  }
}

class Module {
 public:
  // `name` goes into messages.
  Module(std::string_view name, std::string text) : name_(interned(name)), text_(std::move(text)) {
    blank_comments(text_);
    Cursor cursor(text_, 0, 1);
    for (cursor.skip_blank(); !cursor.done(); cursor.skip_blank()) take(cursor);
    // Dynamic shared memory begins after all other.
    for (const Variable& v : dynamic_shared_) shared_bytes_ = aligned(shared_bytes_, v.align);
    for (const Variable& v : dynamic_shared_)
      symbols_[std::string(v.name)] = {kSharedBase + shared_bytes_};
  }
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  // By the name in the PTX or that of the C++ compiler; null if there is none.
  const Kernel* find(std::string_view mangled) {
    const auto entry = entries_.find(common_name(mangled));
    if (entry == entries_.end()) return nullptr;
    Entry& found = entry->second;
    if (!found.kernel)
      found.kernel = std::make_unique<Kernel>(
          KernelParser({symbols_, files_, name_, shared_bytes_, !dynamic_shared_.empty()}, text_,
                       found.at, found.line)
              .parse());
    return found.kernel.get();
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& entry : entries_) all.push_back(entry.second.name);
    return all;
  }
  block_model::Buffers& constants() { return constants_; }

 private:
  struct Entry {
    size_t at;
    unsigned line;
    std::string name;
    std::unique_ptr<Kernel> kernel;
  };

  // A directive of the outermost level.
  void take(Cursor& cursor) {
    const size_t begin = cursor.at();
    if (cursor.starts_with(".version") || cursor.starts_with(".target") ||
        cursor.starts_with(".address_size") || cursor.at_loc()) {
      cursor.skip_line();
    } else if (cursor.starts_with(".file")) {
      take_file(cursor.skip_line());
    } else if (cursor.starts_with(".section")) {
      skip_body(cursor);
    } else {
      const unsigned line = cursor.line();
      const std::string_view head = head_of(begin);
      if (head.find(".entry") != std::string_view::npos) {
        const size_t at = text_.find(".entry", begin) + 6;
        const size_t open = text_.find('(', at);
        const std::string name(trim(std::string_view(text_).substr(at, open - at)));
        entries_[common_name(name)] = {at, line + lines_between(begin, at), name, nullptr};
        skip_body(cursor);
      } else if (head.find(".func") != std::string_view::npos &&
                 head.find(".extern") == std::string_view::npos) {
        skip_body(cursor);
      } else {
        take_variable(trim(cursor.until(';')));
      }
    }
  }

  // Up to the first character that ends a head: of parameters, a body, or the declaration.
  std::string_view head_of(size_t begin) const {
    return std::string_view(text_).substr(begin, text_.find_first_of("(;={", begin) - begin);
  }
  unsigned lines_between(size_t begin, size_t end) const {
    return static_cast<unsigned>(std::count(text_.begin() + static_cast<std::ptrdiff_t>(begin),
                                            text_.begin() + static_cast<std::ptrdiff_t>(end),
                                            '\n'));
  }
  static void skip_body(Cursor& cursor) {
    while (!cursor.done() && cursor.peek() != '{') cursor.next();
    cursor.skip_braces();
  }

  // '.file 1 "csrc/gelu/gelu.cu"', which may have more numbers after it.
  void take_file(std::string_view text) {
    text.remove_prefix(5);
    const auto number = static_cast<unsigned>(parse_number(take_name(text)));
    const size_t open = text.find('"'), close = text.find('"', open + 1);
    if (open != std::string_view::npos && close != std::string_view::npos)
      files_[number] = interned(text.substr(open + 1, close - open - 1));
  }

  void take_variable(std::string_view text) {
    std::string_view rest = text;
    std::string_view space;
    while (rest.starts_with('.')) {
      std::string_view after = rest.substr(1);
      const std::string_view word = take_name(after);
      if (word != "extern" && word != "visible" && word != "weak" && word != "common") {
        space = word;
        rest = after;
        break;
      }
      rest = after;
    }
    if (space == "shared") {
      const Variable v = parse_variable(rest);
      if (text.find(".extern") != std::string_view::npos) {
        dynamic_shared_.push_back(v);
        return;
      }
      shared_bytes_ = aligned(shared_bytes_, v.align);
      symbols_[std::string(v.name)] = {kSharedBase + shared_bytes_};
      shared_bytes_ += static_cast<uint32_t>(v.bytes);
    } else if (space == "global" || space == "const") {
      add_global(parse_variable(rest), space == "const");
    }
  }

  // In the host's memory, where global memory is.
  void add_global(const Variable& v, bool is_constant) {
    std::string_view values = v.initialiser;
    if (values.starts_with('{')) values = values.substr(1, values.size() - 2);
    const auto items = split(values);
    const uint64_t size = std::max<uint64_t>(v.bytes, items.size() * v.element);
    auto memory = std::make_unique<unsigned char[]>(size + 256);
    auto* p = memory.get() + (-reinterpret_cast<uintptr_t>(memory.get()) & 255);
    for (size_t i = 0; i < items.size(); ++i) {
      const std::string_view item = items[i];
      const bool hex = item.starts_with("0x") || item.starts_with("0f") || item.starts_with("0d");
      const std::string number(hex ? item.substr(2) : item);
      const uint64_t bits = hex ? std::strtoull(number.c_str(), nullptr, 16)
                                : static_cast<uint64_t>(std::strtoll(number.c_str(), nullptr, 10));
      std::memcpy(p + i * v.element, &bits, v.element);
    }
    symbols_[std::string(v.name)] = {reinterpret_cast<uint64_t>(p)};
    constants_.add(p, size, !is_constant);
    globals_.push_back(std::move(memory));
  }

  const char* name_;
  std::string text_;
  std::unordered_map<std::string, Entry> entries_;
  std::unordered_map<std::string, Symbol> symbols_;
  std::unordered_map<unsigned, const char*> files_;
  std::vector<Variable> dynamic_shared_;
  std::vector<std::unique_ptr<unsigned char[]>> globals_;
  block_model::Buffers constants_;
  uint32_t shared_bytes_ = 0;
};

}  // namespace bert_unpad::ptx
