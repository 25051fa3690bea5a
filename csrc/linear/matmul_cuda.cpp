// Matrix products by cuBLASLt: descriptors and algorithms are made once for a kind of product (all
// that matters but the addresses and the exact number of tokens) and kept by each thread.
#include "linear/matmul.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "cuda/capability.h"
#include "cuda/capture.h"
#include "cuda/error.h"
#include "linear/algorithms.h"
#include "linear/epilogue.h"

namespace bert_unpad::cuda {
namespace {

using namespace cublaslt;

// Guesses that are timed, and timed runs of each.
constexpr int kGuesses = 8, kRepeats = 5;
// cuBLASLt tells no alignment above this apart.
constexpr int64_t kMaxAlignment = 256;

void require(Status status, const char* what, const char* op) {
  if (status != kSuccess) [[unlikely]]
    throw std::runtime_error(std::string(op) + ": cuBLASLt: " + what + " failed with status " +
                             std::to_string(status));
}

// The largest power of two that divides the address.
uint32_t alignment(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  int64_t bytes = 1;
  while (bytes < kMaxAlignment && address % (2 * bytes) == 0) bytes *= 2;
  return static_cast<uint32_t>(bytes);
}

Handle handle(int device, const char* op) {
  // Handles stay until the process ends: at exit the device's context may be gone before them.
  static std::mutex mutex;
  static std::map<int, Handle> handles;
  const std::scoped_lock lock(mutex);
  Handle& found = handles[device];
  if (found == nullptr) require(api().create(&found), "cublasLtCreate", op);
  return found;
}

struct DestroyDesc {
  void operator()(MatmulDesc desc) const { api().desc_destroy(desc); }
};
struct DestroyLayout {
  void operator()(Layout layout) const { api().layout_destroy(layout); }
};
struct DestroyPreference {
  void operator()(Preference preference) const { api().preference_destroy(preference); }
};
template <class Pointer, class Destroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Pointer>, Destroy>;

// A layout object that follows the size of its matrix.
class MatrixLayout {
 public:
  MatrixLayout(const StoredMatrix& matrix, const char* op) : matrix_(matrix) {
    Layout layout = nullptr;
    require(api().layout_create(&layout, matrix.type, matrix.rows, matrix.cols, matrix.ld),
            "cublasLtMatrixLayoutCreate", op);
    layout_.reset(layout);
  }

  Layout get() const { return layout_.get(); }

  void resize(const StoredMatrix& matrix, const char* op) {
    const uint64_t rows = matrix.rows, cols = matrix.cols;
    if (matrix.rows != matrix_.rows) set(LayoutAttribute::kRows, &rows, op);
    if (matrix.cols != matrix_.cols) set(LayoutAttribute::kCols, &cols, op);
    if (matrix.ld != matrix_.ld) set(LayoutAttribute::kLd, &matrix.ld, op);
    matrix_ = matrix;
  }

 private:
  void set(LayoutAttribute attribute, const void* value, const char* op) {
    require(api().layout_set(layout_.get(), attribute, value, 8),
            "cublasLtMatrixLayoutSetAttribute", op);
  }

  StoredMatrix matrix_;
  Owned<Layout, DestroyLayout> layout_;
};

// The same product with the next multiple of kTokenBucket tokens.
Matmul with_whole_bucket(Matmul product) {
  const auto round = [](int64_t& tokens) {
    tokens = (tokens + kTokenBucket - 1) / kTokenBucket * kTokenBucket;
  };
  if (product.tokens == TokenDim::kN) {
    round(product.transpose_b ? product.b.rows : product.b.cols);
    round(product.d.cols);
  } else {
    round(product.transpose_a ? product.a.rows : product.a.cols);
    round(product.transpose_b ? product.b.cols : product.b.rows);
  }
  for (StoredMatrix* matrix : {&product.a, &product.b})
    matrix->ld = std::max(matrix->ld, matrix->rows);
  return product;
}

// What two products must share to take the same algorithm.
using Key = std::array<int64_t, 17>;

Key key_of(const Matmul& p, int device) {
  const Matmul whole = with_whole_bucket(p);
  return {device,
          p.transpose_a,
          p.transpose_b,
          static_cast<int64_t>(p.a.type),
          static_cast<int64_t>(p.b.type),
          static_cast<int64_t>(p.d.type),
          static_cast<int64_t>(p.bias_type),
          static_cast<int64_t>(p.epilogue),
          p.c_data != nullptr,
          p.fast_accumulation,
          whole.m(),
          whole.n(),
          whole.k(),
          alignment(p.a_data),
          alignment(p.b_data),
          std::min(alignment(p.d_data), alignment(p.c_data == nullptr ? p.d_data : p.c_data)),
          std::min(alignment(p.bias), alignment(p.aux))};
}

// The key without the device's number, but with what device and which cuBLASLt it is.
std::string kind_of(const Key& key, const char* op) {
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, name, static_cast<int>(key[0])), op);
    return value;
  };
  std::ostringstream text;
  text << "cublaslt-" << api().version() << "-sm_" << attribute(cudaDevAttrComputeCapabilityMajor)
       << attribute(cudaDevAttrComputeCapabilityMinor) << 'x'
       << attribute(cudaDevAttrMultiProcessorCount);
  for (size_t i = 1; i < key.size(); ++i) text << '-' << key[i];
  return text.str();
}

