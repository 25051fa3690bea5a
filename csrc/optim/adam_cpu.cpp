// CPU binding of Adam: checks, coefficients, chunks over threads.
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "optim/chunks.h"
#include "optim/steps_cpu.h"

namespace bert_unpad {

BU_ISA_TABLE(UpdateKernels, update_kernels)

namespace {

void adam_(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors masters,
           Tensors steps, Tensor lr, std::optional<Tensor> grad_scale, std::optional<Tensor> norm,
           std::optional<Tensor> skipped, double beta1, double beta2, double eps,
           double weight_decay, double max_grad_norm, bool decoupled, bool bias_correction,
           bool maximize) {
  const char* op = "adam_";
  const UpdateRule rule = adam_rule(beta1, beta2, eps, weight_decay, max_grad_norm, decoupled,
                                    bias_correction, maximize);
  check_rule(rule, op);
  const UpdateList list(params, grads, exp_avgs, exp_avg_sqs, masters, &steps, op);
  if (params.empty()) return;
  const UpdateScalars scalars{lr, grad_scale, norm, skipped};
  scalars.check_all(params[0], rule, op);
  const std::vector<Coefficients> coefficients = advance_steps(list, rule, scalars, nullptr);
  const RuleFactors factors = factors_of(rule);
  const std::vector<Chunk> chunks = chunks_of(list.tensors);
  const UpdateKernels& kernels = update_kernels();
  parallel_tasks(static_cast<int64_t>(chunks.size()), [&](int64_t i) {
    const Chunk& c = chunks[i];
    if (coefficients[c.tensor].skipped()) return;
    kernels.adam(factors, coefficients[c.tensor], list.param_dtype, list.grad_dtype,
                 list.tensors[c.tensor], c.begin, c.end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) { m.impl("adam_", TORCH_BOX(&adam_)); }

}  // namespace bert_unpad
