// Attention, backward, head dim 64.
#include "attention/backward_launch.h"

namespace bert_unpad::cuda {

template void launch_backward<64>(const AttentionRun&, bool, cudaStream_t);

}  // namespace bert_unpad::cuda