class PreparedProduct {
 public:
  PreparedProduct(const Matmul& product, const Key& key, const Allocate& allocate,
                  cudaStream_t stream, const char* op)
      : handle_(handle(static_cast<int>(key[0]), op)),
        a_(product.a, op),
        b_(product.b, op),
        d_(product.d, op),
        version_(timing_version()) {
    MatmulDesc desc = nullptr;
    require(api().desc_create(&desc, ComputeType::kFloat32, DataType::kFloat32),
            "cublasLtMatmulDescCreate", op);
    desc_.reset(desc);
    set(DescAttribute::kTransposeA, operation(product.transpose_a), op);
    set(DescAttribute::kTransposeB, operation(product.transpose_b), op);
    set(DescAttribute::kEpilogue, product.epilogue, op);
    if (product.bias != nullptr) set(DescAttribute::kBiasType, product.bias_type, op);
    if (product.aux != nullptr) {
      set(DescAttribute::kAuxType, product.d.type, op);
      set(DescAttribute::kAuxLd, product.d.ld, op);
    }
    if (product.fast_accumulation) set(DescAttribute::kFastAccumulation, int8_t{1}, op);
    set_addresses(product, op);
    choice_ = choose(product, kind_of(key, op), allocate, stream, op);
  }

  // Whether choices have been forgotten since.
  bool is_old() const { return version_ != timing_version(); }

  // False, and nothing queued, where cuBLASLt has no algorithm.
  bool run(const Matmul& product, const Allocate& allocate, cudaStream_t stream, const char* op) {
    if (!choice_) return false;
    set_addresses(product, op);
    resize(product, op);
    const auto try_choice = [&](const Choice& choice) {
      const size_t bytes = choice.workspace_bytes;
      void* workspace = bytes == 0 ? nullptr : allocate(bytes);
      return queue(product, choice, product.d_data, workspace, stream);
    };
    Status status = try_choice(*choice_);
    // The bucket's algorithm cannot do exactly this many tokens.
    if (status == kNotSupported || status == kInvalidValue) {
      const std::vector<Choice> exact = guess(product, 1, op);
      if (exact.empty()) return false;
      status = try_choice(exact.front());
    }
    require(status, "cublasLtMatmul", op);
    return true;
  }

 private:
  static Operation operation(bool transpose) {
    return transpose ? Operation::kTranspose : Operation::kNone;
  }

  template <class T>
  void set(DescAttribute attribute, const T& value, const char* op) {
    require(api().desc_set(desc_.get(), attribute, &value, sizeof(value)),
            "cublasLtMatmulDescSetAttribute", op);
  }

  void set_addresses(const Matmul& product, const char* op) {
    if (product.bias != nullptr) set(DescAttribute::kBiasPointer, product.bias, op);
    if (product.aux != nullptr) set(DescAttribute::kAuxPointer, product.aux, op);
    if (product.a_scale != nullptr) set(DescAttribute::kScaleA, product.a_scale, op);
    if (product.b_scale != nullptr) set(DescAttribute::kScaleB, product.b_scale, op);
  }

  void resize(const Matmul& product, const char* op) {
    a_.resize(product.a, op);
    b_.resize(product.b, op);
    d_.resize(product.d, op);
  }

  Status queue(const Matmul& product, const Choice& choice, void* d, void* workspace,
               cudaStream_t stream) const {
    const float alpha = 1.0f, beta = product.c_data == nullptr ? 0.0f : 1.0f;
    const void* c = product.c_data == nullptr ? d : product.c_data;
    return api().matmul(handle_, desc_.get(), &alpha, product.a_data, a_.get(), product.b_data,
                        b_.get(), &beta, c, d_.get(), d, d_.get(), &choice.algorithm, workspace,
                        choice.workspace_bytes, stream);
  }

