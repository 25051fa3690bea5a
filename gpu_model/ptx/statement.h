// The text of PTX: comments, statements, operands.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace bert_unpad::ptx {

inline bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
inline bool is_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '$' || c == '%';
}

inline std::string_view trim(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

// Takes the first characters that are part of a name.
inline std::string_view take_name(std::string_view& text) {
  text = trim(text);
  size_t n = 0;
  while (n < text.size() && is_name(text[n])) ++n;
  const std::string_view name = text.substr(0, n);
  text = trim(text.substr(n));
  return name;
}

// At commas that are in no bracket.
inline std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '[' || c == '{' || c == '(') ++depth;
    if (c == ']' || c == '}' || c == ')') --depth;
    if (c == ',' && depth == 0) {
      parts.push_back(trim(text.substr(begin, i - begin)));
      begin = i + 1;
    }
  }
  if (const std::string_view last = trim(text.substr(begin)); !last.empty()) parts.push_back(last);
  return parts;
}

// Walks over text, and knows the number of the line.
class Cursor {
 public:
  Cursor(std::string_view text, size_t at, unsigned line) : text_(text), at_(at), line_(line) {}

  size_t at() const { return at_; }
  unsigned line() const { return line_; }
  bool done() const { return at_ >= text_.size(); }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool starts_with(std::string_view what) const { return text_.substr(at_).starts_with(what); }
  // .loc ends with its line; .local is another word.
  bool at_loc() const {
    return starts_with(".loc") && at_ + 4 < text_.size() && is_space(text_[at_ + 4]);
  }
  void next() {
    if (text_[at_++] == '\n') ++line_;
  }

  void skip_blank() {
    while (!done() && is_space(peek())) next();
  }
  std::string_view skip_line() {
    const size_t begin = at_;
    while (!done() && peek() != '\n') ++at_;
    return text_.substr(begin, at_ - begin);
  }
  // Up to a character that is in no string; the cursor stops after it.
  std::string_view until(char end) {
    const size_t begin = at_;
    bool quoted = false;
    while (!done() && (quoted || peek() != end)) {
      quoted ^= peek() == '"';
      next();
    }
    const std::string_view found = text_.substr(begin, at_ - begin);
    if (!done()) next();
    return found;
  }
  // A name that a colon follows; empty, and the cursor stays, if there is none here.
  std::string_view take_label() {
    size_t n = 0;
    while (at_ + n < text_.size() && is_name(text_[at_ + n])) ++n;
    if (n == 0 || at_ + n >= text_.size() || text_[at_ + n] != ':') return {};
    at_ += n + 1;
    return text_.substr(at_ - n - 1, n);
  }
  // From an opening brace to after the one that closes it.
  void skip_braces() {
    int depth = 0;
    do {
      skip_blank();
      if (done()) throw std::runtime_error("PTX: a brace is not closed");
      if (peek() == '"') {
        next();
        until('"');
        continue;
      }
      depth += peek() == '{' ? 1 : peek() == '}' ? -1 : 0;
      next();
    } while (depth > 0);
  }

 private:
  std::string_view text_;
  size_t at_;
  unsigned line_;
};

// An instruction's text without comments: guard, opcode and its modifiers, operands.
struct Statement {
  std::string_view text, guard, base;
  std::vector<std::string_view> modifiers, operands;
  unsigned line = 0;

  Statement(std::string_view whole, unsigned number) : text(trim(whole)), line(number) {
    std::string_view rest = text;
    if (rest.starts_with('@')) {
      size_t n = 1;
      while (n < rest.size() && !is_space(rest[n])) ++n;
      guard = rest.substr(1, n - 1);
      rest = trim(rest.substr(n));
    }
    size_t n = 0;
    while (n < rest.size() && !is_space(rest[n])) ++n;
    std::string_view opcode = rest.substr(0, n);
    operands = split(rest.substr(n));
    base = next_part(opcode);
    while (!opcode.empty()) modifiers.push_back(next_part(opcode));
  }

  // Whether there is such a modifier, which is taken out: those that are left are unknown.
  bool take(std::string_view name) {
    for (size_t i = 0; i < modifiers.size(); ++i) {
      if (modifiers[i] != name) continue;
      modifiers.erase(modifiers.begin() + static_cast<std::ptrdiff_t>(i));
      return true;
    }
    return false;
  }
  std::string_view take_last() {
    if (modifiers.empty()) return {};
    const std::string_view last = modifiers.back();
    modifiers.pop_back();
    return last;
  }

 private:
  // Modifiers may hold a double colon, as in .L1::no_allocate.
  static std::string_view next_part(std::string_view& opcode) {
    const size_t dot = opcode.find('.');
    const std::string_view part = opcode.substr(0, dot);
    opcode = dot == std::string_view::npos ? std::string_view{} : opcode.substr(dot + 1);
    return part;
  }
};

// Puts spaces in the place of comments, so that lines keep their numbers.
inline void blank_comments(std::string& text) {
  const auto blank = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i)
      if (text[i] != '\n') text[i] = ' ';
    return end;
  };
  bool quoted = false;
  for (size_t i = 0; i + 1 < text.size();) {
    if (text[i] == '"') quoted = !quoted;
    if (!quoted && text[i] == '/' && text[i + 1] == '/')
      i = blank(i, std::min(text.find('\n', i), text.size()));
    else if (!quoted && text[i] == '/' && text[i + 1] == '*')
      i = blank(i, std::min(text.find("*/", i), text.size() - 2) + 2);
    else
      ++i;
  }
}

}  // namespace bert_unpad::ptx
