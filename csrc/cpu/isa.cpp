// Picks the instruction set once, from what the CPU says it has or $BERT_UNPAD_ISA.
#include "cpu/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace bert_unpad {
namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512_bf16", "amx", "neon_bf16"};

#if defined(__x86_64__)
constexpr Isa kBuilt[] = {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx};
#elif defined(__aarch64__)
constexpr Isa kBuilt[] = {Isa::kGeneric, Isa::kNeonBf16};
#else
constexpr Isa kBuilt[] = {Isa::kGeneric};
#endif

#if defined(__x86_64__)
// Whether AMX multiplies bf16 and bytes here. Linux saves tile registers only for processes that
// ask for it.
bool use_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0 || (d & kAmxInt8) == 0) return false;
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

Isa best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16"))
    return use_amx() ? Isa::kAmx : Isa::kAvx512Bf16;
  if (avx512) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#elif defined(__aarch64__) && defined(__linux__)
  // HWCAP2_BF16 and HWCAP2_I8MM, which older headers do not have.
  constexpr unsigned long kBf16 = 1ul << 14, kI8mm = 1ul << 13;
  if ((getauxval(AT_HWCAP2) & kBf16) && (getauxval(AT_HWCAP2) & kI8mm)) return Isa::kNeonBf16;
#endif
  return Isa::kGeneric;
}

// $BERT_UNPAD_ISA; null where it is not set.
const char* asked_for() {
  const char* wish = std::getenv("BERT_UNPAD_ISA");
  return wish != nullptr && *wish != '\0' ? wish : nullptr;
}

constexpr const char* kDotProducts = "+vnni";  // what may follow its name

bool asked_for_dot_products() {
  const char* wish = asked_for();
  return wish != nullptr && std::string(wish).find(kDotProducts) != std::string::npos;
}

Isa choose() {
  const Isa limit = best();
  const char* wish = asked_for();
  if (wish == nullptr) return limit;
  const std::string name = wish;
  for (Isa isa : kBuilt)
    if (isa <= limit &&
        (name == isa_name(isa) || name == std::string(isa_name(isa)) + kDotProducts))
      return isa;
  throw std::runtime_error("BERT_UNPAD_ISA=" + std::string(wish) +
                           " is unknown or not supported by this CPU; its best is " +
                           isa_name(limit));
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

bool fast_bf16_dot_products() {
#if defined(__x86_64__)
  static const bool fast =
      isa() == Isa::kAvx512Bf16 && (asked_for() != nullptr || __builtin_cpu_is("amd"));
  return fast;
#else
  return isa() == Isa::kNeonBf16;
#endif
}

bool int8_dot_products() {
#if defined(__x86_64__)
  static const bool found = [] {
    if (isa() >= Isa::kAvx512Bf16) return true;
    if (asked_for() != nullptr && !asked_for_dot_products()) return false;
    if (isa() == Isa::kAvx512) return __builtin_cpu_supports("avx512vnni") != 0;
    constexpr unsigned kAvxVnni = 1u << 4;
    unsigned a = 0, b = 0, c = 0, d = 0;
    return isa() == Isa::kAvx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAvxVnni) != 0;
  }();
  return found;
#else
  return isa() == Isa::kNeonBf16;
#endif
}

bool mkl_leaves_avx512_unused() {
#if defined(__x86_64__)
  static const bool unused = isa() >= Isa::kAvx512 && !__builtin_cpu_is("intel");
  return unused;
#else
  return false;
#endif
}

std::string built_isas() {
  std::string names;
  for (Isa isa : kBuilt) {
    if (!names.empty()) names += ',';
    names += isa_name(isa);
  }
  return names;
}

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

}  // namespace bert_unpad
