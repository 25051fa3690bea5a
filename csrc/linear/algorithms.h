// Which of cuBLASLt's algorithms a kind of product uses. Choices made by timing are kept in memory
// and in a file.
//
// Without a file nothing is timed: cuBLASLt's own first guess is used. With a file, the first
// product of a kind times the best guesses (the host waits, once) and the fastest is written to the
// file, so that later runs on such a device use the same algorithm and give the same bits.
#pragma once

#include <optional>
#include <string>

#include "linear/cublaslt.h"

namespace bert_unpad::cuda {

struct Choice {
  cublaslt::Algorithm algorithm;
  size_t workspace_bytes;
};

// `path` empty: stop timing and forget. Else choices are read from the file, if it is there, and
// written to it. Throws where a line of it cannot be read. Any thread may call these.
void set_algorithm_file(const std::string& path);
bool timing_enabled();
// Kinds are text without spaces, see matmul_cuda.cpp.
std::optional<Choice> find_choice(const std::string& kind);
// Writes a temporary file and renames it; keeps what other processes have added meanwhile.
void add_choice(const std::string& kind, const Choice& choice);

}  // namespace bert_unpad::cuda
