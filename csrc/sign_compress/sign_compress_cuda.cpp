// CUDA bindings of the sign_* operators: checks, scratch memory, stream.
#include "sign_compress/sign_compress_cuda.h"
#include "common/allocate.h"

#include "cuda/binding.h"
#include "sign_compress/arguments.h"

namespace bert_unpad::cuda {
namespace {

Tensor sign_scale_(std::optional<Tensor> value, Tensor error) {
  const char* op = "sign_scale";
  const SignArguments a(value, error, op);
  const Call call(error, op);
  Tensor scale = allocate(error, {}, ScalarType::Float);
  Tensor partials = allocate(error, {sign_blocks(a.size)}, ScalarType::Float);
  sign_scale({a.dtype, a.size, a.value, a.error, nullptr, scale.mutable_data_ptr<float>(), nullptr,
              partials.mutable_data_ptr<float>()},
             call.stream);
  return scale;
}

void sign_pack_(std::optional<Tensor> value, Tensor error, Tensor bits, Tensor scale,
                std::optional<Tensor> guard) {
  const char* op = "sign_pack_";
  const SignArguments a(value, error, op);
  uint8_t* packed = packed_bits(bits, error, op);
  check_scalar(scale, ScalarType::Float, error, op, "scale", "float32");
  const float* stop = optional_scalar(guard, error, op, "guard");
  const Call call(error, op);
  sign_pack({a.dtype, a.size, a.value, a.error, packed,
             const_cast<float*>(scale.const_data_ptr<float>()), stop, nullptr},
            call.stream);
}

void sign_mean_(Tensor bits, Tensor scales, Tensor out, double factor, bool add,
                std::optional<Tensor> guard) {
  const char* op = "sign_mean_";
  const SignRows a(bits, scales, out, false, op);
  check_factor(factor, op);
  const float* stop = optional_scalar(guard, bits, op, "guard");
  const Call call(bits, op);
  sign_mean({a.bits, a.rows, a.stride, a.size, a.scales, a.out, static_cast<float>(factor), add,
             false, stop},
            call.stream);
}

void sign_unpack_(Tensor bits, Tensor scales, Tensor out) {
  const char* op = "sign_unpack_";
  const SignRows a(bits, scales, out, true, op);
  const Call call(bits, op);
  sign_mean({a.bits, a.rows, a.stride, a.size, a.scales, a.out, 1.0f, false, true, nullptr},
            call.stream);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CUDA, m) {
  m.impl("sign_scale", TORCH_BOX(&sign_scale_));
  m.impl("sign_pack_", TORCH_BOX(&sign_pack_));
  m.impl("sign_mean_", TORCH_BOX(&sign_mean_));
  m.impl("sign_unpack_", TORCH_BOX(&sign_unpack_));
}

}  // namespace bert_unpad::cuda
