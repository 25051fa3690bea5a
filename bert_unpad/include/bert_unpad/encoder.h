// Encoders of Hugging Face from C++: token ids in, vectors out, by the CPU operators of bert_unpad.
//
//   bert_unpad::load_operators(path_of_the_package + "/_C.abi3.so");
//   const bert_unpad::Encoder encoder("/folder/of/the/model");
//   const at::Tensor vectors = encoder.encode({{101, 7592, 102}, {101, 2088, 2003, 102}});
//
// A folder holds config.json and model.safetensors of BERT, RoBERTa, XLM-RoBERTa, CamemBERT or
// ModernBERT. Hidden states have the same bits as those of `bert_unpad.hf.freeze` in Python. Needs
// LibTorch and nlohmann_json (3.x); examples/cpp shows how to build with it.
#pragma once

#include <ATen/ATen.h>
#include <ATen/MapAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace bert_unpad {

// Registers the operators, once per process; `library` is the path of _C.abi3.so.
inline void load_operators(const std::string& library) {
  if (!dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL))
    throw std::invalid_argument("library: expected _C.abi3.so of bert_unpad, got " +
                                std::string(dlerror()));
}

enum class Weights { kFloat32, kBFloat16, kInt8 };
enum class Pooling { kNone, kMean, kFirst };

namespace detail {

using Json = nlohmann::json;

[[noreturn]] inline void refuse(const std::string& what) { throw std::invalid_argument(what); }

inline void check_range(const char* what, int64_t got, int64_t least, int64_t most) {
  if (got < least || got > most)
    refuse(std::string(what) + ": expected " + std::to_string(least) + " to " +
           std::to_string(most) + ", got " + std::to_string(got));
}

inline Json read_json(const std::string& path) {
  std::ifstream in(path);
  if (!in) refuse(path + ": expected a file that can be read");
  try {
    return Json::parse(in);
  } catch (const Json::exception& error) {
    refuse(path + ": expected JSON, got " + error.what());
  }
}

// The tensors of a .safetensors file, which is mapped: what is not used is not read.
class Safetensors {
 public:
  explicit Safetensors(const std::string& path) : path_(path) {
    std::ifstream in(path, std::ios::binary | std::ios::ate);
    if (!in) refuse(path + ": expected a file that can be read");
    const auto size = static_cast<int64_t>(in.tellg());
    uint64_t header = 0;
    in.seekg(0);
    in.read(reinterpret_cast<char*>(&header), 8);
    if (size < 8 || header > static_cast<uint64_t>(size) - 8)
      refuse(path + ": expected a complete safetensors file");
    std::string text(header, '\0');
    in.read(text.data(), static_cast<std::streamsize>(header));
    header_ = Json::parse(text, nullptr, false);
    if (!in || !header_.is_object()) refuse(path + ": expected a safetensors header");
    first_ = 8 + static_cast<int64_t>(header);
    bytes_ = at::from_file(path, false, size, at::kByte);
  }

  bool has(const std::string& name) const { return header_.contains(name); }

  // A tensor of this shape, in float32.
  at::Tensor get(const std::string& name, const std::vector<int64_t>& shape) const {
    const auto said = path_ + ": " + name + ": expected ";
    static const std::map<std::string, at::ScalarType> dtypes = {
        {"F32", at::kFloat}, {"F16", at::kHalf}, {"BF16", at::kBFloat16}};
    if (!has(name)) refuse(path_ + ": expected a tensor " + name);
    try {
      const Json& entry = header_.at(name);
      const auto dtype = dtypes.find(entry.at("dtype").get<std::string>());
      if (dtype == dtypes.end()) refuse(said + "F32, F16 or BF16");
      if (entry.at("shape").get<std::vector<int64_t>>() != shape)
        refuse(said + "shape " + Json(shape).dump() + ", got " + entry.at("shape").dump());
      const auto place = entry.at("data_offsets").get<std::vector<int64_t>>();
      int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype->second));
      for (const int64_t n : shape) bytes *= n;
      const int64_t most = bytes_.size(0) - first_;
      if (place.size() != 2 || place[0] < 0 || place[0] > most || place[1] > most ||
          place[1] - place[0] != bytes)
        refuse(said + "data of its shape within the file");
      // A copy: data in a file need not be aligned, and the file may change.
      return bytes_.slice(0, first_ + place[0], first_ + place[1])
          .clone()
          .view(dtype->second)
          .view(shape)
          .to(at::kFloat);
    } catch (const Json::exception&) {
      refuse(said + "dtype, shape and data_offsets");
    }
  }

 private:
  std::string path_;
  Json header_;
  int64_t first_ = 0;
  at::Tensor bytes_;
};

