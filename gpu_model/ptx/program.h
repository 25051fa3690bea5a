// A kernel as the interpreter runs it: instructions with their operands' places in the register
// file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpu_model/ptx/types.h"

namespace bert_unpad::ptx {

struct Warp;
struct Instruction;
// Does an instruction in the lanes whose bits are set, at least one.
using Handler = void (*)(Warp&, const Instruction&, uint32_t lanes);

enum class Kind : uint8_t {
  kPlain,
  kControl,     // changes where lanes go on
  kCollective,  // all lanes of a warp take part, or those that a mask names
};

inline constexpr uint32_t kNoOffset = ~0u;

struct Instruction {
  static constexpr int kMaxOperands = 15;

  Handler run = nullptr;
  uint32_t guard = kNoOffset, flip = 0;  // predicate, and what it is xor-ed with
  Kind kind = Kind::kPlain;
  uint8_t count = 1;             // elements of a vector, matrices of ldmatrix
  uint8_t bytes = 4;             // of an element in memory
  bool wide = false;             // the address is a 64-bit register
  bool wide_data = false;        // so are the others
  bool read_only = false;        // ld.nc: of what no thread writes during the launch
  bool uses_wgmma = false;       // of Kernel::wgmma_registers some: `uses_begin` to `uses_end`
  bool orders_blocks = false;    // an atomic operation with .acq_rel
  uint32_t members = kNoOffset;  // register with the lanes that take part; all if there is none
  uint32_t a[kMaxOperands] = {};
  int64_t immediate = 0;  // displacement of an address, target of a branch, a constant operand
  int64_t source_displacement = 0;        // of an asynchronous copy
  int64_t barrier_displacement = 0;       // of the mbarrier of a bulk copy
  uint32_t line = 0;                      // in the PTX
  uint32_t place = 0;                     // in Kernel::places
  uint32_t uses_begin = 0, uses_end = 0;  // in Kernel::uses
};

// What a wgmma.mma_async has beyond an Instruction, which names the form by `immediate`; in `a`:
// the descriptors of A and B, and scale-d.
struct WgmmaForm {
  uint32_t columns = 0;  // n
  bool is_bf16 = false;  // otherwise fp16
  bool a_k_major = true, b_k_major = true;
  bool a_in_registers = false;
  bool negated = false;          // by one of scale-a and scale-b
  std::vector<uint32_t> sums;    // numbers in Kernel::wgmma_registers
  std::vector<uint32_t> inputs;  // with A, if they hold it
};

// A register that holds sums or A of some wgmma.
struct WgmmaRegister {
  uint32_t offset;
  std::string name;
};

// Where an instruction comes from: the PTX's own file without line information.
struct Place {
  const char* file;
  unsigned line;
};

enum class Special : uint8_t {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLaneId,
  kWarpId,
  kNwarpId,
  kLanemaskEq,
  kLanemaskLt,
  kLanemaskLe,
  kLanemaskGt,
  kLanemaskGe,
  kDynamicSharedBytes,
  kTotalSharedBytes
};

struct Parameter {
  uint32_t offset, bytes;
};

struct Kernel {
  std::string name;  // for messages
  std::vector<Instruction> code;
  std::vector<Place> places;
  // What a warp's registers hold at first: constants, and nonsense in the rest.
  std::vector<unsigned char> image;
  struct SpecialRegister {
    Special kind;
    uint32_t offset;
  };
  std::vector<SpecialRegister> specials;
  std::vector<Parameter> parameters;
  uint32_t parameter_bytes = 0;
  uint32_t static_shared_bytes = 0;
  uint32_t local_bytes = 0;
  uint32_t max_threads = 1024;
  // Races are looked for in units of so many bytes: the smallest that is accessed, of shared and of
  // global memory.
  uint32_t grain = 4, global_grain = 16;
  bool has_read_only_loads = false;
  std::vector<WgmmaForm> wgmma;
  std::vector<WgmmaRegister> wgmma_registers;
  std::vector<uint32_t> uses;  // of wgmma_registers, by instructions other than wgmma
};

// Address windows. A generic address is the address in the window plus its base; global addresses
// are those of the host.
inline constexpr uint64_t kSharedWindow = uint64_t{1} << 60, kParameterWindow = uint64_t{2} << 60,
                          kLocalWindow = uint64_t{3} << 60, kWindowMask = (uint64_t{1} << 60) - 1;
// Where shared memory and parameters begin in their windows: far from 0, so that an offset taken
// for an address is out of bounds.
inline constexpr uint64_t kSharedBase = 0x01000000, kParameterBase = 0x1000, kLocalBase = 0x100000;

}  // namespace bert_unpad::ptx
