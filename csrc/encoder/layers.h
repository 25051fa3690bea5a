// All layers of an encoder within one call of an operator.
#pragma once

#include <string>
#include <vector>

#include "cpu/team.h"
#include "encoder/one_layer.h"

namespace bert_unpad {

// What an operator gets of layers, one after the other; see schemas.cpp.
struct LayerLists {
  const std::vector<Tensor>& parameters;
  const std::vector<int64_t>& shape;
  const std::vector<double>& numbers;

  // The number of layers that the lists describe.
  size_t count(const char* op) const {
    const size_t layers = parameters.size() / EncoderLayer::kParameters;
    check(parameters.size() == layers * EncoderLayer::kParameters, op, ": parameters must hold ",
          int{EncoderLayer::kParameters}, " tensors a layer, got ", parameters.size());
    check(shape.size() == layers * EncoderLayer::kShapes, op, ": shape must hold ",
          int{EncoderLayer::kShapes}, " numbers a layer, got ", shape.size());
    check(numbers.size() == layers * EncoderLayer::kNumbers, op, ": numbers must hold ",
          int{EncoderLayer::kNumbers}, " numbers a layer, got ", numbers.size());
    return layers;
  }
};

// The output of the last layer, for its rows `last`.
inline Tensor run_layers(const char* op, Tensor x, const LayerLists& lists,
                         const Sequences& sequences, const OutputRows& last) {
  const size_t layers = lists.count(op);
  const auto compute = [&] {
    for (size_t i = 0; i < layers; ++i) {
      const std::string name = layers == 1 ? op : op + (": layer " + std::to_string(i));
      EncoderLayer layer(name.c_str(), x, &lists.parameters[i * EncoderLayer::kParameters],
                         &lists.shape[i * EncoderLayer::kShapes],
                         &lists.numbers[i * EncoderLayer::kNumbers]);
      x = layer.run(x, sequences, i + 1 == layers ? last : OutputRows{});
    }
  };
  // Of one block of rows stages are short.
  const int64_t tokens = x.size(0), widest = lists.shape.size() > 3 ? lists.shape[3] : 1;
  if (tokens <= kBlockRows && tokens * x.size(1) >= kProductsForAll / std::max<int64_t>(widest, 1))
    with_team(compute);
  else
    compute();
  return x;
}

}  // namespace bert_unpad
