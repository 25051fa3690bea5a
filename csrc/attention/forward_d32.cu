// Attention, forward, head dim 32.
#include "attention/forward_launch.h"

namespace bert_unpad::cuda {

template void launch_forward<32>(const AttentionRun&, cudaStream_t);

}  // namespace bert_unpad::cuda
