// rotary on the model of a block.
#include "gpu_model/block/c_api.h"
//
#include "rotary/rotary.cu"

using bert_unpad::cuda::RotaryCudaParams;

BU_EXPORT int64_t rotary_params_size() { return sizeof(RotaryCudaParams); }

BU_EXPORT int rotary_rotate(const RotaryCudaParams* p) {
  return bert_unpad::block_model::guarded([&] { bert_unpad::cuda::rotary(*p, nullptr); });
}
