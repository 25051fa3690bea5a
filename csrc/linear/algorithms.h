// Which of cuBLASLt's algorithms a product takes: what timing has shown, kept in memory and, if
// asked for, in a file.
//
// Without a file nothing is timed and cuBLASLt's own first guess is taken. With one, the first
// product of a kind times the best guesses (which makes the host wait, once) and writes the winner
// down, so that later runs on such a device take the same algorithm and give the same bits.
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
// Writes to a temporary file and renames it; what other processes have written meanwhile is kept.
void add_choice(const std::string& kind, const Choice& choice);

}  // namespace bert_unpad::cuda
