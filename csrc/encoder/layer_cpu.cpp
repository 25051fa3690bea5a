// A layer of an encoder on a CPU; see one_layer.h.
#include "encoder/one_layer.h"

#include <cmath>
#include <cstring>

#include "attention/attention.h"
#include "attention/sequences_cpu.h"
#include "common/allocate.h"
#include "cpu/isa.h"
#include "cpu/rows.h"
#include "norm/norm.h"
#include "rotary/arguments.h"

namespace bert_unpad {

namespace {

constexpr const char* kNames[] = {
    "parameters[0]",  "parameters[1]",  "parameters[2]",  "parameters[3]",  "parameters[4]",
    "parameters[5]",  "parameters[6]",  "parameters[7]",  "parameters[8]",  "parameters[9]",
    "parameters[10]", "parameters[11]", "parameters[12]", "parameters[13]", "parameters[14]",
    "parameters[15]", "parameters[16]", "parameters[17]", "parameters[18]", "parameters[19]",
};

bf16* bf16_data(const Tensor& t) { return static_cast<bf16*>(t.data_ptr()); }

}  // namespace

EncoderLayer::EncoderLayer(const char* name, const Tensor& x, const Tensor* parameters,
                           const int64_t* shape, const double* numbers)
    : op(name) {
  check_shape(x, {-1, -1}, op, "x", "[tokens, hidden]");
  check_dtype(x, ScalarType::Float, op, "x", "float32");
  check_contiguous(x, op, "x");
  for (int i = 0; i < kParameters; ++i)
    check(parameters[i].is_cpu(), op, ": parameters must be on the CPU");
  tokens_ = x.size(0);
  hidden_ = x.size(1);
  heads_ = shape[0];
  kv_heads_ = shape[1];
  head_dim_ = shape[2];
  intermediate_ = shape[3];
  check(heads_ > 0 && kv_heads_ > 0 && heads_ % kv_heads_ == 0 && head_dim_ >= 1 &&
            head_dim_ <= 256 && intermediate_ > 0,
        op, ": shape must begin with heads, kv_heads (a divisor), head_dim (1 to 256) and the ",
        "intermediate size, got ", heads_, ", ", kv_heads_, ", ", head_dim_, ", ", intermediate_);
  check(shape[4] >= 0 && shape[4] < kGluKinds, op, ": shape: unknown activation ", shape[4]);
  kind_ = static_cast<GluKind>(shape[4]);
  rms_ = shape[5] != 0;
  before_ = shape[6] != 0;
  window_ = {shape[7], shape[8]};
  scale_ = numbers[0];
  theta_ = numbers[4];
  position_scale_ = numbers[5];
  vectors_.reserve(kParameters);
  const int64_t sizes[kLinears][2] = {
      {hidden_, attended()},    {hidden_, kv_width()},    {hidden_, kv_width()},
      {attended(), hidden_},    {hidden_, intermediate_}, {hidden_, intermediate_},
      {intermediate_, hidden_},
  };
  for (int i = 0; i < kLinears; ++i) {
    const Tensor& weight = parameters[2 * i];
    if (i == kGate && (gated_ = weight.numel() > 0, !gated_)) continue;
    linears_[i] = linear_of(weight, sizes[i][0], sizes[i][1], op, kNames[2 * i]);
    linears_[i].bias = vector(parameters[2 * i + 1], sizes[i][1], kNames[2 * i + 1]);
    (linears_[i].weight ? any_fp32_ : linears_[i].bf16_panels ? any_bf16_ : any_int8_) = true;
    packs_ = packs_ || is_unpacked(linears_[i]);
  }
  for (int i = 0; i < kNorms; ++i) {
    const int at = 2 * (kLinears + i);
    norms_[i] = {nullptr, nullptr, static_cast<float>(numbers[1 + i])};
    if (parameters[at].numel() == 0) continue;
    norms_[i].weight = vector(parameters[at], hidden_, kNames[at]);
    norms_[i].bias = vector(parameters[at + 1], hidden_, kNames[at + 1]);
  }
  // Where all products are of rounded numbers, attention takes bf16 too, if it is faster here.
  in_bf16_ = !any_fp32_ && (isa() == Isa::kAmx || fast_bf16_dot_products());
  const Linear &in = linears_[kIn], &gate = linears_[kGate];
  check(!gated_ || (!in.weight == !gate.weight && !in.panels == !gate.panels &&
                    !in.bf16_panels == !gate.bf16_panels),
        op, ": parameters: ffn_in and ffn_gate must both be packed in the same dtype, or neither");
  check(norms_[kMiddleNorm].weight && (before_ || norms_[kLastNorm].weight), op,
        ": parameters: a norm is missing");
}

void normalise_rows(bool on_all, const EncoderNorm& norm, bool rms, int64_t hidden, const float* x,
                    float* y, int64_t rows) {
  constexpr int64_t kRows = 16;
  on_all = on_all && rows * hidden >= kNumbersForAll;
  for_tasks(on_all, (rows + kRows - 1) / kRows, [&](int64_t i) {
    const int64_t first = i * kRows, count = std::min(kRows, rows - first);
    NormCpuParams p{};
    p.dtype = DType::kFloat32;
    p.hidden = hidden;
    p.padded = padded_columns(hidden);
    p.eps = norm.eps;
    p.keep_threshold = 65536u;
    p.plain = true;
    float mean[kRows], rstd[kRows];
    p.mean = rms ? nullptr : mean;
    p.rstd = rstd;
    p.weight = norm.weight;
    p.bias = norm.bias;
    p.x = x + first * hidden;
    p.y = y + first * hidden;
    norm_kernels().forward(p, 0, count, thread_scratch(2 * p.padded));
  });
}

// Packs the fp32 weights of linear layers [first, last): each is read by many blocks.
void EncoderLayer::pack_all(int first, int last) {
  int64_t floats = 0;
  for (int i = first; i < last; ++i)
    if (is_unpacked(linears_[i])) floats += packed_floats(linears_[i]);
  float* memory = thread_scratch<2>(floats);
  for (int i = first; i < last; ++i) {
    if (!is_unpacked(linears_[i])) continue;
    pack(true, linears_[i], 0, linears_[i].columns, memory);
    memory += packed_floats(linears_[i]);
  }
}

EncoderLayer::Block EncoderLayer::block_memory(int64_t rows) const {
  const int64_t widest = std::max({hidden_, attended(), intermediate_});
  // Products by tiles read 16 rows at a time, from any row on.
  const int64_t bytes = any_int8_ ? multiple_of(64, (rows + 16) * widest) : 0;
  const int64_t rounded = any_bf16_ ? (rows + 16) * widest / 2 : 0;
  const int64_t wide = in_bf16_ ? rows * qkv_width() : 0;
  const int64_t inner = (rows + (linears_[kLast].bf16_panels ? 16 : 0)) * intermediate_;
  float* memory =
      thread_scratch<1>(rows * (3 * hidden_ + 2) + inner + bytes / 4 + rounded + wide + 64);
  const auto take = [&](int64_t floats) {
    float* out = memory;
    memory += floats;
    return out;
  };
  Block block{};
  block.normed = take(rows * hidden_);
  block.middle = take(rows * hidden_);
  block.sum = take(rows * hidden_);
  block.inner = take(inner);
  block.wide = take(wide);
  block.int8.scales = take(rows);
  block.int8.zeros = reinterpret_cast<int32_t*>(take(rows));
  block.int8.data = any_int8_ ? reinterpret_cast<uint8_t*>(take(bytes / 4)) : nullptr;
  block.bf16_rows = any_bf16_ ? reinterpret_cast<bf16*>(take(rounded)) : nullptr;
  return block;
}

// What queries, keys and values are computed from.
const float* EncoderLayer::enter(bool on_all, const float* x, const Block& memory,
                                 int64_t rows) const {
  if (!norms_[kFirstNorm].weight) return x;
  normalise(on_all, norms_[kFirstNorm], x, memory.normed, rows);
  return memory.normed;
}

// From attention's result and the layer's input x to the layer's output.
void EncoderLayer::leave(bool on_all, const Input& attended_rows, const float* x, float* out,
                         const Block& m) const {
  const int64_t rows = attended_rows.rows;
  multiply(on_all, linears_[kOut], attended_rows, {m.sum, hidden_, x});
  normalise(on_all, norms_[kMiddleNorm], m.sum, m.middle, rows);
  const Linear& last = linears_[kLast];
  const Activation activation{kind_, !last.weight, gated_ ? &linears_[kGate] : nullptr};
  // What the last product takes in bf16 is rounded where it is made.
  bf16* rounded = last.bf16_panels ? reinterpret_cast<bf16*>(m.inner) : nullptr;
  multiply(on_all, linears_[kIn], input(on_all, m.middle, hidden_, rows, m),
           {m.inner, intermediate_, nullptr, rounded}, &activation);
  const bool closes = norms_[kLastNorm].weight;
  multiply(on_all, last,
           rounded ? Input{nullptr, 0, rows, {}, rounded}
                   : input(on_all, m.inner, intermediate_, rows, m),
           {closes ? m.normed : out, hidden_, before_ ? m.sum : m.middle});
  if (closes) normalise(on_all, norms_[kLastNorm], m.normed, out, rows);
}

// All but where the numbers are.
void EncoderLayer::set_rotary(RotaryCpuParams& p, const Tensor& positions, int64_t stride) const {
  const RotarySettings settings{heads_ + kv_heads_, theta_, head_dim_, false,
                                position_scale_,    false};
  p.dtype = DType::kFloat32;
  p.wide_positions = positions.scalar_type() == ScalarType::Long;
  p.heads = settings.heads;
  p.pairs = head_dim_ / 2;
  p.positions = positions.const_data_ptr();
  p.x_token_stride = p.out_token_stride = stride;
  p.x_head_stride = p.out_head_stride = head_dim_;
  for (int64_t i = 0; i < p.pairs; ++i) {
    const uint64_t step = settings.step(i);
    p.step_low[i] = static_cast<uint32_t>(step);
    p.step_high[i] = static_cast<uint32_t>(step >> 32);
  }
}

Tensor EncoderLayer::attend(const Projected& projected, const int32_t* cu_q, const int32_t* cu_k,
                            int64_t sequences) const {
  const AttentionKernels& kernels = in_bf16_ ? *attention_bf16_kernels() : attention_kernels();
  const Tensor &kv = projected.kv, &q = projected.q.size(0) > 0 ? projected.q : kv;
  const int64_t queries = q.size(0), width = kv.size(1), key = width - 2 * kv_width();
  Tensor out = allocate(q, {queries + (in_bf16_ ? 16 : 0), attended()});
  Tensor lse = allocate(q, {heads_, queries}, ScalarType::Float);
  AttentionCpuParams p{};
  p.dtype = in_bf16_ ? DType::kBFloat16 : DType::kFloat32;
  p.heads = static_cast<int>(heads_);
  p.kv_heads = static_cast<int>(kv_heads_);
  p.head_dim = static_cast<int>(head_dim_);
  p.scale = static_cast<float>(scale_);
  p.keep_threshold = 65536u;
  p.window = window_;
  p.q = packed(q, q.size(1), head_dim_);
  p.k = packed(kv, width, head_dim_, key);
  p.v = packed(kv, width, head_dim_, key + kv_width());
  p.out_w = writable(out, attended(), head_dim_);
  p.lse = lse.mutable_data_ptr<float>();
  p.q_tokens = queries;
  const std::vector<AttentionTask> tasks =
      forward_tasks(by_work(cu_q, cu_k, sequences), cu_q, cu_k, p.heads, kernels.queries);
  int64_t products = 0;
  for (int64_t i = 0; i < sequences; ++i)
    products += 2 * attended() * (cu_q[i + 1] - cu_q[i]) * (cu_k[i + 1] - cu_k[i]);
  const bool on_all = products >= kProductsForAll;
  for_tasks(on_all, static_cast<int64_t>(tasks.size()), [&](int64_t i) {
    kernels.forward(p, tasks[i], thread_scratch(kernels.scratch(p, tasks[i], false)));
  });
  return out;
}

EncoderLayer::Projected EncoderLayer::project(const Tensor& x, const Tensor* positions,
                                              const Tensor* rows, float* copies, bool in_bf16) {
  const int64_t kv = kv_width(), width = rows ? 2 * kv : qkv_width();
  const int64_t queries = rows ? rows->size(0) : 0;
  const ScalarType dtype = in_bf16 ? ScalarType::BFloat16 : ScalarType::Float;
  Projected found{allocate(x, {queries, attended()}, dtype), allocate(x, {tokens_, width}, dtype)};
  // Rows of a result, or where they are until they are rounded.
  const auto place = [&](Tensor& result, int64_t first, const Block& memory) {
    if (in_bf16) return memory.wide;
    return result.mutable_data_ptr<float>() + first * result.size(1);
  };
  const auto round = [&](bool on_all, Tensor& result, int64_t first, int64_t count,
                         const float* from) {
    const int64_t columns = result.size(1);
    if (in_bf16)
      round_rows(on_all, {from, columns, count, {}, bf16_data(result) + first * columns}, columns);
  };
  const auto* base = x.const_data_ptr<float>();
  RotaryCpuParams rotary{};
  if (theta_ != 0.0 && positions) set_rotary(rotary, *positions, width);
  const RowBlocks all = blocks(tokens_), some = blocks(queries);
  if (!all.split) pack_all(kQuery, kOut);
  all.for_each([&](int64_t first, int64_t count) {
    const Block memory = block_memory(count);
    const bool split = all.split;
    const Input in =
        input(split, enter(split, base + first * hidden_, memory, count), hidden_, count, memory);
    float *qkv = place(found.kv, first, memory), *key = qkv + width - 2 * kv;
    if (!rows) multiply(split, linears_[kQuery], in, {qkv, width});
    multiply(split, linears_[kKey], in, {key, width});
    multiply(split, linears_[kValue], in, {key + kv, width});
    if (rotary.positions) {
      RotaryCpuParams here = rotary;
      here.x = here.out = qkv - first * width;
      rotary_kernels().rotate(here, first, first + count);
    }
    round(split, found.kv, first, count, qkv);
  });
  if (!rows) return found;
  const auto* chosen = rows->const_data_ptr<int64_t>();
  some.for_each([&](int64_t first, int64_t count) {
    const Block memory = block_memory(count);
    const bool split = some.split;
    for (int64_t i = first; i < first + count; ++i)
      std::memcpy(copies + i * hidden_, base + chosen[i] * hidden_, hidden_ * sizeof(float));
    const Input in =
        input(split, enter(split, copies + first * hidden_, memory, count), hidden_, count, memory);
    float* q = place(found.q, first, memory);
    multiply(split, linears_[kQuery], in, {q, attended()});
    round(split, found.q, first, count, q);
  });
  return found;
}

Tensor EncoderLayer::finish(const Tensor& x, const Tensor& attended_rows) {
  const int64_t rows = x.size(0);
  Tensor out = allocate(x, {rows, hidden_});
  const RowBlocks all = blocks(rows);
  if (!all.split) pack_all(kOut, kLinears);
  const bool in_bf16 = attended_rows.scalar_type() == ScalarType::BFloat16;
  const auto* residual = x.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  all.for_each([&](int64_t first, int64_t count) {
    const Block memory = block_memory(count);
    const bool split = all.split;
    const int64_t at = first * attended();
    Input in{nullptr, 0, count, {}, in_bf16 ? bf16_data(attended_rows) + at : nullptr};
    if (!in_bf16 || !linears_[kOut].bf16_panels) {
      const float* from = in_bf16 ? memory.wide : attended_rows.const_data_ptr<float>() + at;
      if (in_bf16) widen_rows(split, in.bf16_rows, count, attended(), memory.wide);
      in = input(split, from, attended(), count, memory);
    }
    leave(split, in, residual + first * hidden_, to + first * hidden_, memory);
  });
  return out;
}

Tensor EncoderLayer::run(const Tensor& x, const Sequences& sequences, const OutputRows& out) {
  const Tensor* rows = out.rows;
  check(!rows || (theta_ == 0.0 && window_.left < 0 && window_.right < 0), op,
        ": rows cannot go with rotary embeddings or a window");
  check(theta_ == 0.0 || (sequences.positions && theta_ > 0.0 && head_dim_ % 2 == 0), op,
        ": rotary embeddings need positions, an even head_dim and a theta above 0");
  const int64_t queries = rows ? rows->size(0) : tokens_;
  if (queries == 0) return allocate(x, {0, hidden_});
  const Tensor residual = rows ? allocate(x, {queries, hidden_}) : x;
  float* copies = rows ? residual.mutable_data_ptr<float>() : nullptr;
  const Projected projected = project(x, sequences.positions, rows, copies, in_bf16_);
  return finish(residual, attend(projected, rows ? out.cu_rows : sequences.cu_seqlens,
                                 sequences.cu_seqlens, sequences.count));
}

}  // namespace bert_unpad
