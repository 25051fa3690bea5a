// Attention, backward, head dim 32.
#include "attention/backward_launch.h"

namespace bert_unpad::cuda {

template void launch_backward<32>(const AttentionRun&, bool, cudaStream_t);

}  // namespace bert_unpad::cuda
