// Where sequences lie, and which rows of the states are theirs. No value of an integer tensor is trusted.
#pragma once

#include "vector.cuh"

namespace atrex::causal_conv1d {

__device__ __forceinline__ int64_t load_index(const Indices& x, int64_t n) {
  return x.is_int64 ? static_cast<const long long*>(x.data)[n * x.stride]
                    : static_cast<const int*>(x.data)[n * x.stride];
}

// The tokens [start, end) of a batch entry.
struct Span {
  int batch, start, end;
};

__device__ __forceinline__ int offset(const Problem& p, int n) {
  return int(min(max(load_index(p.offsets, n), int64_t{0}), int64_t{p.tokens}));
}

// Malformed offsets give a span inside of the tensors, and all spans together still cover [first, last offset).
__device__ __forceinline__ Span span_of(const Problem& p, int n) {
  if (p.offsets.data == nullptr) return {n, 0, p.tokens};
  const int start = offset(p, n);
  return {0, start, max(offset(p, n + 1), start)};
}

// The row of `states` that an index means; -1: padding.
__device__ __forceinline__ int64_t row_of(const Problem& p, const Indices& indices, const States& states, int n) {
  if (indices.data == nullptr) return n;
  const int64_t row = load_index(indices, n);
  return row < 0 || row >= states.rows || row == p.padding ? -1 : row;
}

template <class T>
__device__ __forceinline__ T* state_of(const States& states, int64_t row) {
  return static_cast<T*>(states.data) + row * states.stride_row;
}

template <class T>
__device__ __forceinline__ const T* token_of(const Problem& p, int batch, int token, int channel) {
  return static_cast<const T*>(p.x.data) + batch * p.x.stride_b + token * p.x.stride_t + channel;
}

template <class T>
__device__ __forceinline__ T* output_of(const Problem& p, int batch, int token, int channel) {
  return static_cast<T*>(p.out) + (int64_t(batch) * p.tokens + token) * p.channels + channel;
}

// Zeros for the tokens [start, end).
template <class T>
__device__ __forceinline__ void clear_output(const Problem& p, int batch, int start, int end, int channel) {
#pragma unroll 1
  for (int t = start; t < end; ++t) store(output_of<T>(p, batch, t, channel), Words{});
}

}  // namespace atrex::causal_conv1d
