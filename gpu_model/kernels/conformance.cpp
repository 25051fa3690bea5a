// The conformance kernels on the host model.
#include "gpu_model/kernels/conformance.cu"
