// The recurrence token by token: one block for one (sequence, v head, slice of value columns).
//
// The state is bound by memory: a block reads its 16 KB once, keeps them in registers over all tokens of the sequence
// and writes them where they are wanted. Order of the loads, so that no latency is paid twice: offsets and indices
// first, then the first token's inputs, which need the offsets alone, then the state, which needs its slot.
#pragma once

#include "token.cuh"

namespace atrex::recurrent_gdn {

// Loads must not be __ldg ones: the compiler may move those up across this wait.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_be_placed() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ int64_t load_index(const void* data, bool is_int64, int64_t at) {
  return is_int64 ? static_cast<const long long*>(data)[at] : static_cast<const int*>(data)[at];
}
__device__ __forceinline__ int64_t load_index(const Indices& x, int64_t n, int64_t s) {
  return load_index(x.data, x.is_int64, n * x.stride_n + s * x.stride_s);
}

// The tokens [start, end) of a batch entry.
struct Span {
  int batch, start, end;
};

// Malformed offsets give a span inside of the tensors, and all spans together still cover [first, last offset).
__device__ __forceinline__ Span span_of(const Problem& p, int n) {
  if (p.cu_seqlens == nullptr) return {n, 0, p.tokens};
  const int64_t tokens = p.tokens;
  const int64_t start = min(max(load_index(p.cu_seqlens, p.cu_seqlens_int64, n), int64_t{0}), tokens);
  const int64_t end = min(max(load_index(p.cu_seqlens, p.cu_seqlens_int64, n + 1), start), tokens);
  return {0, int(start), int(end)};
}

__device__ __forceinline__ int head_of(const Problem& p, int value_head) {
  return p.group == 1 ? value_head : __umulhi(value_head, p.reciprocal_group);
}

// The row of `initial` that a sequence starts from; -1: the sequence is padding.
__device__ __forceinline__ int64_t row_read(const Problem& p, int n) {
  if (p.read.data == nullptr) return n;
  int64_t column = 0;
  if (p.accepted.data != nullptr) {
    column = load_index(p.accepted, n, 0) - 1;
    if (column < 0 || column >= p.read_columns) return -1;
  }
  const int64_t row = load_index(p.read, n, column);
  return row < 0 || row >= p.initial.rows || row == p.padding_index ? -1 : row;
}

// Where the state goes that sequence n has after its token t; null: nowhere.
template <class State>
__device__ __forceinline__ State* place_stored(const Problem& p, int n, int t, int value_head) {
  if (p.store == Store::kNone || t >= p.steps) return nullptr;
  const int64_t row = p.write.data == nullptr ? n : load_index(p.write, n, t);
  if (row < 0 || row >= p.stored.rows || row == p.write_padding) return nullptr;
  return static_cast<State*>(p.stored.data) + row * p.stored.stride_row + t * p.stored.stride_step +
         value_head * p.stored.stride_h;
}

__device__ __forceinline__ uint16_t* row_of_output(const Problem& p, int batch, int token, int value_head) {
  return static_cast<uint16_t*>(p.out) + ((int64_t(batch) * p.tokens + token) * p.value_heads + value_head) * kHeadDim;
}

// Zeros for the block's columns of the tokens [start, end).
template <int kBlockV>
__device__ __forceinline__ void clear_output(const Problem& p, int batch, int start, int end, int value_head,
                                             int slice) {
  constexpr int kVectors = kBlockV * 2 / 16;
#pragma unroll 1
  for (int token = start + threadIdx.x / kVectors; token < end; token += kThreads / kVectors) {
    uint16_t* row = row_of_output(p, batch, token, value_head) + slice * kBlockV;
    reinterpret_cast<uint4*>(row)[threadIdx.x % kVectors] = uint4{};
  }
}

// Readouts can exceed float16: they become its largest number, which a norm behind survives, unlike inf.
template <class Act>
__device__ __forceinline__ float in_range(float x) {
  if constexpr (std::is_same_v<Act, __half>) return fabsf(x) > 65504.f ? copysignf(65504.f, x) : x;
  return x;
}

