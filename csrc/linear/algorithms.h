// Which of cuBLASLt's algorithms a kind of product uses: one for the whole process, whichever
// thread asks first.
//
// The first product of a kind times cuBLASLt's best guesses (the host waits, once) and takes the
// fastest. Where timing is turned off, or the product is captured into a graph, it takes the first
// guess. With a file, timed choices are kept there, so that later runs on such a device use the
// same algorithm and give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "linear/cublaslt.h"

namespace bert_unpad::cuda {

// cuBLASLt's own recommendation for sm_90; products that split k use it on other devices too.
inline constexpr size_t kMaxWorkspaceBytes = 32 << 20;

struct Choice {
  cublaslt::Algorithm algorithm;
  size_t workspace_bytes;  // at most kMaxWorkspaceBytes
};

// Forgets all choices. `path` empty: keep them in memory only; else they are read from the file, if
// it is there, and written to it. Throws where a line of it cannot be read. Any thread may call
// these.
void set_timing(bool enabled, const std::string& path);
bool timing_enabled();
// Changes with every call of set_timing.
uint64_t timing_version();
// Kinds are text without spaces, see matmul_cuda.cpp.
std::optional<Choice> find_choice(const std::string& kind);
// Returns what the process uses from now on: `choice`, unless another thread, or a process that
// writes the same file, has been first. `timed` choices are written to the file, if there is one:
// under a temporary name, with what other processes have added meanwhile.
Choice add_choice(const std::string& kind, const Choice& choice, bool timed);

}  // namespace bert_unpad::cuda
