// How much work a sequence of a given length is: linear * s + quadratic * s^2.
//
// The balancer only compares sums of work, and compares them in integers: all machines then make
// the same plan, whatever their compilers do to floating point.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace bert_unpad::balancer {

struct WorkModel {
  double linear;
  double quadratic;

  // Forward FLOPs of one Transformer layer of BERT's shape (intermediate size 4 * hidden):
  // 24 * hidden^2 a token in the six matrix products with weights (2 FLOPs for each of the 12 *
  // hidden^2 weights), 4 * s * hidden a token in the two products of attention. Backward and the
  // number of layers scale both alike. For BERT-large (hidden 1024) attention is s / (s + 6144) of
  // the total: 4 % at 256 tokens, 8 % at 512.
  static WorkModel for_hidden(int64_t hidden) {
    if (hidden < 1) throw std::invalid_argument("hidden: expected a positive size");
    const double h = static_cast<double>(hidden);
    return {24.0 * h * h, 4.0 * h};
  }

  void validate() const {
    const bool usable = std::isfinite(linear) && std::isfinite(quadratic) && linear >= 0.0 &&
                        quadratic >= 0.0 && linear + quadratic > 0.0;
    if (!usable) {
      throw std::invalid_argument(
          "work: expected linear and quadratic to be finite, not negative and not both 0");
    }
  }

  // The fused multiply-add is spelled out because some compilers fuse by themselves and others do
  // not, which would be two different roundings.
  double operator()(double length) const { return length * std::fma(quadratic, length, linear); }
};

// Work by length in integers; `scale` is the work (in the model's own unit) of one integer step.
struct WorkTable {
  std::vector<int64_t> units;  // [longest + 1]
  double scale;

  // The longest sequence gets 2^30 units: one unit is far below a token, and 2^32 sequences still
  // fit in 63 bits.
  WorkTable(const WorkModel& model, int64_t longest) : units(longest + 1), scale(1.0) {
    if (longest > 0) scale = std::ldexp(model(static_cast<double>(longest)), -30);
    if (!std::isnormal(scale)) {
      throw std::invalid_argument("work: the longest sequence's work is too large or too small");
    }
    for (int64_t s = 0; s <= longest; ++s) {
      units[s] = std::llround(model(static_cast<double>(s)) / scale);
    }
  }
};

}  // namespace bert_unpad::balancer
