// CPU bindings of the sign_* operators: checks, chunks, the scale.
#include "sign_compress/sign_compress.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "sign_compress/arguments.h"

namespace bert_unpad {

BU_ISA_TABLE(SignKernels, sign_kernels)

namespace {

// A pure function of the size, so that sums do not depend on threads. Within a chunk a lane adds up
// 256 squares or so, which loses 1e-6 of the sum; chunks add up in fp64.
constexpr int64_t kChunk = 16384;

template <class F>
void for_chunks(int64_t size, const F& fn) {
  const int64_t chunks = (size + kChunk - 1) / kChunk;
  parallel_for(0, chunks, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) fn(i, i * kChunk, std::min(size, (i + 1) * kChunk));
  });
}

// 4 MiB: an array of that size is no longer in a core's own caches when it is read next.
bool past_caches(int64_t size) { return size >= int64_t{1} << 20; }

bool stops(const float* guard) { return guard != nullptr && !std::isfinite(*guard); }

Tensor sign_scale(std::optional<Tensor> value, Tensor error) {
  const SignArguments a(value, error, "sign_scale");
  const SignCpuParams p{a.dtype, a.value, a.error, nullptr};
  const SignKernels& kernels = sign_kernels();
  std::vector<float> partials((a.size + kChunk - 1) / kChunk);
  for_chunks(a.size, [&](int64_t i, int64_t begin, int64_t end) {
    partials[i] = kernels.sum_squares(p, begin, end);
  });
  double sum = 0.0;
  for (float partial : partials) sum += partial;
  Tensor scale = torch::stable::new_empty(error, {}, ScalarType::Float);
  *scale.mutable_data_ptr<float>() =
      a.size == 0 ? 0.0f : static_cast<float>(std::sqrt(sum / static_cast<double>(a.size)));
  return scale;
}

void sign_pack_(std::optional<Tensor> value, Tensor error, Tensor bits, Tensor scale,
                std::optional<Tensor> guard) {
  const char* op = "sign_pack_";
  const SignArguments a(value, error, op);
  const SignCpuParams p{a.dtype, a.value, a.error, packed_bits(bits, error, op)};
  check_scalar(scale, ScalarType::Float, error, op, "scale", "float32");
  if (stops(optional_scalar(guard, error, op, "guard"))) return;
  const float by = *scale.const_data_ptr<float>();
  const SignKernels& kernels = sign_kernels();
  for_chunks(a.size, [&](int64_t, int64_t begin, int64_t end) { kernels.pack(p, begin, end, by); });
}

void sign_mean_(Tensor bits, Tensor scales, Tensor out, double factor, bool add,
                std::optional<Tensor> guard) {
  const char* op = "sign_mean_";
  const SignRows rows(bits, scales, out, false, op);
  check_factor(factor, op);
  if (stops(optional_scalar(guard, bits, op, "guard"))) return;
  std::vector<float> weights(rows.scales, rows.scales + rows.rows);
  for (float& weight : weights) weight *= static_cast<float>(factor);
  const SignMeanCpuParams p{rows.bits, rows.stride,           rows.rows, weights.data(), rows.out,
                            add,       past_caches(rows.size)};
  const SignKernels& kernels = sign_kernels();
  for_chunks(rows.size, [&](int64_t, int64_t begin, int64_t end) { kernels.mean(p, begin, end); });
}

void sign_unpack_(Tensor bits, Tensor scales, Tensor out) {
  const SignRows rows(bits, scales, out, true, "sign_unpack_");
  const SignKernels& kernels = sign_kernels();
  const int64_t part = 8 * rows.stride, chunks = (part + kChunk - 1) / kChunk;
  parallel_for(0, rows.rows * chunks, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = i / chunks, begin = i % chunks * kChunk;
      const int64_t end = std::min({begin + kChunk, part, rows.size - row * part});
      const SignMeanCpuParams p{rows.bits + row * rows.stride,
                                rows.stride,
                                1,
                                rows.scales + row,
                                rows.out + row * part,
                                false,
                                past_caches(rows.size)};
      if (begin < end) kernels.mean(p, begin, end);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("sign_scale", TORCH_BOX(&sign_scale));
  m.impl("sign_pack_", TORCH_BOX(&sign_pack_));
  m.impl("sign_mean_", TORCH_BOX(&sign_mean_));
  m.impl("sign_unpack_", TORCH_BOX(&sign_unpack_));
}

}  // namespace bert_unpad