// Where a kind of model has its tensors; null: there is none. One name in several places is a
// tensor that holds all of them.
struct Family {
  const char *trunk, *word, *position = nullptr, *type = nullptr, *embedding_norm, *layers;
  const char *query, *key, *value, *attention_out, *ffn_in, *ffn_gate = nullptr, *ffn_out;
  const char* norms[3];  // before attention, after its residual, at the layer's end
  const char* final_norm = nullptr;
};

inline constexpr Family kBert = {
    .trunk = "bert.",
    .word = "embeddings.word_embeddings",
    .position = "embeddings.position_embeddings",
    .type = "embeddings.token_type_embeddings",
    .embedding_norm = "embeddings.LayerNorm",
    .layers = "encoder.layer.",
    .query = "attention.self.query",
    .key = "attention.self.key",
    .value = "attention.self.value",
    .attention_out = "attention.output.dense",
    .ffn_in = "intermediate.dense",
    .ffn_out = "output.dense",
    .norms = {nullptr, "attention.output.LayerNorm", "output.LayerNorm"},
};

inline constexpr Family kRoberta = [] {
  Family family = kBert;
  family.trunk = "roberta.";
  return family;
}();

inline constexpr Family kModernBert = {
    .trunk = "model.",
    .word = "embeddings.tok_embeddings",
    .embedding_norm = "embeddings.norm",
    .layers = "layers.",
    .query = "attn.Wqkv",
    .key = "attn.Wqkv",
    .value = "attn.Wqkv",
    .attention_out = "attn.Wo",
    .ffn_in = "mlp.Wi",
    .ffn_gate = "mlp.Wi",
    .ffn_out = "mlp.Wo",
    .norms = {"attn_norm", "mlp_norm", nullptr},
    .final_norm = "final_norm",
};

inline const Family& family_of(const std::string& model_type) {
  static const std::map<std::string, const Family*> known = {{"bert", &kBert},
                                                             {"roberta", &kRoberta},
                                                             {"xlm-roberta", &kRoberta},
                                                             {"camembert", &kRoberta},
                                                             {"modernbert", &kModernBert}};
  const auto found = known.find(model_type);
  if (found == known.end())
    refuse("model_type: expected bert, roberta, xlm-roberta, camembert or modernbert, got " +
           model_type);
  return *found->second;
}

}  // namespace detail

// Inference of an encoder. Calls may come from several threads.
class Encoder {
 public:
  // `folder`: of config.json and model.safetensors. Rounded weights: see `unpad(weights="int8")`.
  explicit Encoder(const std::string& folder, Weights weights = Weights::kFloat32) {
    const Source from(folder, weights);
    const detail::Family& names = from.names;
    modern_ = from.modern;
    eps_ = from.field<double>(modern_ ? "norm_eps" : "layer_norm_eps", modern_ ? 1e-5 : 1e-12);
    if (!(eps_ >= 0.0)) detail::refuse("layer_norm_eps: expected a number from 0 on");
    if (&names == &detail::kRoberta) first_position_ = from.size("pad_token_id", 0, 1) + 1;
    const int64_t hidden = from.hidden;
    const at::Tensor none = at::empty({0});
    const auto table = [&](const char* name, const char* field) {
      return name ? from.tensor(name, ".weight", {from.size(field, 1), hidden}) : none;
    };
    embeddings_ = {table(names.word, "vocab_size"),
                   table(names.position, "max_position_embeddings"),
                   table(names.type, "type_vocab_size")};
    for (const Affine& norm : {from.norm(names.embedding_norm),
                               modern_ ? from.norm(names.final_norm) : Affine{none, none}})
      embeddings_.insert(embeddings_.end(), norm.begin(), norm.end());
    for (int64_t i = 0, count = from.size("num_hidden_layers", 0); i < count; ++i)
      read_layer(from, i);
  }

  // Vectors of texts, [texts, hidden], or with kNone the hidden states of all tokens, [tokens,
  // hidden], text after text; float32. A text is its token ids with [CLS] and [SEP]. `normalise`:
  // to length 1.
  at::Tensor encode(const std::vector<std::vector<int64_t>>& texts,
                    Pooling pooling = Pooling::kMean, bool normalise = true) const {
    const c10::InferenceMode inference;
    const at::Tensor &word = embeddings_[0], &position = embeddings_[1];
    int64_t longest = 0, row = 0;
    for (const auto& text : texts) longest = std::max(longest, static_cast<int64_t>(text.size()));
    const std::vector<int64_t> shape = {static_cast<int64_t>(texts.size()), longest};
    const at::Tensor ids = at::zeros(shape, at::kLong), mask = at::zeros(shape, at::kBool);
    for (const auto& text : texts) {
      if (text.empty()) detail::refuse("texts: expected token ids in each, got none");
      for (const int64_t id : text) detail::check_range("texts: ids", id, 0, word.size(0) - 1);
      std::copy(text.begin(), text.end(), ids.mutable_data_ptr<int64_t>() + row * longest);
      std::fill_n(mask.mutable_data_ptr<bool>() + row++ * longest, text.size(), true);
    }
    if (position.numel() > 0)
      detail::check_range("texts: tokens", longest, 0, position.size(0) - first_position_);
    at::Tensor x = compute(ids, mask, pooling);
    if (pooling == Pooling::kNone) x = x.index_select(0, mask.flatten().nonzero().flatten());
    return normalise ? x / x.norm(2, 1, true).clamp_min(1e-12) : x;
  }

