// Finds cuBLASLt among the libraries of this process.
#include "linear/cublaslt.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace bert_unpad::cublaslt {
namespace {

void* loaded_library() {
  // The file's name ends in its major version, which is CUDA's.
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"}) {
    if (void* library = dlopen(name, RTLD_NOLOAD | RTLD_LAZY)) return library;
  }
  throw std::runtime_error(
      "linear layers on a GPU need cuBLASLt, which a CUDA build of PyTorch loads; it is not in "
      "this process");
}

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr)
    throw std::runtime_error(std::string("this process's cuBLASLt has no function ") + name);
}

Api find_all() {
  void* library = loaded_library();
  Api api{};
  find(library, "cublasLtGetVersion", api.version);
  find(library, "cublasLtCreate", api.create);
  find(library, "cublasLtMatmulDescCreate", api.desc_create);
  find(library, "cublasLtMatmulDescSetAttribute", api.desc_set);
  find(library, "cublasLtMatmulDescDestroy", api.desc_destroy);
  find(library, "cublasLtMatrixLayoutCreate", api.layout_create);
  find(library, "cublasLtMatrixLayoutSetAttribute", api.layout_set);
  find(library, "cublasLtMatrixLayoutDestroy", api.layout_destroy);
  find(library, "cublasLtMatmulPreferenceCreate", api.preference_create);
  find(library, "cublasLtMatmulPreferenceSetAttribute", api.preference_set);
  find(library, "cublasLtMatmulPreferenceDestroy", api.preference_destroy);
  find(library, "cublasLtMatmulAlgoGetHeuristic", api.heuristics);
  find(library, "cublasLtMatmul", api.matmul);
  return api;
}

}  // namespace

const Api& api() {
  static const Api found = find_all();
  return found;
}

}  // namespace bert_unpad::cublaslt
