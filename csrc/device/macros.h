// Lets one header serve nvcc, where functions need __host__ __device__, and a plain C++ compiler.
#pragma once

#ifdef __CUDACC__
#define BU_HD __host__ __device__ __forceinline__
#else
#define BU_HD inline
#endif
