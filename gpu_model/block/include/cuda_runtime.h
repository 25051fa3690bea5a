// Stands in for the CUDA runtime's C++ header.
#pragma once

#include <cuda_runtime_api.h>
