// Places in kernel source: what makes two barriers the same barrier, what errors point to, and the
// list of barriers and waits that tests can take out one at a time.
#pragma once

#include <cstdint>
#include <cstring>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

namespace bert_unpad::block_model {

using Site = std::source_location;

inline bool same_text(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

inline bool same_site(const Site& a, const Site& b) {
  if (std::memcmp(&a, &b, sizeof(Site)) == 0) return true;  // one pointer, as a rule
  return a.line() == b.line() && a.column() == b.column() &&
         same_text(a.file_name(), b.file_name());
}

inline std::string place(const Site& site) {
  return std::string(site.file_name()) + ":" + std::to_string(site.line());
}

// The barriers and waits that kernels have passed. A test ignores one of them, runs the kernel
// again and expects an error: that is how it knows that the model would miss the barrier.
class SiteList {
 public:
  struct Entry {
    const char* kind;  // the primitive's name
    const char* file;
    unsigned line;
    int64_t passes;  // summed over threads
    bool ignored;
  };

  // Counts; false where this site is to be ignored.
  bool pass(const char* kind, const Site& site) {
    return pass(kind, site.file_name(), site.line(), 1);
  }
  bool pass(const char* kind, const char* file, unsigned line, int64_t threads) {
    for (Entry& entry : entries_) {
      if (entry.line == line && same_text(entry.kind, kind) && same_text(entry.file, file)) {
        entry.passes += threads;
        return !entry.ignored;
      }
    }
    Entry entry{kind, file, line, threads, false};
    for (const Place& place : ignored_) entry.ignored |= matches(entry, place);
    entries_.push_back(entry);
    return !entry.ignored;
  }

  // `file` may leave out leading folders.
  void ignore(const char* file, unsigned line) {
    ignored_.push_back({file, line});
    for (Entry& entry : entries_) entry.ignored |= matches(entry, ignored_.back());
  }
  void restore() {
    ignored_.clear();
    for (Entry& entry : entries_) entry.ignored = false;
  }
  void forget() { entries_.clear(); }
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  struct Place {
    std::string file;
    unsigned line;
  };

  static bool matches(const Entry& entry, const Place& place) {
    return entry.line == place.line && std::string_view(entry.file).ends_with(place.file);
  }

  std::vector<Entry> entries_;
  std::vector<Place> ignored_;
};

}  // namespace bert_unpad::block_model