 private:
  using Affine = std::array<at::Tensor, 2>;  // weight and bias, empty where there is none

  // A folder that is being read.
  struct Source {
    detail::Json config;
    detail::Safetensors files;
    Weights weights;
    const detail::Family& names;
    bool modern;
    int64_t hidden;
    std::string trunk;

    Source(const std::string& folder, Weights weights)
        : config(detail::read_json(folder + "/config.json")),
          files(folder + "/model.safetensors"),
          weights(weights),
          names(detail::family_of(field<std::string>("model_type"))),
          modern(names.final_norm != nullptr),
          hidden(size("hidden_size", 1)) {
      if (files.has(std::string(names.trunk) + names.word + ".weight")) trunk = names.trunk;
      if (field<std::string>("position_embedding_type", "absolute") != "absolute")
        detail::refuse("position_embedding_type: expected absolute");
      if (field<bool>("is_decoder", false)) detail::refuse("is_decoder: expected false");
      if (!field<detail::Json>("rope_scaling", detail::Json()).is_null())
        detail::refuse("rope_scaling: expected none");
    }

    template <class T>
    T field(const std::string& name, std::optional<T> otherwise = std::nullopt) const {
      try {
        const bool given = config.contains(name) && !config.at(name).is_null();
        return !given && otherwise ? *otherwise : config.at(name).get<T>();
      } catch (const detail::Json::exception&) {
        detail::refuse("config.json: " + name + ": expected another value");
      }
    }
    int64_t size(const char* name, int64_t least, std::optional<int64_t> otherwise = {}) const {
      const auto found = field<int64_t>(name, otherwise);
      detail::check_range(name, found, least, int64_t{1} << 28);
      return found;
    }
    at::Tensor tensor(const std::string& module, const std::string& kind,
                      const std::vector<int64_t>& shape) const {
      // Norms of older files have other names.
      const std::string older = module + (kind == ".bias" ? ".beta" : ".gamma");
      if (files.has(trunk + older)) return files.get(trunk + older, shape);
      return files.get(trunk + module + kind, shape);
    }
    Affine norm(const std::string& module) const {
      const bool bias = !modern || field<bool>("norm_bias", false);
      return {tensor(module, ".weight", {hidden}),
              bias ? tensor(module, ".bias", {hidden}) : at::empty({0})};
    }
    // Part `part` of a linear layer that holds `parts` of them, [columns, depth] each.
    Affine linear(const std::string& module, int64_t columns, int64_t depth, bool bias,
                  int64_t parts = 1, int64_t part = 0) const {
      if (columns % 32 != 0 || depth % 32 != 0)
        detail::refuse(module + ": expected multiples of 32 features, got " +
                       std::to_string(columns) + " of " + std::to_string(depth));
      const int64_t first = part * columns, last = first + columns;
      const at::Tensor weight =
          tensor(module, ".weight", {parts * columns, depth}).slice(0, first, last).clone();
      return {pack(weight, weights),
              bias ? tensor(module, ".bias", {parts * columns}).slice(0, first, last).clone()
                   : at::empty({0})};
    }
  };

