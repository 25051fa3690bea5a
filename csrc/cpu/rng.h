// Reads an operator's rng argument on the CPU.
#pragma once

#include "common/checks.h"
#include "common/philox.h"

namespace bert_unpad {

inline RngKey read_rng(const std::optional<Tensor>& rng, const char* op) {
  check(rng.has_value(), op, ": rng (int64 [2]: seed, offset) is needed with dropout");
  check(rng->is_cpu(), op, ": rng must be on the CPU like the data");
  check_shape(*rng, {2}, op, "rng", "[2]");
  check_dtype(*rng, ScalarType::Long, op, "rng", "int64");
  check_contiguous(*rng, op, "rng");
  const auto* values = rng->const_data_ptr<int64_t>();
  return rng_key(values[0], values[1]);
}

}  // namespace bert_unpad
