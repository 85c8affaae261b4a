// 16-byte vectors of neighbouring channels, and the convolution of a vector's channels over a run of tokens.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "params.h"

namespace atrex::causal_conv1d {

// Loads must not be __ldg ones: the compiler may move those up across this wait.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_be_placed() { asm volatile("griddepcontrol.launch_dependents;"); }

template <class T>
inline constexpr int kVector = 16 / sizeof(T);
template <class T>
inline constexpr int kInWord = 4 / sizeof(T);  // channels of a 32-bit word

// A vector as its four words.
struct Words {
  uint32_t word[4];
};

__device__ __forceinline__ Words load(const void* vector) {
  const uint4 v = *static_cast<const uint4*>(vector);
  return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ void store(void* vector, const Words& x) {
  *static_cast<uint4*>(vector) = {x.word[0], x.word[1], x.word[2], x.word[3]};
}

// ---- elements ------------------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void unpack(uint32_t word, float (&x)[kInWord<T>]) {
  if constexpr (std::is_same_v<T, float>) {
    x[0] = __uint_as_float(word);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xffff0000u);
  } else {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
    x[0] = pair.x;
    x[1] = pair.y;
  }
}

template <class T>
__device__ __forceinline__ uint32_t pack(const float (&x)[kInWord<T>]) {
  if constexpr (std::is_same_v<T, float>) {
    return __float_as_uint(x[0]);
  } else {
    uint32_t packed;
    const float low = x[0], high = x[1];
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    }
    return packed;
  }
}

// Relative error about 2^-21 where it matters. Two special instructions, no branch: with the exact exponential and
// division the kernel would be bound by instructions, not by memory.
__device__ __forceinline__ float silu(float x) {
  float power, reciprocal;
  const float exponent = x * -1.4426950408889634f, one_more_than = 1.f;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  const float sum = one_more_than + power;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(sum));
  return x * reciprocal;
}

// ---- weights -------------------------------------------------------------------------------------------------------

// Of the channels of a vector.
template <class T>
struct Weights {
  float tap[kWidth][kVector<T>];
  Words bias;

  __device__ __forceinline__ void load(const Problem& p, int channel) {
    // The taps of a channel are contiguous, those of the vector's channels are kVector * 4 elements: four vectors.
    const auto* at = static_cast<const T*>(p.weight) + int64_t(channel) * kWidth;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const Words words = causal_conv1d::load(at + i * kVector<T>);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float x[kInWord<T>];
        unpack<T>(words.word[w], x);
#pragma unroll
        for (int e = 0; e < kInWord<T>; ++e) {
          const int flat = i * kVector<T> + w * kInWord<T> + e;
          tap[flat % kWidth][flat / kWidth] = x[e];
        }
      }
    }
    bias = p.bias == nullptr ? Words{} : causal_conv1d::load(static_cast<const T*>(p.bias) + channel);
  }
};

// Outputs of kCount tokens; `in` begins with the three tokens before them. Always in the same order of additions.
template <class T, int kCount>
__device__ __forceinline__ void convolve(const Weights<T>& weights, bool with_silu, const Words (&in)[kBefore + kCount],
                                         Words (&out)[kCount]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float x[kBefore + kCount][kInWord<T>];
#pragma unroll
    for (int t = 0; t < kBefore + kCount; ++t) unpack<T>(in[t].word[w], x[t]);
    float bias[kInWord<T>];
    unpack<T>(weights.bias.word[w], bias);
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
      float y[kInWord<T>];
#pragma unroll
      for (int e = 0; e < kInWord<T>; ++e) {
        const int channel = w * kInWord<T> + e;
        y[e] = bias[e];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) y[e] = fmaf(weights.tap[j][channel], x[t + j][e], y[e]);
        if (with_silu) y[e] = silu(y[e]);
      }
      out[t].word[w] = pack<T>(y);
    }
  }
}

// ---- states whose columns are contiguous ---------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ uint32_t element(const Words* vectors, int i) {
  const uint32_t word = vectors[i / kVector<T>].word[i % kVector<T> / kInWord<T>];
  return kInWord<T> == 1 ? word : word >> (16 * (i % kInWord<T>)) & 0xffffu;
}

// kColumns vectors that hold, channel by channel, kColumns columns; and the columns as vectors.
template <class T, int kColumns>
__device__ __forceinline__ void columns_of(const Words (&channels)[kColumns], Words (&columns)[kColumns]) {
#pragma unroll
  for (int l = 0; l < kColumns; ++l) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int channel = w * kInWord<T>;
      uint32_t word = element<T>(channels, channel * kColumns + l);
      if constexpr (kInWord<T> == 2) word |= element<T>(channels, (channel + 1) * kColumns + l) << 16;
      columns[l].word[w] = word;
    }
  }
}

template <class T, int kColumns>
__device__ __forceinline__ void channels_of(const Words (&columns)[kColumns], Words (&channels)[kColumns]) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int flat = i * kVector<T> + w * kInWord<T>;
      uint32_t word = element<T>(&columns[flat % kColumns], flat / kColumns);
      if constexpr (kInWord<T> == 2) word |= element<T>(&columns[(flat + 1) % kColumns], (flat + 1) / kColumns) << 16;
      channels[i].word[w] = word;
    }
  }
}

template <class T, int kColumns>
__device__ __forceinline__ void load_columns(const T* state, int channel, Words (&columns)[kColumns]) {
  Words channels[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) channels[i] = load(state + int64_t(channel) * kColumns + i * kVector<T>);
  columns_of<T, kColumns>(channels, columns);
}

template <class T, int kColumns>
__device__ __forceinline__ void store_columns(T* state, int channel, const Words (&columns)[kColumns]) {
  Words channels[kColumns];
  channels_of<T, kColumns>(columns, channels);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) store(state + int64_t(channel) * kColumns + i * kVector<T>, channels[i]);
}

}  // namespace atrex::causal_conv1d
