// Run-time choice among the CPU instruction sets that the *_simd.cpp files were compiled for.
//
// Each such file defines one table of function pointers in the namespace of its instruction set:
//     namespace bert_unpad::BERT_UNPAD_ISA { extern const NormKernels norm_kernels = {...}; }
// and the file that uses it says BU_ISA_TABLE(NormKernels, norm_kernels), which defines
// `const NormKernels& norm_kernels()`. A *_simd.cpp must not instantiate std:: templates, nor
// use inline functions of shared headers that might not be inlined: the linker would keep one copy
// for all CPUs, perhaps the AVX-512 one.
#pragma once

namespace bert_unpad {

enum class Isa : int { kGeneric, kAvx2, kAvx512, kAvx512Bf16 };

// The best instruction set of this machine, or the one named by $BERT_UNPAD_ISA (which must be
// supported here). Decided once.
Isa isa();
const char* isa_name(Isa isa);

// The instruction sets in this build, comma-separated, worst first.
const char* built_isas();

}  // namespace bert_unpad

#if defined(__x86_64__)
#define BU_ISA_TABLE(Type, name)  \
  namespace generic {             \
  extern const Type name;         \
  }                               \
  namespace avx2 {                \
  extern const Type name;         \
  }                               \
  namespace avx512 {              \
  extern const Type name;         \
  }                               \
  namespace avx512_bf16 {         \
  extern const Type name;         \
  }                               \
  static const Type& name() {     \
    switch (isa()) {              \
      case Isa::kAvx512Bf16:      \
        return avx512_bf16::name; \
      case Isa::kAvx512:          \
        return avx512::name;      \
      case Isa::kAvx2:            \
        return avx2::name;        \
      default:                    \
        return generic::name;     \
    }                             \
  }
#else
#define BU_ISA_TABLE(Type, name) \
  namespace generic {            \
  extern const Type name;        \
  }                              \
  static const Type& name() { return generic::name; }
#endif
