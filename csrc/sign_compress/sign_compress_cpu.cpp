// CPU bindings of the sign_* operators: checks, chunks, the scale.
#include "common/allocate.h"
#include "sign_compress/sign_compress.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/array_chunks.h"
#include "sign_compress/arguments.h"

namespace bert_unpad {

namespace {

// 4 MiB: an array of that size is no longer in a core's own caches when it is read next.
bool past_caches(int64_t size) { return size >= int64_t{1} << 20; }

bool stops(const float* guard) { return guard != nullptr && !std::isfinite(*guard); }

Tensor sign_scale(std::optional<Tensor> value, Tensor error) {
  const SignArguments a(value, error, "sign_scale");
  const SignCpuParams p{a.dtype, a.value, a.error, nullptr};
  const SignKernels& kernels = sign_kernels();
  const double sum = sum_over_chunks(
      a.size, [&](int64_t begin, int64_t end) { return kernels.sum_squares(p, begin, end); });
  Tensor scale = allocate(error, {}, ScalarType::Float);
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
  const int64_t part = 8 * rows.stride, chunks = array_chunks(part);
  parallel_for(0, rows.rows * chunks, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = i / chunks, begin = i % chunks * kArrayChunk;
      const int64_t end = std::min({begin + kArrayChunk, part, rows.size - row * part});
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
