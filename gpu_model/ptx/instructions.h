// From an instruction's text to what runs it.
#pragma once

#include <string>
#include <string_view>

#include "gpu_model/ptx/ops_async.h"
#include "gpu_model/ptx/ops_compare.h"
#include "gpu_model/ptx/ops_convert.h"
#include "gpu_model/ptx/ops_float.h"
#include "gpu_model/ptx/ops_integer.h"
#include "gpu_model/ptx/ops_matrix.h"
#include "gpu_model/ptx/ops_mbarrier.h"
#include "gpu_model/ptx/ops_memory.h"
#include "gpu_model/ptx/ops_warp.h"
#include "gpu_model/ptx/ops_wgmma.h"

namespace bert_unpad::ptx {

// Arithmetic whose type says whether it is of integers or of floats.
inline void decode_arithmetic(Decoder& d, Statement& s, Instruction& i) {
  const Type type = parse_type(s.take_last());
  const std::string_view op = s.base;
  if (is_float(type)) return decode_float(d, s, i, type);
  if (s.take("wide")) return decode_wide(d, s, i, type);
  const bool carry = std::find(s.modifiers.begin(), s.modifiers.end(), "cc") != s.modifiers.end();
  if (carry || op == "addc" || op == "subc" || op == "madc") return decode_carry(d, s, i, type);
  if (op == "neg" || op == "abs") return decode_integer_unary(d, s, i, type);
  if (op == "min" || op == "max" || op == "div" || op == "rem")
    return decode_integer_binary(d, s, i, type);
  decode_integer_arithmetic(d, s, i, type);
}

// What orders memory or warms caches changes nothing where blocks run one after the other and
// instructions in order.
inline void decode_nothing(Decoder&, Statement& s, Instruction& i) {
  s.modifiers.clear();
  i.run = [](Warp&, const Instruction&, uint32_t) {};
}

inline void decode_exit(Decoder&, Statement& s, Instruction& i) {
  s.take("uni");
  i.kind = Kind::kControl;
  i.run = [](Warp& w, const Instruction&, uint32_t lanes) { w.exit(lanes); };
}

inline void decode_trap(Decoder&, Statement&, Instruction& i) {
  i.run = [](Warp& w, const Instruction& i, uint32_t lanes) { w.fail(i, lanes, "trap"); };
}

using Decode = void (*)(Decoder&, Statement&, Instruction&);

inline Decode decoder_of(std::string_view base) {
  struct Row {
    std::string_view names;
    Decode decode;
  };
  static constexpr Row kRows[] = {
      {" add sub mul mad fma div rem min max neg abs addc subc madc rcp sqrt rsqrt ex2 lg2 sin cos "
       "tanh ",
       decode_arithmetic},
      {" and or xor not cnot ", decode_logic},
      {" shl shr ", decode_shift},
      {" shf ", decode_funnel_shift},
      {" bfe bfi ", decode_field},
      {" prmt ", decode_permute},
      {" lop3 ", decode_lop3},
      {" popc clz brev bfind ", decode_count},
      {" setp ", decode_setp},
      {" set ", decode_set},
      {" selp ", decode_select},
      {" slct ", decode_slct},
      {" cvt ", decode_cvt},
      {" mov ", decode_mov},
      {" ld ldu st ", decode_access},
      {" atom red ", decode_atomic},
      {" cvta ", decode_cvta},
      {" cp ", decode_any_copy},
      {" bar barrier ", decode_barrier},
      {" shfl ", decode_shuffle},
      {" vote ", decode_vote},
      {" redux ", decode_redux},
      {" activemask ", decode_activemask},
      {" elect ", decode_elect},
      {" mma ", decode_mma},
      {" ldmatrix stmatrix ", decode_matrices},
      {" wgmma ", decode_wgmma},
      {" setmaxnreg ", decode_setmaxnreg},
      {" mbarrier ", decode_mbarrier},
      {" fence ", decode_fence},
      {" ret exit ", decode_exit},
      {" trap ", decode_trap},
      {" membar prefetch nanosleep griddepcontrol ", decode_nothing},
  };
  const std::string key = " " + std::string(base) + " ";
  for (const Row& row : kRows)
    if (row.names.find(key) != std::string_view::npos) return row.decode;
  return nullptr;
}

inline Instruction decode_instruction(Decoder& d, Statement s) {
  Instruction i;
  i.line = s.line;
  if (!s.guard.empty()) {
    i.flip = s.guard.starts_with('!') ? ~0u : 0;
    i.guard = d.predicate_in(s.guard.substr(i.flip != 0 ? 1 : 0));
  }
  const Decode decode = decoder_of(s.base);
  if (decode == nullptr) throw std::runtime_error("the instruction is not known");
  decode(d, s, i);
  if (!s.modifiers.empty())
    throw std::runtime_error("the modifier ." + std::string(s.modifiers.front()) +
                             " is not known here");
  if (i.run == nullptr) throw std::runtime_error("this form of the instruction is not known");
  return i;
}

}  // namespace bert_unpad::ptx
