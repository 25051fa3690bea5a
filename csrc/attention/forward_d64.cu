// Attention, forward, head dim 64.
#include "attention/forward_launch.h"

namespace bert_unpad::cuda {

template void launch_forward<64>(const AttentionRun&, cudaStream_t);

}  // namespace bert_unpad::cuda
