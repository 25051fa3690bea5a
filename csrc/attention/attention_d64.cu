// Attention on tensor cores, forward and backward, head dim 64. One file per head dim, so that they
// compile side by side.
#include "attention/launch_head_dim.h"

namespace bert_unpad::cuda {

template void launch_forward<64>(const AttentionRun&, uint32_t, cudaStream_t);
template void launch_backward<64>(const AttentionRun&, FusedShape, uint32_t, cudaStream_t);

}  // namespace bert_unpad::cuda