  // Appends a layer to what the operator takes.
  void read_layer(const Source& from, int64_t index) {
    const detail::Family& names = from.names;
    const std::string prefix = names.layers + std::to_string(index) + ".";
    const Affine none = {at::empty({0}), at::empty({0})};
    const int64_t hidden = from.hidden, inner = from.size("intermediate_size", 1);
    const int64_t heads = from.size("num_attention_heads", 1), width = hidden / heads;
    if (hidden % heads != 0 || width > 256)
      detail::refuse("num_attention_heads: expected heads of equal width, at most 256");
    const bool attention_bias = !modern_ || from.field<bool>("attention_bias", false);
    const bool mlp_bias = !modern_ || from.field<bool>("mlp_bias", false);
    const auto add = [&](const Affine& affine) {
      parameters_.insert(parameters_.end(), affine.begin(), affine.end());
    };
    const char* projections[] = {names.query, names.key, names.value};
    for (int64_t i = 0; i < 3; ++i)
      add(from.linear(prefix + projections[i], hidden, hidden, attention_bias, modern_ ? 3 : 1,
                      modern_ ? i : 0));
    add(from.linear(prefix + names.attention_out, hidden, hidden, attention_bias));
    add(from.linear(prefix + names.ffn_in, inner, hidden, mlp_bias, modern_ ? 2 : 1));
    add(modern_ ? from.linear(prefix + names.ffn_gate, inner, hidden, mlp_bias, 2, 1) : none);
    add(from.linear(prefix + names.ffn_out, hidden, inner, mlp_bias));
    // ModernBERT's first layer gets the embeddings' norm.
    const bool normed = modern_ && index == 0;
    for (const char* norm : names.norms)
      add(norm && !(normed && norm == names.norms[0]) ? from.norm(prefix + norm) : none);
    static const std::map<std::string, int64_t> activations = {
        {"gelu", 0}, {"gelu_new", 1}, {"gelu_pytorch_tanh", 1}, {"silu", 2}, {"relu", 3}};
    const char* field = modern_ ? "hidden_activation" : "hidden_act";
    const auto kind = activations.find(from.field<std::string>(field, "gelu"));
    if (kind == activations.end())
      detail::refuse(std::string(field) + ": expected gelu, gelu_new, silu or relu");
    const int64_t window = modern_ ? window_of(from, index) : -1;
    shape_.insert(shape_.end(),
                  {heads, heads, width, inner, kind->second, 0, modern_, window, window});
    const double theta = modern_ ? theta_of(from, window >= 0) : 0.0;
    numbers_.insert(numbers_.end(),
                    {1.0 / std::sqrt(static_cast<double>(width)), eps_, eps_, eps_, theta, 1.0});
  }

  // Tokens that a ModernBERT layer sees to each side; -1: all.
  static int64_t window_of(const Source& from, int64_t index) {
    const int64_t whole = from.size("local_attention", 1, 128);
    const int64_t reach = from.size("sliding_window", 0, whole / 2);
    const auto types = from.field<std::vector<std::string>>("layer_types", {{}});
    if (types.empty())
      return index % from.size("global_attn_every_n_layers", 1, 3) == 0 ? -1 : reach;
    detail::check_range("layer_types: layers", index, 0, static_cast<int64_t>(types.size()) - 1);
    return types[index] == "sliding_attention" ? reach : -1;
  }

  static double theta_of(const Source& from, bool local) {
    const double usual = from.field<double>(local ? "local_rope_theta" : "global_rope_theta",
                                            local ? 10'000.0 : 160'000.0);
    const char* kind = local ? "sliding_attention" : "full_attention";
    const auto ropes = from.field<detail::Json>("rope_parameters", detail::Json::object());
    try {
      if (!ropes.contains(kind)) return usual;
      const detail::Json& rope = ropes.at(kind);
      if (rope.value("rope_type", rope.value("type", "default")) != "default")
        detail::refuse("rope_parameters: expected the rope_type default");
      return rope.value("rope_theta", usual);
    } catch (const detail::Json::exception&) {
      detail::refuse("rope_parameters: expected an object with rope_theta for " +
                     std::string(kind));
    }
  }

  // The operator that computes all of it: hidden states [texts * longest, hidden], or vectors.
  at::Tensor compute(const at::Tensor& ids, const at::Tensor& mask, Pooling pooling) const {
    using Optional = const std::optional<at::Tensor>&;
    using Tensors = at::TensorList;
    using Numbers = at::ArrayRef<double>;
    static const auto run =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("bert_unpad::encoder_model", "")
            .typed<at::Tensor(const at::Tensor&, Optional, Optional, Tensors, int64_t, int64_t,
                              Numbers, Tensors, at::IntArrayRef, Numbers, int64_t, bool)>();
    return run.call(ids, mask, std::nullopt, embeddings_, first_position_, -1, {eps_, eps_},
                    parameters_, shape_, numbers_, static_cast<int64_t>(pooling), false);
  }

  static at::Tensor pack(const at::Tensor& weight, Weights weights) {
    static const auto run = c10::Dispatcher::singleton()
                                .findSchemaOrThrow("bert_unpad::encoder_pack", "")
                                .typed<at::Tensor(const at::Tensor&, at::ScalarType)>();
    constexpr at::ScalarType kinds[] = {at::kFloat, at::kBFloat16, at::kChar};
    return run.call(weight, kinds[static_cast<int>(weights)]);
  }

  bool modern_ = false;
  double eps_ = 0.0;
  int64_t first_position_ = 0;
  std::vector<at::Tensor> embeddings_;  // as the operator takes them
  // Of all layers, one after the other.
  std::vector<at::Tensor> parameters_;
  std::vector<int64_t> shape_;
  std::vector<double> numbers_;
};

}  // namespace bert_unpad
