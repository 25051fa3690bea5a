// The conformance kernels on the model of a block.
#include "gpu_model/kernels/conformance.cu"
#include "gpu_model/kernels/conformance_sm90a.cu"
