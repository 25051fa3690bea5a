// Attention with wgmma, head dim 64, without a position bias.
#define BU_REQUIRE_TRAPS

#include "attention/launch_wgmma.h"

namespace bert_unpad::cuda {

template void launch_wgmma_forward<64>(const AttentionRun&, cudaStream_t);
template void launch_wgmma_backward<64>(const AttentionRun&, bool, cudaStream_t);

}  // namespace bert_unpad::cuda
