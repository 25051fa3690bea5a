// The store of timed algorithms: a map and its file, a line for each kind of product.
#include "linear/algorithms.h"

#include <unistd.h>

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
  std::string path;
  Choices choices;
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
    if (!words)
      throw std::runtime_error(path + ", line " + std::to_string(number) +
                               ": expected a kind, bytes and 8 hexadecimal numbers; delete the "
                               "file to have algorithms timed again");
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

void set_algorithm_file(const std::string& path) {
  const std::scoped_lock lock(store().mutex);
  Choices choices;
  read(path, choices);
  store().path = path;
  store().choices = std::move(choices);
}

bool timing_enabled() {
  const std::scoped_lock lock(store().mutex);
  return !store().path.empty();
}

std::optional<Choice> find_choice(const std::string& kind) {
  const std::scoped_lock lock(store().mutex);
  const auto found = store().choices.find(kind);
  if (found == store().choices.end()) return std::nullopt;
  return found->second;
}

void add_choice(const std::string& kind, const Choice& choice) {
  const std::scoped_lock lock(store().mutex);
  store().choices[kind] = choice;
  if (store().path.empty()) return;
  read(store().path, store().choices);
  write(store().path, store().choices);
}

}  // namespace bert_unpad::cuda
