#include "c_interface.h"

namespace bert_unpad::host {
namespace {

thread_local std::string last_error;

}  // namespace

void set_error(const char* message) { last_error = message; }

BERT_UNPAD_API const char* bu_error() { return last_error.c_str(); }

BERT_UNPAD_API void bu_free(Handle* handle) { delete handle; }

BERT_UNPAD_API int64_t bu_bytes(const Handle* handle) {
  return static_cast<int64_t>(handle->bytes().size());
}

// Copies what was handed over, and frees it.
BERT_UNPAD_API void bu_take(Handle* handle, void* to) {
  const std::span<const char> bytes = handle->bytes();
  if (!bytes.empty()) std::memcpy(to, bytes.data(), bytes.size());
  delete handle;
}

}  // namespace bert_unpad::host
