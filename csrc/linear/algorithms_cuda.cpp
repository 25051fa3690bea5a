// The store of chosen algorithms: a map and its file, a line for each kind of product.
#include "linear/algorithms.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>

namespace bert_unpad::cuda {
namespace {

using Choices = std::map<std::string, Choice>;

struct Store {
  std::mutex mutex;
  bool timing = true;
  std::string path;
  Choices timed, guessed;
  std::atomic<uint64_t> version = 0;
};

Store& store() {
  static Store instance;
  return instance;
}

// Adds what the file has and `choices` lacks.
void read(const std::string& path, Choices& choices) {
  std::ifstream file(path);
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    std::istringstream words(line);
    std::string kind;
    Choice choice{};
    words >> kind >> choice.workspace_bytes >> std::hex;
    for (uint64_t& word : choice.algorithm.data) words >> word;
    if (!words || choice.workspace_bytes > kMaxWorkspaceBytes)
      throw std::runtime_error(path + ", line " + std::to_string(number) +
                               ": expected a kind, at most " + std::to_string(kMaxWorkspaceBytes) +
                               " bytes and 8 hexadecimal numbers; delete the file to have "
                               "algorithms timed again");
    choices.emplace(kind, choice);
  }
}

void write(const std::string& path, const Choices& choices) {
  const std::string temporary = path + "." + std::to_string(getpid()) + ".tmp";
  std::ofstream file(temporary);
  for (const auto& [kind, choice] : choices) {
    file << kind << ' ' << choice.workspace_bytes << std::hex;
    for (const uint64_t word : choice.algorithm.data) file << ' ' << word;
    file << std::dec << '\n';
  }
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0)
    throw std::runtime_error("cannot write the timed algorithms to " + path + ": " +
                             std::strerror(errno));
}

}  // namespace

void set_timing(bool enabled, const std::string& path) {
  Store& s = store();
  const std::scoped_lock lock(s.mutex);
  Choices timed;
  if (!path.empty()) read(path, timed);
  s.timing = enabled;
  s.path = path;
  s.timed = std::move(timed);
  s.guessed.clear();
  ++s.version;
}

bool timing_enabled() {
  const std::scoped_lock lock(store().mutex);
  return store().timing;
}

uint64_t timing_version() { return store().version; }

std::optional<Choice> find_choice(const std::string& kind) {
  Store& s = store();
  const std::scoped_lock lock(s.mutex);
  for (const Choices* choices : {&s.guessed, &s.timed})
    if (const auto found = choices->find(kind); found != choices->end()) return found->second;
  return std::nullopt;
}

Choice add_choice(const std::string& kind, const Choice& choice, bool timed) {
  Store& s = store();
  const std::scoped_lock lock(s.mutex);
  if (const auto found = s.guessed.find(kind); found != s.guessed.end()) return found->second;
  if (!timed) return s.timed.contains(kind) ? s.timed.at(kind) : (s.guessed[kind] = choice);
  if (!s.path.empty()) read(s.path, s.timed);
  const auto [place, is_new] = s.timed.emplace(kind, choice);
  if (is_new && !s.path.empty()) write(s.path, s.timed);
  return place->second;
}

}  // namespace bert_unpad::cuda
