// Memory that a thread keeps between calls, and torch's threads.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdlib>
#include <new>

#include "products.h"

namespace mira {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A grow-only buffer. Workers read what the calling thread's rooms hold; they own none.
class Room {
 public:
  ~Room() { std::free(bytes_); }
  template <class T>
  T* take(int64_t count) {
    const size_t needed = (size_t(count) * sizeof(T) + 4095) / 4096 * 4096;
    if (needed > size_) {
      std::free(bytes_);
      size_ = 0;
      bytes_ = std::aligned_alloc(64, needed);
      if (bytes_ == nullptr) throw std::bad_alloc();
      size_ = needed;
    }
    return static_cast<T*>(bytes_);
  }

 private:
  void* bytes_ = nullptr;
  size_t size_ = 0;
};

// Runs body(i) for i below count on torch's threads; `grain` is the least share of one.
template <class Body>
void each(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  torch::stable::parallel_for(0, count, std::max<int64_t>(grain, 1),
                              [&](int64_t begin, int64_t end) {
                                for (int64_t i = begin; i < end; ++i) body(i);
                              });
}

// Shares below this many bytes of weights are not worth another thread.
inline int64_t grain_of(int64_t unit_bytes) { return 32768 / std::max<int64_t>(unit_bytes, 1) + 1; }

inline void check_cpu(const Tensor& t, ScalarType type, const char* what) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == type, what, " has the wrong dtype or device");
}

inline bool is_bfloat16(const Tensor& t) { return t.scalar_type() == ScalarType::BFloat16; }

inline void write_row(bool is_float, void* base, int64_t at, const float* from, int64_t count) {
  if (is_float) {
    std::memcpy(static_cast<float*>(base) + at, from, 4 * count);
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(base) + at;
  int64_t n = 0;
  for (; n + 16 <= count; n += 16) store(to + n, narrow(load<F16>(from + n)));
  for (; n < count; ++n) to[n] = narrow(from[n]);
}

}  // namespace mira
