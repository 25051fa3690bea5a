// Vectors of texts: token ids in, one text a line, separated by spaces; a vector a line out.
//
//   encode FOLDER [none|mean|first] [float32|bfloat16|int8] < ids > vectors
//
// All lines are one batch. `none` writes the hidden states of all tokens instead.
#include <bert_unpad/encoder.h>

#include <charconv>
#include <exception>
#include <iostream>
#include <sstream>

namespace {

int run(int argc, char** argv) {
  const std::string pooling = argc > 2 ? argv[2] : "mean", weights = argc > 3 ? argv[3] : "float32";
  const std::map<std::string, bert_unpad::Pooling> poolings = {
      {"none", bert_unpad::Pooling::kNone},
      {"mean", bert_unpad::Pooling::kMean},
      {"first", bert_unpad::Pooling::kFirst}};
  const std::map<std::string, bert_unpad::Weights> kinds = {
      {"float32", bert_unpad::Weights::kFloat32},
      {"bfloat16", bert_unpad::Weights::kBFloat16},
      {"int8", bert_unpad::Weights::kInt8}};
  const bool known = poolings.count(pooling) && kinds.count(weights);
  if (argc < 2 || argc > 4 || !known) {
    std::cerr << "usage: encode FOLDER [none|mean|first] [float32|bfloat16|int8] < ids\n";
    return 2;
  }
  std::vector<std::vector<int64_t>> texts;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    texts.emplace_back();
    for (std::string word; words >> word;) {
      int64_t id = 0;
      const char* end = word.data() + word.size();
      const auto [rest, error] = std::from_chars(word.data(), end, id);
      if (error != std::errc() || rest != end)
        throw std::invalid_argument("ids: expected integers, got " + word);
      texts.back().push_back(id);
    }
  }
  bert_unpad::load_operators(BERT_UNPAD_LIBRARY);
  const bert_unpad::Encoder encoder(argv[1], kinds.at(weights));
  const bool normalise = pooling != "none";
  const at::Tensor vectors = encoder.encode(texts, poolings.at(pooling), normalise);
  std::cout.precision(9);  // enough to read the same float32 again
  for (int64_t i = 0; i < vectors.size(0); ++i) {
    const float* row = vectors.const_data_ptr<float>() + i * vectors.size(1);
    for (int64_t j = 0; j < vectors.size(1); ++j) std::cout << (j ? " " : "") << row[j];
    std::cout << '\n';
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const c10::Error& error) {
    std::cerr << "encode: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "encode: " << error.what() << '\n';
  }
  return 1;
}
