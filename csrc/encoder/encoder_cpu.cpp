// CPU bindings of encoder layers, forward only.
#include <vector>

#include "attention/sequences_cpu.h"
#include "common/checks.h"
#include "encoder/layers.h"

namespace bert_unpad {

namespace {

// The only layer of a call.
EncoderLayer one_layer(const char* op, const Tensor& x, const std::vector<Tensor>& parameters,
                       const std::vector<int64_t>& shape, const std::vector<double>& numbers) {
  check(LayerLists{parameters, shape, numbers}.count(op) == 1, op,
        ": expected the parameters of one layer");
  return EncoderLayer(op, x, parameters.data(), shape.data(), numbers.data());
}

Tensor encoder_layers(Tensor x, Tensor cu_seqlens, int64_t max_seqlen,
                      std::optional<Tensor> positions, std::optional<Tensor> rows,
                      std::optional<Tensor> cu_rows, std::vector<Tensor> parameters,
                      std::vector<int64_t> shape, std::vector<double> numbers) {
  const char* op = "encoder_layers";
  const LayerLists lists{parameters, shape, numbers};
  check(lists.count(op) >= 1, op, ": parameters must hold a layer");
  check_shape(x, {-1, -1}, op, "x", "[tokens, hidden]");
  check(rows.has_value() == cu_rows.has_value(), op, ": rows and cu_rows must be given together");
  const AttentionRows keys{x, "x", cu_seqlens, "cu_seqlens", max_seqlen};
  const AttentionRows read =
      rows ? AttentionRows{*rows, "rows", *cu_rows, "cu_rows", max_seqlen} : keys;
  for (const AttentionRows* side : {&read, &keys})
    check(side->cu_seqlens.is_cpu(), op, ": ", side->cu_name, " must be on the CPU like x");
  if (rows) {
    check_shape(*rows, {-1}, op, "rows", "[rows]");
    check_dtype(*rows, ScalarType::Long, op, "rows", "int64");
    check_contiguous(*rows, op, "rows");
    check(rows->is_cpu(), op, ": rows must be on the CPU like x");
  }
  if (positions) {
    check_shape(*positions, {x.size(0)}, op, "positions", "[tokens]");
    check(
        positions->scalar_type() == ScalarType::Long || positions->scalar_type() == ScalarType::Int,
        op, ": positions must be int32 or int64");
    check_contiguous(*positions, op, "positions");
    check(positions->is_cpu(), op, ": positions must be on the CPU like x");
  }
  const int64_t count = check_sequences(read, keys, op);
  const int32_t *cu_q = check_cu_seqlens(read, op), *cu_k = check_cu_seqlens(keys, op);
  const auto* chosen = rows ? rows->const_data_ptr<int64_t>() : nullptr;
  for (int64_t b = 0; chosen && b < count; ++b)
    for (int64_t i = cu_q[b]; i < cu_q[b + 1]; ++i)
      check(chosen[i] >= cu_k[b] && chosen[i] < cu_k[b + 1], op, ": rows of sequence ", b,
            " must be at least ", cu_k[b], " and below ", cu_k[b + 1], ", but entry ", i, " is ",
            chosen[i]);
  const OutputRows last{rows ? &*rows : nullptr, cu_q};
  const Sequences sequences{cu_k, count, positions ? &*positions : nullptr};
  return run_layers(op, x, lists, sequences, last);
}

Tensor encoder_project(Tensor x, std::vector<Tensor> parameters, std::vector<int64_t> shape,
                       std::vector<double> numbers) {
  return one_layer("encoder_project", x, parameters, shape, numbers)
      .project(x, nullptr, nullptr, nullptr, false)
      .kv;
}

Tensor encoder_finish(Tensor x, Tensor attended, std::vector<Tensor> parameters,
                      std::vector<int64_t> shape, std::vector<double> numbers) {
  EncoderLayer layer = one_layer("encoder_finish", x, parameters, shape, numbers);
  layer.check_attended(attended);
  return layer.finish(x, attended);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("encoder_layers", TORCH_BOX(&encoder_layers));
  m.impl("encoder_project", TORCH_BOX(&encoder_project));
  m.impl("encoder_finish", TORCH_BOX(&encoder_finish));
}

}  // namespace bert_unpad
