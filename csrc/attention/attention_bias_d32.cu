// Attention with a position bias on tensor cores, forward and backward, head dim 32.
#include "attention/launch_bias.h"

namespace bert_unpad::cuda {

template void launch_bias_forward<32>(const AttentionRun&, uint32_t, cudaStream_t);
template void launch_bias_backward<32>(const AttentionRun&, cudaStream_t);

}  // namespace bert_unpad::cuda
