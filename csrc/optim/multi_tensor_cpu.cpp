// CPU bindings of the norm and the scaling of a list of tensors.
#include <cmath>
#include <tuple>

#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "optim/arguments.h"
#include "optim/chunks.h"

namespace bert_unpad {

BU_ISA_TABLE(MultiTensorKernels, multi_tensor_kernels)

namespace {

std::tuple<Tensor, Tensor> multi_tensor_l2norm(Tensors tensors) {
  const char* op = "multi_tensor_l2norm";
  const PlainList list(tensors, op);
  std::vector<int64_t> first;
  const std::vector<Chunk> chunks = chunks_of(list.tensors, &first);
  std::vector<double> sums(chunks.size());
  const MultiTensorKernels& kernels = multi_tensor_kernels();
  parallel_tasks(static_cast<int64_t>(chunks.size()), [&](int64_t i) {
    const Chunk& c = chunks[i];
    sums[i] =
        kernels.square_sum(list.dtypes[c.tensor], list.tensors[c.tensor].data, c.begin, c.end);
  });
  const auto count = static_cast<int64_t>(tensors.size());
  Tensor total = torch::stable::new_empty(tensors[0], {}, ScalarType::Float);
  Tensor each = torch::stable::new_empty(tensors[0], {count}, ScalarType::Float);
  auto* norms = each.mutable_data_ptr<float>();
  double all = 0.0;
  for (int64_t t = 0; t < count; ++t) {
    double sum = 0.0;
    for (int64_t i = first[t]; i < first[t + 1]; ++i) sum += sums[i];
    norms[t] = static_cast<float>(std::sqrt(sum));
    all += sum;
  }
  *total.mutable_data_ptr<float>() = static_cast<float>(std::sqrt(all));
  return {total, each};
}

void multi_tensor_scale_(Tensors tensors, Tensor factor) {
  const char* op = "multi_tensor_scale_";
  if (tensors.empty()) return;
  const PlainList list(tensors, op);
  check_scalar(factor, tensors[0], op, "factor");
  const float by = *factor.const_data_ptr<float>();
  const std::vector<Chunk> chunks = chunks_of(list.tensors);
  const MultiTensorKernels& kernels = multi_tensor_kernels();
  parallel_tasks(static_cast<int64_t>(chunks.size()), [&](int64_t i) {
    const Chunk& c = chunks[i];
    kernels.scale(list.dtypes[c.tensor], list.tensors[c.tensor].data, by, c.begin, c.end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("multi_tensor_l2norm", TORCH_BOX(&multi_tensor_l2norm));
  m.impl("multi_tensor_scale_", TORCH_BOX(&multi_tensor_scale_));
}

}  // namespace bert_unpad
