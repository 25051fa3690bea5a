// Picks the instruction set once, from CPUID or $BERT_UNPAD_ISA.
#include "cpu/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace bert_unpad {
namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512_bf16"};

Isa best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512) return __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kGeneric;
}

Isa choose() {
  const Isa limit = best();
  const char* wish = std::getenv("BERT_UNPAD_ISA");
  if (wish == nullptr || *wish == '\0') return limit;
  for (int i = 0; i <= static_cast<int>(limit); ++i)
    if (std::string(kNames[i]) == wish) return static_cast<Isa>(i);
  throw std::runtime_error("BERT_UNPAD_ISA=" + std::string(wish) +
                           " is unknown or not supported by this CPU; its best is " +
                           kNames[static_cast<int>(limit)]);
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

const char* built_isas() {
#if defined(__x86_64__)
  return "generic,avx2,avx512,avx512_bf16";
#else
  return "generic";
#endif
}

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

}  // namespace bert_unpad
