// The conformance kernels on the host model.
#include "host_cuda/conformance.cu"
