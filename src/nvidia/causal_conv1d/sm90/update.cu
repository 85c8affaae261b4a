// Decode and verify: one block for one sequence and 128 vectors of channels. Everything that a thread reads and writes
// belongs to its own channels, so a state can be written in place.
#include "launch.h"
#include "sequence.cuh"

namespace atrex::causal_conv1d {
namespace {

// Output of one token; `before` moves on by it.
template <class T>
__device__ __forceinline__ void step(const Problem& p, const Weights<T>& weights, const Words& x, Words* before,
                                     T* out) {
  const Words in[kBefore + 1] = {before[0], before[1], before[2], x};
  Words y[1];
  convolve<T, 1>(weights, p.silu, in, y);
  store(out, y[0]);
#pragma unroll
  for (int i = 0; i < kBefore; ++i) before[i] = in[i + 1];
}

// States of kColumns contiguous columns, all of which lie in registers. `x` is the first token.
template <class T, int kColumns>
__device__ __forceinline__ void roll_columns(const Problem& p, const Span& span, const Weights<T>& weights, Words x,
                                             int64_t read, int64_t write, int channel) {
  Words columns[kColumns];
  load_columns<T, kColumns>(state_of<const T>(p.initial, read), channel, columns);
#pragma unroll 1
  for (int t = span.start;;) {
    const Words second = columns[1];
    step<T>(p, weights, x, columns + kColumns - kBefore, output_of<T>(p, span.batch, t, channel));
    if constexpr (kColumns > kBefore) {  // step moved the last three
      static_assert(kColumns == kBefore + 1);
      columns[0] = second;
    }
    if (++t == span.end) break;
    x = load(token_of<T>(p, span.batch, t, channel));
  }
  if (write >= 0) store_columns<T, kColumns>(state_of<T>(p.final, write), channel, columns);
}

// States with contiguous channels, of any number of columns; `first`: the first of the tokens before.
template <class T>
__device__ __forceinline__ void slide_window(const Problem& p, const Span& span, const Weights<T>& weights, Words x,
                                             int first, int64_t read, int64_t write, int channel) {
  const T* from = state_of<const T>(p.initial, read) + channel;
  T* to = write >= 0 ? state_of<T>(p.final, write) + channel : nullptr;
  const bool verify = p.accepted.data != nullptr;
  Words before[kBefore];
#pragma unroll
  for (int i = 0; i < kBefore; ++i) before[i] = load(from + (first + i) * p.initial.stride_column);
  if (to != nullptr && verify) {
#pragma unroll
    for (int i = 1; i < kBefore; ++i) store(to + (i - 1) * p.final.stride_column, before[i]);
  } else if (to != nullptr) {
    // All but the last three columns, which `before` will be. Upwards, since `to` may be `from`.
    const int count = span.end - span.start;
#pragma unroll 1
    for (int column = 0; column < p.columns - kBefore; ++column) {
      const int source = column + min(count, p.columns);
      const Words moved = source < p.columns ? load(from + source * p.initial.stride_column)
                                             : load(token_of<T>(p, span.batch, span.end - p.columns + column, channel));
      store(to + column * p.final.stride_column, moved);
    }
  }
#pragma unroll 1
  for (int t = span.start;;) {
    step<T>(p, weights, x, before, output_of<T>(p, span.batch, t, channel));
    const int column = kBefore - 1 + t - span.start;
    if (to != nullptr && verify && column < p.columns) store(to + column * p.final.stride_column, x);
    if (++t == span.end) break;
    x = load(token_of<T>(p, span.batch, t, channel));
  }
  if (to != nullptr && !verify) {
#pragma unroll
    for (int i = 0; i < kBefore; ++i) store(to + (p.columns - kBefore + i) * p.final.stride_column, before[i]);
  }
}

template <class T>
__device__ __forceinline__ void update_sequence(const Problem& p) {
  const int channel = (blockIdx.x % p.groups * kThreads + threadIdx.x) * kVector<T>;
  const int n = blockIdx.x / p.groups;
  if (channel >= p.channels) return;
  wait_for_kernel_before();
  const Span span = span_of(p, n);
  if (p.offsets.data != nullptr) {  // tokens of no sequence
    if (n == 0) clear_output<T>(p, 0, 0, span.start, channel);
    if (n == p.sequences - 1) clear_output<T>(p, 0, span.end, p.tokens, channel);
  }
  if (span.start == span.end) return;
  // The loads that need no index are on their way while the indices come.
  const Words x = load(token_of<T>(p, span.batch, span.start, channel));
  Weights<T> weights;
  weights.load(p, channel);
  const int64_t read = row_of(p, p.read, p.initial, n), write = row_of(p, p.write, p.final, n);
  const int64_t first = p.accepted.data == nullptr ? p.columns - kBefore : load_index(p.accepted, n) - 1;
  if (read < 0 || first < 0 || first > p.columns - kBefore) {
    clear_output<T>(p, span.batch, span.start, span.end, channel);
    return;
  }
  let_next_kernel_be_placed();
  if (p.initial.stride_c == 1) {
    slide_window<T>(p, span, weights, x, int(first), read, write, channel);
  } else if (p.columns == kBefore) {
    roll_columns<T, kBefore>(p, span, weights, x, read, write, channel);
  } else {
    roll_columns<T, kBefore + 1>(p, span, weights, x, read, write, channel);
  }
}

}  // namespace
}  // namespace atrex::causal_conv1d

using atrex::causal_conv1d::kThreads;
using atrex::causal_conv1d::Problem;

extern "C" __global__ void __launch_bounds__(kThreads, 5)
    atrex_causal_conv1d_update_bf16(const __grid_constant__ Problem p) {
  atrex::causal_conv1d::update_sequence<__nv_bfloat16>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads, 5)
    atrex_causal_conv1d_update_fp16(const __grid_constant__ Problem p) {
  atrex::causal_conv1d::update_sequence<__half>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads, 5)
    atrex_causal_conv1d_update_fp32(const __grid_constant__ Problem p) {
  atrex::causal_conv1d::update_sequence<float>(p);
}

void atrex::causal_conv1d::launch_update(const Problem& p, DataType dtype, cudaStream_t stream) {
  const int64_t blocks = int64_t(p.sequences) * p.groups;
  switch (dtype) {
    case DataType::kBFloat16:
      return launch(atrex_causal_conv1d_update_bf16, p, blocks, stream);
    case DataType::kFloat16:
      return launch(atrex_causal_conv1d_update_fp16, p, blocks, stream);
    default:
      return launch(atrex_causal_conv1d_update_fp32, p, blocks, stream);
  }
}
