// What the C functions of bert_unpad._host share. Python calls them by ctypes, which needs no
// header of Python's, so one file serves every version of it; PyTorch has no part in it either.
//
// A function returns 0, or a code of `bert_unpad/_host_calls.py` after which `bu_error` gives the
// message. What it makes it hands over as a handle, which `bu_free` or `bu_take` ends.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define BERT_UNPAD_API extern "C" __attribute__((visibility("default")))

namespace bert_unpad::host {

// A contiguous array; it may be absent, which is not the same as empty.
template <typename T>
struct Array {
  const T* data;
  int64_t size;

  bool given() const { return size >= 0; }
  std::span<const T> span() const {
    return given() ? std::span<const T>(data, static_cast<size_t>(size)) : std::span<const T>();
  }
};

struct Handle {
  virtual ~Handle() = default;
  virtual std::span<const char> bytes() const { return {}; }
};

template <typename T>
struct Held : Handle {
  explicit Held(T&& held) : value(std::move(held)) {}
  T value;
};

template <typename T>
struct HeldBytes : Held<T> {
  using Held<T>::Held;
  std::span<const char> bytes() const override {
    const auto* begin = reinterpret_cast<const char*>(this->value.data());
    return {begin, this->value.size() * sizeof(this->value[0])};
  }
};

template <typename T>
Handle* hold(T value) {
  return new Held<T>(std::move(value));
}

// Values that Python copies into an array of its own.
template <typename T>
Handle* hand_over(T values) {
  return new HeldBytes<T>(std::move(values));
}

template <typename T>
T& held(Handle* handle) {
  return static_cast<Held<T>*>(handle)->value;
}

void set_error(const char* message);

template <typename Function>
int guarded(Function&& function) {
  enum { kDone, kValue, kMemory, kOther };
  try {
    function();
    return kDone;
  } catch (const std::invalid_argument& error) {
    set_error(error.what());
    return kValue;
  } catch (const std::bad_alloc& error) {
    set_error(error.what());
    return kMemory;
  } catch (const std::exception& error) {
    set_error(error.what());
    return kOther;
  }
}

}  // namespace bert_unpad::host
