// Run-time choice among the CPU instruction sets that the *_simd.cpp, *_fp32.cpp and *_bf16.cpp
// files were compiled for.
//
// Each *_simd.cpp file defines one table of function pointers in the namespace of its instruction
// set:
//     namespace bert_unpad::BERT_UNPAD_ISA { extern const NormKernels norm_kernels = {...}; }
// and the header of the table's type says BU_ISA_TABLE(NormKernels, norm_kernels), which defines
// `const NormKernels& norm_kernels()` for all other files.
//
// A *_fp32.cpp file is one whose loops have no use for bf16 instructions; the sets that multiply
// bf16 take what was compiled for the best set without them. BU_FP32_TABLE defines its function.
//
// A *_bf16.cpp file is compiled only for the sets that multiply bf16: avx512_bf16, amx and
// neon_bf16; BU_BF16_TABLE defines `const NormKernels* norm_kernels()`, which returns null on other
// CPUs. The *_simd.cpp files are not compiled for amx, which uses those of avx512_bf16.
//
// On x86-64, `generic` is SSE2, on aarch64 NEON: what every such CPU has.
//
// None of these files may instantiate std:: templates, or use inline functions of shared headers
// that might not be inlined: the linker would keep one copy for all CPUs, perhaps the AVX-512 one.
#pragma once

#if defined(BERT_UNPAD_ISA)
#define BU_ISA_TABLE(Type, name) \
  namespace BERT_UNPAD_ISA {     \
  extern const Type name;        \
  }
#define BU_FP32_TABLE(Type, name) BU_ISA_TABLE(Type, name)
#define BU_BF16_TABLE(Type, name) BU_ISA_TABLE(Type, name)
#else

#include <string>

namespace bert_unpad {

// A processor's own are in order, the best last.
enum class Isa : int { kGeneric, kAvx2, kAvx512, kAvx512Bf16, kAmx, kNeonBf16 };

// The best instruction set of this machine, or the one named by $BERT_UNPAD_ISA (which must be
// supported here). Decided once.
Isa isa();
const char* isa_name(Isa isa);

// Whether bf16 dot products are faster here than fp32 arithmetic. On AMD's CPUs one does twice the
// work of an fp32 instruction in the same time, and so it is on Arm's Neoverse N2 by LLVM's
// scheduling model (nothing was measured on Arm); on an Intel CPU attention took 1.4 times as long
// with them as in fp32. Also true where $BERT_UNPAD_ISA asks for avx512_bf16.
bool fast_bf16_dot_products();

// Whether there are instructions for dot products of 8-bit numbers: AVX512-VNNI or AVX-VNNI, which
// not all CPUs with AVX-512 or AVX2 have, or Arm's i8mm. $BERT_UNPAD_ISA=avx2 or avx512 does
// without, avx2+vnni and avx512+vnni with them where the CPU has them.
bool int8_dot_products();

// Whether this CPU has AVX-512 but is not Intel's: MKL then multiplies fp32 matrices by AVX2, at
// half the rate of oneDNN and of our own kernels.
bool mkl_leaves_avx512_unused();

// The instruction sets in this build, comma-separated, worst first.
std::string built_isas();

}  // namespace bert_unpad

#if defined(__x86_64__)
// `best`: the set of the tables for CPUs that multiply bf16.
#define BU_TABLE_UP_TO(best, Type, name) \
  namespace generic {                    \
  extern const Type name;                \
  }                                      \
  namespace avx2 {                       \
  extern const Type name;                \
  }                                      \
  namespace avx512 {                     \
  extern const Type name;                \
  }                                      \
  inline const Type& name() {            \
    switch (isa()) {                     \
      case Isa::kAmx:                    \
      case Isa::kAvx512Bf16:             \
        return best::name;               \
      case Isa::kAvx512:                 \
        return avx512::name;             \
      case Isa::kAvx2:                   \
        return avx2::name;               \
      default:                           \
        return generic::name;            \
    }                                    \
  }
#define BU_FP32_TABLE(Type, name) BU_TABLE_UP_TO(avx512, Type, name)
#define BU_ISA_TABLE(Type, name) \
  namespace avx512_bf16 {        \
  extern const Type name;        \
  }                              \
  BU_TABLE_UP_TO(avx512_bf16, Type, name)
#define BU_BF16_TABLE(Type, name)  \
  namespace avx512_bf16 {          \
  extern const Type name;          \
  }                                \
  namespace amx {                  \
  extern const Type name;          \
  }                                \
  inline const Type* name() {      \
    switch (isa()) {               \
      case Isa::kAmx:              \
        return &amx::name;         \
      case Isa::kAvx512Bf16:       \
        return &avx512_bf16::name; \
      default:                     \
        return nullptr;            \
    }                              \
  }
#else
#define BU_FP32_TABLE(Type, name) \
  namespace generic {             \
  extern const Type name;         \
  }                               \
  inline const Type& name() { return generic::name; }
#if defined(__aarch64__)
#define BU_ISA_TABLE(Type, name) \
  namespace generic {            \
  extern const Type name;        \
  }                              \
  namespace neon_bf16 {          \
  extern const Type name;        \
  }                              \
  inline const Type& name() { return isa() == Isa::kNeonBf16 ? neon_bf16::name : generic::name; }
#define BU_BF16_TABLE(Type, name) \
  namespace neon_bf16 {           \
  extern const Type name;         \
  }                               \
  inline const Type* name() { return isa() == Isa::kNeonBf16 ? &neon_bf16::name : nullptr; }
#else
#define BU_ISA_TABLE(Type, name) BU_FP32_TABLE(Type, name)
#define BU_BF16_TABLE(Type, name) \
  inline const Type* name() { return nullptr; }
#endif
#endif
#endif
