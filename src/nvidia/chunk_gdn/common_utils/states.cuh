// States between memory and registers: each thread of a slice's warps has 64 elements of it.
#pragma once

#include <cuda_bf16.h>

#include "fragment.cuh"  // the target's own

namespace atrex::chunk_gdn {

// ---- The caller's states ------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ void load_state(float (&s)[64], const States& states, int64_t row, int head, int slice) {
  const T* base = static_cast<const T*>(states.data) + row * states.stride_row + head * states.stride_h;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    s[i] =
        float(base[(slice * kSliceRows + fragment_value(i)) * states.stride_v + fragment_column(i) * states.stride_k]);
  }
}
__device__ __forceinline__ void load_state(float (&s)[64], const States& states, int64_t row, int head, int slice) {
  if (states.dtype == DataType::kFloat32) {
    load_state<float>(s, states, row, head, slice);
  } else {
    load_state<__nv_bfloat16>(s, states, row, head, slice);
  }
}

template <class T>
__device__ __forceinline__ void store_state(const float (&s)[64], const States& states, int64_t row, int head,
                                            int slice) {
  T* base = static_cast<T*>(states.data) + row * states.stride_row + head * states.stride_h;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    base[(slice * kSliceRows + fragment_value(i)) * states.stride_v + fragment_column(i) * states.stride_k] = T(s[i]);
  }
}
__device__ __forceinline__ void store_state(const float (&s)[64], const States& states, int64_t row, int head,
                                            int slice) {
  if (states.dtype == DataType::kFloat32) {
    store_state<float>(s, states, row, head, slice);
  } else {
    store_state<__nv_bfloat16>(s, states, row, head, slice);
  }
}

// ---- The workspace's: element quads of a slice's threads side by side, slice after slice ---------------------------

inline constexpr int kSliceThreads = kSliceRows * kHeadDim / 64;

__device__ __forceinline__ float4* fragment_quads(unsigned char* data, int64_t index, int slice) {
  return reinterpret_cast<float4*>(data + index * kStateFloatBytes) + slice * 16 * kSliceThreads +
         threadIdx.x % kSliceThreads;
}
__device__ __forceinline__ void load_fragment(float (&s)[64], unsigned char* data, int64_t index, int slice) {
  const float4* quads = fragment_quads(data, index, slice);
#pragma unroll
  for (int i = 0; i < 16; ++i) *reinterpret_cast<float4*>(s + 4 * i) = quads[i * kSliceThreads];
}
__device__ __forceinline__ void store_fragment(const float (&s)[64], unsigned char* data, int64_t index, int slice) {
  float4* quads = fragment_quads(data, index, slice);
#pragma unroll
  for (int i = 0; i < 16; ++i) quads[i * kSliceThreads] = *reinterpret_cast<const float4*>(s + 4 * i);
}

}  // namespace atrex::chunk_gdn
