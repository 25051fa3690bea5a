// The counters of csrc/cuda/tickets.h, on the model of the CUDA runtime.
#include "gpu_model/block/c_api.h"
//
#include "cuda/tickets.h"

BU_EXPORT int take_tickets(int64_t stream, int64_t count, int capturing, uint32_t** out) {
  return bert_unpad::block_model::guarded([&] {
    bert_unpad::block_model::capturing = capturing != 0;
    *out = bert_unpad::cuda::tickets("op", reinterpret_cast<cudaStream_t>(stream), count);
    bert_unpad::block_model::capturing = false;
  });
}
