// The norm and the scaling of a list of tensors on a CPU.
#include <cmath>

#include "cpu/parallel.h"
#include "optim/chunks.h"
#include "optim/operators.h"

namespace bert_unpad {

namespace {

struct CpuLists {
  CpuLists(const char*, const Tensor&) {}

  void l2norm(const PlainList& list, Tensor& total, Tensor& each) const {
    std::vector<int64_t> first;
    const std::vector<Chunk> chunks = chunks_of(list.tensors, &first);
    std::vector<double> sums(chunks.size());
    const MultiTensorKernels& kernels = multi_tensor_kernels();
    parallel_tasks(static_cast<int64_t>(chunks.size()), [&](int64_t i) {
      const Chunk& c = chunks[i];
      sums[i] =
          kernels.square_sum(list.dtypes[c.tensor], list.tensors[c.tensor].data, c.begin, c.end);
    });
    auto* norms = each.mutable_data_ptr<float>();
    double all = 0.0;
    for (size_t t = 0; t < list.tensors.size(); ++t) {
      double sum = 0.0;
      for (int64_t i = first[t]; i < first[t + 1]; ++i) sum += sums[i];
      norms[t] = static_cast<float>(std::sqrt(sum));
      all += sum;
    }
    *total.mutable_data_ptr<float>() = static_cast<float>(std::sqrt(all));
  }

  void scale(const PlainList& list, const float* factor) const {
    const std::vector<Chunk> chunks = chunks_of(list.tensors);
    const MultiTensorKernels& kernels = multi_tensor_kernels();
    parallel_tasks(static_cast<int64_t>(chunks.size()), [&](int64_t i) {
      const Chunk& c = chunks[i];
      kernels.scale(list.dtypes[c.tensor], list.tensors[c.tensor].data, *factor, c.begin, c.end);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(bert_unpad, CPU, m) {
  m.impl("multi_tensor_l2norm", TORCH_BOX(&multi_tensor_l2norm<CpuLists>));
  m.impl("multi_tensor_scale_", TORCH_BOX(&multi_tensor_scale_<CpuLists>));
}

}  // namespace bert_unpad
