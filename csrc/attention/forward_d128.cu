// Attention, forward, head dim 128.
#include "attention/forward_launch.h"

namespace bert_unpad::cuda {

template void launch_forward<128>(const AttentionRun&, cudaStream_t);

}  // namespace bert_unpad::cuda
