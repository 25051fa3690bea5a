// From the cross-entropy's arguments to a params struct: checks that are the same on CPU and GPU.
// The same code fills LossCpuParams and LossCudaParams, whose fields have the same names.
#pragma once

#include "common/allocate.h"
#include "common/checks.h"

namespace bert_unpad {

// Everything about logits and labels but the labels' values, which only the device may see.
template <class Params>
void set_loss_arguments(Params& p, const Tensor& logits, const Tensor& labels, int64_t vocab_size,
                        int64_t ignore_index, const char* op) {
  p.dtype = storage_dtype(logits, op, "logits");
  check_shape(logits, {-1, -1}, op, "logits", "[rows, padded vocabulary]");
  check_contiguous(logits, op, "logits");
  check_dtype(labels, ScalarType::Long, op, "labels", "int64");
  check_shape(labels, {logits.size(0)}, op, "labels", "[rows]");
  check_contiguous(labels, op, "labels");
  check_same_device(labels, logits, op, "labels");
  check(vocab_size >= 1 && vocab_size <= logits.size(1), op,
        ": vocab_size must be between 1 and the number of columns, ", logits.size(1), ", got ",
        vocab_size);
  p.columns = logits.size(1);
  p.vocab = vocab_size;
  p.ignore_index = ignore_index;
  p.logits = logits.const_data_ptr();
  p.labels = labels.const_data_ptr<int64_t>();
}

// What the forward pass saved, and the gradient of the sum.
template <class Params>
void set_saved(Params& p, const Tensor& dloss, const Tensor& logits, const Tensor& lse,
               const char* op) {
  check_scalar(dloss, ScalarType::Float, logits, op, "dloss", "float32");
  check_dtype(lse, ScalarType::Float, op, "lse", "float32");
  check_shape(lse, {logits.size(0)}, op, "lse", "[rows]");
  check_contiguous(lse, op, "lse");
  check_same_device(lse, logits, op, "lse");
  p.lse = const_cast<float*>(lse.const_data_ptr<float>());
}

// The two operators that give the gradient, from a device's
//   backward_into(dloss, logits, labels, lse, vocab_size, ignore_index, dlogits, op),
// which may write the gradient where the logits are.
template <auto backward_into>
Tensor masked_cross_entropy_backward(Tensor dloss, Tensor logits, Tensor labels, Tensor lse,
                                     int64_t vocab_size, int64_t ignore_index) {
  Tensor dlogits = allocate_like(logits);
  backward_into(dloss, logits, labels, lse, vocab_size, ignore_index, dlogits.mutable_data_ptr(),
                "masked_cross_entropy_backward");
  return dlogits;
}

template <auto backward_into>
void masked_cross_entropy_backward_(Tensor dloss, Tensor logits, Tensor labels, Tensor lse,
                                    int64_t vocab_size, int64_t ignore_index) {
  backward_into(dloss, logits, labels, lse, vocab_size, ignore_index, logits.mutable_data_ptr(),
                "masked_cross_entropy_backward_");
}

}  // namespace bert_unpad