  // cuBLASLt's best guesses for the product's sizes; none where it has no algorithm.
  std::vector<Choice> guess(const Matmul& product, int wanted, const char* op) {
    Preference created = nullptr;
    require(api().preference_create(&created), "cublasLtMatmulPreferenceCreate", op);
    const Owned<Preference, DestroyPreference> preference(created);
    const auto prefer = [&](PreferenceAttribute attribute, auto value) {
      require(api().preference_set(created, attribute, &value, sizeof(value)),
              "cublasLtMatmulPreferenceSetAttribute", op);
    };
    prefer(PreferenceAttribute::kMaxWorkspaceBytes, uint64_t{kMaxWorkspaceBytes});
    prefer(PreferenceAttribute::kReductionSchemes, kReproducibleReductions);
    prefer(PreferenceAttribute::kAlignmentA, alignment(product.a_data));
    prefer(PreferenceAttribute::kAlignmentB, alignment(product.b_data));
    prefer(PreferenceAttribute::kAlignmentC,
           alignment(product.c_data == nullptr ? product.d_data : product.c_data));
    prefer(PreferenceAttribute::kAlignmentD, alignment(product.d_data));
    resize(product, op);
    std::vector<Heuristic> found(wanted);
    int count = 0;
    const Status status = api().heuristics(handle_, desc_.get(), a_.get(), b_.get(), d_.get(),
                                           d_.get(), created, wanted, found.data(), &count);
    if (status != kNotSupported) require(status, "cublasLtMatmulAlgoGetHeuristic", op);
    std::vector<Choice> choices;
    for (int i = 0; i < count; ++i) {
      if (found[i].state == kSuccess)
        choices.push_back({found[i].algorithm, found[i].workspace_bytes});
    }
    return choices;
  }

  std::optional<Choice> choose(const Matmul& product, const std::string& kind,
                               const Allocate& allocate, cudaStream_t stream, const char* op) {
    if (const std::optional<Choice> known = find_choice(kind)) return known;
    const bool timed = timing_enabled() && !is_capturing(stream, op);
    const std::vector<Choice> guesses = guess(with_whole_bucket(product), timed ? kGuesses : 1, op);
    if (guesses.empty()) return std::nullopt;
    const Choice& best = timed ? fastest(product, guesses, allocate, stream, op) : guesses.front();
    return add_choice(kind, best, timed);
  }

  const Choice& fastest(const Matmul& product, const std::vector<Choice>& guesses,
                        const Allocate& allocate, cudaStream_t stream, const char* op) {
    resize(product, op);
    const RelaxedCapture relaxed(op);  // of other threads
    // Into separate memory: d may be the addend.
    const size_t element = product.d.type == DataType::kFloat32 ? 4 : 2;
    void* scratch = allocate(product.d.ld * product.d.cols * element);
    // One for all, one after the other: all of them at once can be gigabytes.
    const size_t most = std::ranges::max(guesses, {}, &Choice::workspace_bytes).workspace_bytes;
    void* workspace = most == 0 ? nullptr : allocate(most);
    const Choice* best = &guesses.front();
    float least = 0;
    for (const Choice& choice : guesses) {
      const float milliseconds = time(product, choice, scratch, workspace, stream, op);
      if (milliseconds < 0 || (best != &choice && least > 0 && milliseconds >= least)) continue;
      best = &choice;
      least = milliseconds;
    }
    return *best;
  }

  // Of kRepeats runs after one more; negative if the algorithm refuses.
  float time(const Matmul& product, const Choice& choice, void* d, void* workspace,
             cudaStream_t stream, const char* op) const {
    if (queue(product, choice, d, workspace, stream) != kSuccess) return -1;
    cudaEvent_t begin, end;
    check_cuda(cudaEventCreateWithFlags(&begin, cudaEventDefault), op);
    check_cuda(cudaEventCreateWithFlags(&end, cudaEventDefault), op);
    check_cuda(cudaEventRecord(begin, stream), op);
    for (int i = 0; i < kRepeats; ++i)
      require(queue(product, choice, d, workspace, stream), "cublasLtMatmul", op);
    check_cuda(cudaEventRecord(end, stream), op);
    check_cuda(cudaEventSynchronize(end), op);
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin, end), op);
    check_cuda(cudaEventDestroy(begin), op);
    check_cuda(cudaEventDestroy(end), op);
    return milliseconds;
  }

  Handle handle_;
  MatrixLayout a_, b_, d_;
  Owned<MatmulDesc, DestroyDesc> desc_;
  uint64_t version_;
  std::optional<Choice> choice_;
};

}  // namespace

void matmul(const Matmul& product, const Allocate& allocate, cudaStream_t stream, const char* op) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), op);
  const Key key = key_of(product, device);
  thread_local std::map<Key, PreparedProduct> prepared;
  auto found = prepared.find(key);
  if (found != prepared.end() && found->second.is_old()) {
    prepared.erase(found);
    found = prepared.end();
  }
  if (found == prepared.end()) {
    if (product.a.type == DataType::kBFloat16) check_bf16_products(op, compute_capability(op));
    found = prepared.try_emplace(key, product, key, allocate, stream, op).first;
  }
  if (found->second.run(product, allocate, stream, op)) return;
  if (product.epilogue == Epilogue::kNone) {
    throw std::runtime_error(
        std::string(op) + ": cuBLASLt has no algorithm for m = " + std::to_string(product.m()) +
        ", n = " + std::to_string(product.n()) + ", k = " + std::to_string(product.k()) +
        "; BERT_UNPAD_CUBLASLT=0 leaves linear layers to PyTorch");
  }
  const Matmul plain = without_epilogue(product, allocate);
  matmul(plain, allocate, stream, op);
  apply_epilogue(product, plain, stream, op);
}

}  // namespace bert_unpad::cuda