template <class State, class Act, bool kVFirst>
__device__ __forceinline__ void recurrent(const Problem& p) {
  using T = Tile<State, kVFirst>;
  constexpr int kSlices = kHeadDim / T::kBlockV;
  constexpr int kValues = T::kValues;
  __shared__ KeySums<T> sums;

  const int slice = blockIdx.x % kSlices, value_head = blockIdx.x / kSlices;
  const int n = blockIdx.z * kGridY + blockIdx.y;
  if (n >= p.sequences) return;
  // Each thread's own copy, from where the loop takes it: the assembler would work out the rows of later tokens ahead
  // of the loop and hold a dozen registers for them, which decode needs.
  __shared__ volatile int parked[kThreads];
  parked[threadIdx.x] = value_head;

  wait_for_kernel_before();
  const Span span = span_of(p, n);
  const int64_t row = row_read(p, n);
  if (p.cu_seqlens != nullptr) {  // tokens of no sequence
    if (n == 0) clear_output<T::kBlockV>(p, 0, 0, span.start, value_head, slice);
    if (n == p.sequences - 1) clear_output<T::kBlockV>(p, 0, span.end, p.tokens, value_head, slice);
  }
  if (row < 0) {
    clear_output<T::kBlockV>(p, span.batch, span.start, span.end, value_head, slice);
    return;
  }
  // Without a token a slot stays as it is, and a new final state is a copy of the initial one.
  const bool empty = span.start == span.end;
  if (empty && (p.store != Store::kLast || p.write.data != nullptr)) return;

  Token<T> token;
  HeadParameters parameters;
  if (!empty) {
    token.load(p, span.batch, span.start, head_of(p, value_head), value_head, slice);
    parameters.load(p, value_head);
  }
  T tile;
  if (p.initial.data != nullptr) {
    tile.load(static_cast<const State*>(p.initial.data) + row * p.initial.stride_row + value_head * p.initial.stride_h,
              slice);
  } else {
    tile.clear();
  }
  State* place = place_stored<State>(p, n, 0, value_head);
  if (empty) {
    tile.store(place, slice);
    return;
  }
  let_next_kernel_be_placed();
  Scalars x = scalars_of<Act>(p, token, parameters);

  for (int t = span.start;; ++t) {
    float sk[kValues] = {}, sq[kValues] = {};
#pragma unroll
    for (int i = 0; i < T::kLoads; ++i) {
      float state[T::kVector];
      tile.get(i, state);
#pragma unroll
      for (int e = 0; e < T::kVector; ++e) {
        const int value = T::value(i, e), key = T::key(i, e);
        sk[value] = fmaf(state[e], feature<Act>(token.k, key), sk[value]);
        sq[value] = fmaf(state[e], feature<Act>(token.q, key), sq[value]);
      }
    }
    sums.reduce(sk, sq);

    float u[kValues];
    uint32_t o[kValues / 2];
#pragma unroll
    for (int j = 0; j < kValues; j += 2) {
      const float2 v = unpack2<Act>(token.v[j / 2]);
      u[j] = x.norm_k * (x.beta * (v.x - x.decay * (x.norm_k * sk[j])));
      u[j + 1] = x.norm_k * (x.beta * (v.y - x.decay * (x.norm_k * sk[j + 1])));
      o[j / 2] = pack2<Act>(in_range<Act>(x.scale_q * fmaf(x.decay, sq[j], x.kq * u[j])),
                            in_range<Act>(x.scale_q * fmaf(x.decay, sq[j + 1], x.kq * u[j + 1])));
    }
#pragma unroll
    for (int i = 0; i < T::kLoads; ++i) {
      float state[T::kVector];
      tile.get_again(i, state);
#pragma unroll
      for (int e = 0; e < T::kVector; ++e) {
        state[e] = fmaf(feature<Act>(token.k, T::key(i, e)), u[T::value(i, e)], x.decay * state[e]);
      }
      tile.set(i, state);
    }

    const bool last = t + 1 == span.end;
    if (kVFirst ? T::lane() % 8 == 0 : threadIdx.x < 8) {  // one of those that have the same columns
      uint16_t* out = row_of_output(p, span.batch, t, value_head) + slice * T::kBlockV + T::first_value();
      if constexpr (kValues == 2) {
        *reinterpret_cast<uint32_t*>(out) = o[0];
      } else if constexpr (kValues == 4) {
        *reinterpret_cast<uint2*>(out) = {o[0], o[1]};
      } else {
        *reinterpret_cast<uint4*>(out) = {o[0], o[1], o[2], o[3]};
      }
    }
    if (place != nullptr && (last || p.store == Store::kEachToken)) tile.store(place, slice);
    if (last) break;
    const int again = parked[threadIdx.x];
    token.load(p, span.batch, t + 1, head_of(p, again), again, slice);
    if (p.store == Store::kEachToken) place = place_stored<State>(p, n, t + 1 - span.start, value_head);
    x = scalars_of<Act>(p, token, parameters);
  }
}

}  // namespace atrex::recurrent_gdn

// Defines the kernel NAME and, for both layouts alike, nothing else.
#define ATREX_RECURRENT_GDN_KERNEL(NAME, STATE, ACTIVATION, V_FIRST, BLOCKS)           \
  extern "C" __global__ void __launch_bounds__(atrex::recurrent_gdn::kThreads, BLOCKS) \
      NAME(const __grid_constant__ atrex::recurrent_gdn::Problem p) {                  \
    atrex::recurrent_gdn::recurrent<STATE, ACTIVATION, V_FIRST>(p);                    \
  }
