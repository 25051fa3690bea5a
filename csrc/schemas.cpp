// Every operator's schema, in one place. Implementations are registered per device by
// csrc/<family>/*_cpu.cpp and *_cuda.cpp; fake kernels and autograd are Python's (bert_unpad/ops).
//
// `rng` is an int64 tensor [2] (seed, offset) on the operator's device; it is needed where the
// dropout probability is not 0.
//
// `order` and `groups` say in which order attention on a GPU takes the sequences; results do not
// depend on them (csrc/attention/arguments.h).
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(bert_unpad, m) {
  // Attention. num_heads 0: qkv is [tokens, 3, heads, head_dim]. bias_*: the parts of a position
  // bias; their gradients come back as empty tensors [0] where there is no such part, that of the
  // table also without table_gradient.
  m.def(
      "varlen_attention(Tensor qkv, Tensor cu_seqlens, SymInt max_seqlen, float scale, "
      "float dropout_p, Tensor? rng, Tensor? order=None, Tensor? groups=None, int num_heads=0, "
      "int window_left=-1, int window_right=-1, Tensor? bias_buckets=None, Tensor? "
      "bias_table=None, "
      "Tensor? bias_query=None, Tensor? bias_key=None) -> (Tensor out, Tensor lse)");
  m.def(
      "varlen_attention_backward(Tensor dout, Tensor qkv, Tensor out, Tensor lse, "
      "Tensor cu_seqlens, SymInt max_seqlen, float scale, float dropout_p, Tensor? rng, "
      "Tensor? order=None, Tensor? groups=None, int num_heads=0, int window_left=-1, "
      "int window_right=-1, Tensor? bias_buckets=None, Tensor? bias_table=None, "
      "Tensor? bias_query=None, Tensor? bias_key=None, bool table_gradient=False) "
      "-> (Tensor dqkv, Tensor dtable, Tensor dquery, Tensor dkey)");
  m.def(
      "varlen_cross_attention(Tensor q, Tensor kv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, float dropout_p, Tensor? rng, "
      "Tensor? order=None, Tensor? groups=None, int window_left=-1, int window_right=-1, "
      "Tensor? query_positions=None, Tensor? bias_buckets=None, Tensor? bias_table=None, "
      "Tensor? bias_query=None, Tensor? bias_key=None) -> (Tensor out, Tensor lse)");
  m.def(
      "varlen_cross_attention_backward(Tensor dout, Tensor q, Tensor kv, Tensor out, Tensor lse, "
      "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
      "float scale, float dropout_p, Tensor? rng, Tensor? order=None, Tensor? groups=None, "
      "int window_left=-1, int window_right=-1, Tensor? query_positions=None, "
      "Tensor? bias_buckets=None, Tensor? bias_table=None, Tensor? bias_query=None, "
      "Tensor? bias_key=None, bool table_gradient=False) "
      "-> (Tensor dq, Tensor dkv, Tensor dtable, Tensor dquery, Tensor dkey)");

  // Results that were not asked for, or that equal another, come back as empty tensors [0]: `sum`
  // without `return_sum`, `mean` with `rms`, dresidual where dropout_p is 0 (it equals dx) or there
  // is no residual, a bias's gradient where there is no bias. A missing mean means `rms`.
  m.def(
      "dropout_add_layer_norm(Tensor x, Tensor? x_bias, Tensor? residual, Tensor weight, "
      "Tensor? bias, float dropout_p, float eps, Tensor? rng, bool rms=False, "
      "bool return_sum=False) "
      "-> (Tensor y, Tensor sum, Tensor mean, Tensor rstd)");
  // The same of a matrix, and y in 8 bits, E4M3, as quantize_fp8_scaled rounds. Its derivative is
  // that of dropout_add_layer_norm.
  m.def(
      "dropout_add_layer_norm_fp8(Tensor x, Tensor? x_bias, Tensor? residual, Tensor weight, "
      "Tensor? bias, float dropout_p, float eps, Tensor? rng, bool rms, bool return_sum, "
      "Tensor scale, Tensor(a!)? largest, bool transpose) "
      "-> (Tensor y, Tensor sum, Tensor mean, Tensor rstd, Tensor q, Tensor q_transposed)");
  m.def(
      "dropout_add_layer_norm_backward(Tensor dy, Tensor x, Tensor? x_bias, Tensor? residual, "
      "Tensor weight, Tensor? mean, Tensor rstd, float dropout_p, Tensor? rng, bool bias=True) "
      "-> (Tensor dx, Tensor dresidual, Tensor dx_bias, Tensor dweight, Tensor dbias)");
  // The same from the sum that the forward pass returned, to whose gradient `dsum` is added.
  m.def(
      "dropout_add_norm_sum_backward(Tensor dy, Tensor? dsum, Tensor sum, Tensor? x_bias, "
      "Tensor weight, Tensor? mean, Tensor rstd, float dropout_p, Tensor? rng, bool bias, "
      "bool residual) "
      "-> (Tensor dx, Tensor dresidual, Tensor dx_bias, Tensor dweight, Tensor dbias)");

  m.def("bias_gelu(Tensor x, Tensor? bias, bool tanh) -> Tensor");
  m.def(
      "bias_gelu_backward(Tensor dy, Tensor x, Tensor? bias, bool tanh) "
      "-> (Tensor dx, Tensor dbias)");

  // The same, of a matrix, in 8 bits, E4M3 and for the gradient E5M2, as quantize_fp8_scaled
  // rounds.
  m.def(
      "bias_gelu_fp8(Tensor x, Tensor? bias, bool tanh, Tensor scale, Tensor(a!)? largest, "
      "bool transpose) -> (Tensor q, Tensor q_transposed)");
  m.def(
      "bias_gelu_fp8_backward(Tensor dy, Tensor x, Tensor? bias, bool tanh, Tensor scale, "
      "Tensor(a!)? largest, bool transpose) -> (Tensor q, Tensor q_transposed, Tensor dbias)");

  // x [..., 2 * width]: an activation (csrc/gelu/glu_kind.h) of the first half times the second
  // half, both with bias [2 * width].
  m.def("glu(Tensor x, Tensor? bias, int kind) -> Tensor");
  m.def("glu_backward(Tensor dy, Tensor x, Tensor? bias, int kind) -> (Tensor dx, Tensor dbias)");

  // Rotates the first rotary_dim elements of x's [tokens, N, head_dim] first `heads` heads by
  // angles that grow with `positions` [tokens], backwards where `inverse`; in place, or in a copy
  // of x.
  m.def(
      "rotary_(Tensor(a!) x, Tensor positions, int heads, float theta, int rotary_dim, "
      "bool interleaved, float position_scale, bool inverse) -> ()");
  m.def(
      "rotary(Tensor x, Tensor positions, int heads, float theta, int rotary_dim, "
      "bool interleaved, float position_scale, bool inverse) -> Tensor");

  // The products of a linear layer on [tokens, features] matrices. With `gelu` the result is the
  // tanh GELU of `pre`, the product with its bias, else pre is empty [0]; linear_dgrad with `pre`
  // multiplies by that GELU's derivative. linear_wgrad_ writes dweight, or adds to it. dbias is
  // empty [0] where `bias` is false.
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, bool gelu) -> (Tensor y, Tensor pre)");
  m.def("linear_dgrad(Tensor dy, Tensor weight, Tensor? addend, Tensor? pre) -> Tensor");
  m.def(
      "linear_wgrad(Tensor dy, Tensor x, bool bias, ScalarType dtype) "
      "-> (Tensor dweight, Tensor dbias)");
  m.def(
      "linear_wgrad_(Tensor dy, Tensor x, Tensor(a!) dweight, bool accumulate, bool bias) "
      "-> Tensor dbias");
  // Products of our own on a CPU: y = x weight^T + bias + addend in fp32, where weight may be a
  // transposed view; and the gradient of a weight, into an fp32 dweight, with an fp32 dbias.
  m.def(
      "packed_product_(Tensor(a!) y, Tensor x, Tensor weight, Tensor? bias, Tensor? addend) -> ()");
  m.def(
      "packed_wgrad_(Tensor dy, Tensor x, Tensor(a!) dweight, bool accumulate, bool bias) "
      "-> Tensor dbias");

  // Whole encoder layers on a CPU, forward only (csrc/encoder/layer_cpu.cpp). Of each layer in
  // turn, parameters: weight and bias of query, key, value, attention's output, feed-forward input,
  // gate and output, and of the norms before attention, before the feed-forward half and at the
  // end; empty [0] where there is none. Weights of linear layers may be those of encoder_pack.
  // shape: heads, kv_heads, head_dim, intermediate size, activation (csrc/gelu/glu_kind.h), rms,
  // norms before the halves, window_left, window_right. numbers: attention's scale, eps of the
  // norms, theta of rotary embeddings (0: none), position_scale. rows and cu_rows: the tokens whose
  // output is wanted.
  m.def(
      "encoder_layers(Tensor x, Tensor cu_seqlens, int max_seqlen, Tensor? positions, "
      "Tensor? rows, Tensor? cu_rows, Tensor[] parameters, int[] shape, float[] numbers) "
      "-> Tensor");
  // The two parts of a layer around attention: to queries, keys and values side by side, without
  // rotary embeddings, and from attention's result.
  m.def("encoder_project(Tensor x, Tensor[] parameters, int[] shape, float[] numbers) -> Tensor");
  m.def(
      "encoder_finish(Tensor x, Tensor attended, Tensor[] parameters, int[] shape, "
      "float[] numbers) -> Tensor");
  m.def("encoder_pack(Tensor weight, ScalarType dtype) -> Tensor");
  // A whole encoder on a CPU (csrc/encoder/model_cpu.cpp), of ids [B, S] where mask is 1, or of
  // all. embeddings: tables of words, positions and token types, weight and bias of their norm, and
  // of the norm after the last layer; empty [0] where there is none. first_position: of a
  // sequence's first token. padding_id: positions are counted from the ids that are not it, as in
  // RoBERTa; -1: they are columns. eps: of both norms. parameters, shape, numbers: as for
  // encoder_layers. result: 0 hidden states [B * S, hidden], zeros where mask is 0; 1 their mean in
  // each row, [B, hidden]; 2 the first tokens', [B, hidden]. reads_first: somebody reads the first
  // column.
  m.def(
      "encoder_model(Tensor ids, Tensor? mask, Tensor? token_types, Tensor[] embeddings, "
      "int first_position, int padding_id, float[] eps, Tensor[] parameters, int[] shape, "
      "float[] numbers, int result, bool reads_first) -> Tensor");

  // 8 bits: scale is float32 [], what q is to be multiplied with. q_transposed [columns, rows] has
  // its columns padded to a multiple of 16 with zeros; it is [0, 0] where it is not wanted.
  // quantize_weights_fp8_ does the same for a list of float32 matrices, in E4M3 and transposed.
  // fp8_product = (b * b_scale) (a * a_scale)^T + bias: [a_rows, k], [b_rows, k] -> [b_rows,
  // a_rows]; with `sum_over_tokens` k counts tokens, else b_rows does.
  m.def(
      "quantize_fp8(Tensor x, bool e5m2, bool transpose) "
      "-> (Tensor q, Tensor q_transposed, Tensor scale)");
  // By a scale that is given; `largest` [1024] keeps the largest values, where they are above what
  // is there. With `sum` the columns' sums before rounding too, float32 [columns], else [0].
  m.def(
      "quantize_fp8_scaled(Tensor x, bool e5m2, bool transpose, Tensor scale, "
      "Tensor(a!)? largest, bool sum=False) -> (Tensor q, Tensor q_transposed, Tensor sums)");
  m.def(
      "quantize_weights_fp8_(Tensor[] weights, Tensor(a!)[] q, Tensor(b!)[] q_transposed, "
      "Tensor(c!)[] scales) -> ()");
  m.def(
      "fp8_product(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, "
      "ScalarType dtype, bool sum_over_tokens) -> Tensor");
  // The same, over tokens, written or added to what there is.
  m.def(
      "fp8_product_(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor(a!) out, "
      "bool accumulate) -> ()");

  m.def(
      "embedding_layer_norm(Tensor input_ids, Tensor position_ids, Tensor token_type_ids, "
      "Tensor word, Tensor position, Tensor token_type, Tensor weight, Tensor bias, "
      "float dropout_p, float eps, ScalarType out_dtype, Tensor? rng) "
      "-> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "embedding_layer_norm_backward(Tensor dy, Tensor input_ids, Tensor position_ids, "
      "Tensor token_type_ids, Tensor word, Tensor position, Tensor token_type, Tensor weight, "
      "Tensor mean, Tensor rstd, float dropout_p, Tensor? rng) "
      "-> (Tensor dword, Tensor dposition, Tensor dtoken_type, Tensor dweight, Tensor dbias)");

  m.def(
      "masked_cross_entropy(Tensor logits, Tensor labels, SymInt vocab_size, int ignore_index) "
      "-> (Tensor loss_sum, Tensor correct, Tensor lse)");
  m.def(
      "masked_cross_entropy_backward(Tensor dloss, Tensor logits, Tensor labels, Tensor lse, "
      "SymInt vocab_size, int ignore_index) -> Tensor");
  // Writes the gradient into the logits.
  m.def(
      "masked_cross_entropy_backward_(Tensor dloss, Tensor(a!) logits, Tensor labels, Tensor lse, "
      "SymInt vocab_size, int ignore_index) -> ()");

  // Return the norm, fp32 []. `bound` is a factor of max_norm that the device knows.
  m.def("clip_bucket_(Tensor(a!) bucket, float max_norm, Tensor? bound, float factor) -> Tensor");
  m.def(
      "clip_bucket_into(Tensor bucket, Tensor(a!) out, Tensor(b!)? residual, float max_norm, "
      "Tensor? bound, float factor) -> Tensor");

  // Signs of value + error, a bit each. Where `guard` is not finite, nothing changes. Without a
  // value the error alone is compressed. `factor` is one of all scales.
  m.def("sign_scale(Tensor? value, Tensor error) -> Tensor");
  m.def(
      "sign_pack_(Tensor? value, Tensor(a!) error, Tensor(b!) bits, Tensor scale, Tensor? guard) "
      "-> ()");
  m.def(
      "sign_mean_(Tensor bits, Tensor scales, Tensor(a!) out, float factor, bool add, "
      "Tensor? guard) -> ()");
  m.def("sign_unpack_(Tensor bits, Tensor scales, Tensor(a!) out) -> ()");

  // Lists of tensors. `masters` is empty or has the float32 weights of 16-bit params; `steps`,
  // `lr`, `grad_scale` and `norm` are float32 scalars on the tensors' device. Where `norm` (of the
  // gradient that was handed in) is not finite, nothing but `skipped` changes.
  m.def("multi_tensor_l2norm(Tensor[] tensors) -> (Tensor total, Tensor each)");
  m.def("multi_tensor_scale_(Tensor(a!)[] tensors, Tensor factor) -> ()");
  m.def(
      "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] masters, Tensor(e!)[] steps, Tensor lr, Tensor? grad_scale, Tensor? norm, "
      "Tensor(f!)? skipped, float beta1, float beta2, float eps, float weight_decay, "
      "float max_grad_norm, bool decoupled, bool bias_correction, bool maximize) -> ()");
  m.def(
      "lamb_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] masters, Tensor(e!)[] steps, Tensor lr, Tensor? grad_scale, Tensor? norm, "
      "Tensor? grad_norms, Tensor(f!)? skipped, float beta1, float beta2, float eps, "
      "float weight_decay, float max_grad_norm, bool grad_averaging, bool bias_correction, "
      "bool trust_ratio, bool nesterov, bool maximize) -> ()");
  // Its two halves, for shards: between them `sums`, squares of norms by tensor, are added up.
  m.def(
      "lamb_moments_(Tensor[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
      "Tensor(c!)[] exp_avg_sqs, Tensor[] masters, Tensor(e!)[] steps, Tensor lr, "
      "Tensor? grad_scale, Tensor? norm, Tensor? grad_norms, Tensor(f!)? skipped, float beta1, "
      "float beta2, float eps, float weight_decay, float max_grad_norm, bool grad_averaging, "
      "bool bias_correction, bool nesterov, bool maximize) -> (Tensor sums, Tensor coefficients)");
  m.def(
      "lamb_apply_(Tensor(a!)[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, "
      "Tensor(d!)[] masters, Tensor sums, Tensor coefficients, float beta1, float eps, "
      "float weight_decay, bool trust_ratio, bool nesterov) -> ()");
  m.def(
      "stable_adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
      "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] masters, Tensor(e!)[] steps, Tensor lr, "
      "Tensor? grad_scale, Tensor? norm, Tensor(f!)? skipped, float beta1, float beta2, float eps, "
      "float weight_decay, float max_grad_norm, bool maximize) -> ()");
  // The same in two halves, as for LAMB.
  m.def(
      "stable_adamw_moments_(Tensor[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
      "Tensor(c!)[] exp_avg_sqs, Tensor[] masters, Tensor(e!)[] steps, Tensor lr, "
      "Tensor? grad_scale, Tensor? norm, Tensor(f!)? skipped, float beta1, float beta2, float eps, "
      "float weight_decay, float max_grad_norm, bool maximize) -> (Tensor sums, Tensor "
      "coefficients)");
  m.def(
      "stable_adamw_apply_(Tensor(a!)[] params, Tensor[] grads, Tensor[] exp_avgs, "
      "Tensor[] exp_avg_sqs, Tensor(d!)[] masters, Tensor sums, Tensor coefficients, float eps, "
      "float weight_decay) -> ()");
  // The variance stays as it is; `lr` is a scalar or one number a tensor. With `averaged` the
  // gradients are the new exp_avgs.
  m.def(
      "frozen_adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
      "Tensor[] exp_avg_sqs, Tensor(d!)[] masters, Tensor(e!)[] steps, Tensor? variance_step, "
      "Tensor lr, Tensor? grad_scale, Tensor? norm, Tensor(f!)? skipped, float beta1, float beta2, "
      "float eps, float weight_decay, bool averaged, bool bias_correction) -> ()");
  m.def(
      "frozen_lamb_sums_(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, "
      "Tensor[] exp_avg_sqs, Tensor(a!)[] fresh_sqs, Tensor? norm, float beta1, float beta2, "
      "float eps, float weight_decay) -> Tensor");
}
