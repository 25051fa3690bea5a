// The angles of rotary position embeddings (Su et al., "RoFormer", 2021, arXiv:2104.09864) as
// fractions of a turn in fixed point.
//
// Pair i of a head turns by position * scale * theta^(-2i / rotary_dim) radians. In fp32 that angle
// is off by 2e-3 at position 32,768. Here a step is the turn from one position to the next in units
// of 2^-64, and its product with a position wraps around as angles do, so the fraction of a turn is
// right at every position. Its upper 32 bits, the phase, give cosine and sine in fp32.
#pragma once

namespace bert_unpad {

inline constexpr int kMaxRotaryPairs = 128;

// Cosine and sine of r in [-pi / 4, pi / 4], z = r * r: 1 - z / 2 + z^2 C(z) and r + r z S(z). Our
// own minimax fits by Lawson's algorithm; relative errors 1e-10 and 4e-9 before rounding.
inline constexpr float kCosine0 = 0.041666646f, kCosine1 = -0.0013887316f, kCosine2 = 2.4433157e-5f;
inline constexpr float kSine0 = -0.16666655f, kSine1 = 0.00833216f, kSine2 = -0.00019515282f;
// Radians in 2^-32 of a turn.
inline constexpr float kPhaseRadians = 1.4629180792671596e-9f;

}  // namespace bert_unpad
