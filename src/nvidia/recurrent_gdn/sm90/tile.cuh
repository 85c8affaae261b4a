// The share of one state that a block holds in registers: kBlockV of the 128 value columns, all 128 keys, 16 KB.
//
// Four warps; each lane moves eight 16-byte vectors, and the eight lanes of a group move 128 bytes in a row.
//   V first ([V, K]): a group of eight lanes owns kValues rows; lane i of it holds the keys of vectors i, i + 8, ...
//   K first ([K, V]): a group owns eight rows of keys; lane i of it holds the kValues columns of vector i.
// Either way a lane holds kValues x kKeys elements, and the loads of a tile are independent of each other.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "params.h"

namespace atrex::recurrent_gdn {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr unsigned kFullWarp = 0xffffffffu;

// ---- 16-bit pairs -------------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <class T>
__device__ __forceinline__ float2 unpack2(uint32_t packed) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&packed));
  }
}

// ---- the tile -----------------------------------------------------------------------------------------------------

template <class State, bool kIsVFirst>
struct Tile {
  static constexpr bool kVFirst = kIsVFirst;
  static constexpr bool kBf16 = std::is_same_v<State, __nv_bfloat16>;
  static constexpr int kVector = 16 / sizeof(State);
  static constexpr int kLoads = 8;
  static constexpr int kChunks = 16 / kVector;  // V first: vectors of a lane in one row
  static constexpr int kValues = kVFirst ? kLoads / kChunks : kVector;
  static constexpr int kKeys = kVFirst ? 16 : kLoads;
  static constexpr int kBlockV = kVFirst ? 4 * kWarps * kValues : 8 * kVector;

  uint4 raw[kLoads];
  float s[kValues][kKeys];

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }

  // First of this lane's columns in the block's slice.
  static __device__ __forceinline__ int first_value() {
    return kVFirst ? (warp() * 4 + lane() / 8) * kValues : lane() % 8 * kVector;
  }
  // The lane's keys come in runs of kRun; the first key of run i.
  static constexpr int kRun = kVFirst ? kVector : kKeys;
  static __device__ __forceinline__ int first_key(int run) {
    return kVFirst ? (run * 8 + lane() % 8) * kVector : warp() * 32 + lane() / 8 * 8;
  }
  // Where vector i lies in a state, in elements.
  static __device__ __forceinline__ int offset(int slice, int i) {
    const int value = slice * kBlockV + first_value();
    return kVFirst ? (value + i / kChunks) * kHeadDim + first_key(i % kChunks) : (first_key(0) + i) * kHeadDim + value;
  }
  __device__ __forceinline__ float& element(int i, int e) {
    return kVFirst ? s[i / kChunks][i % kChunks * kVector + e] : s[e][i];
  }

  // Issues the loads. Streamed: nobody reads a state twice before the cache is full of others.
  __device__ __forceinline__ void load(const State* state, int slice) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) raw[i] = __ldcs(reinterpret_cast<const uint4*>(state + offset(slice, i)));
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) raw[i] = uint4{};
  }
  __device__ __forceinline__ void unpack() {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) unpack(i, raw[i]);
  }
  // Writes the elements to `state` unless that is null, and keeps them as they are there: rounded to State.
  __device__ __forceinline__ void store(State* state, int slice) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 vector = pack(i);
      if (state != nullptr) __stcs(reinterpret_cast<uint4*>(state + offset(slice, i)), vector);
      unpack(i, vector);
    }
  }

 private:
  __device__ __forceinline__ void unpack(int i, const uint4& vector) {
    const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kBf16) {
        const float2 pair = unpack2<__nv_bfloat16>(words[w]);
        element(i, 2 * w) = pair.x;
        element(i, 2 * w + 1) = pair.y;
      } else {
        element(i, w) = __uint_as_float(words[w]);
      }
    }
  }
  __device__ __forceinline__ uint4 pack(int i) {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kBf16) {
        words[w] = pack2<__nv_bfloat16>(element(i, 2 * w), element(i, 2 * w + 1));
      } else {
        words[w] = __float_as_uint(element(i, w));
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }
};

// Sums over all keys for each of the lane's columns; every lane gets its sums. Always in the same order.
//
// V first: the keys of a row lie in the eight lanes of a group. K first: they lie in the four groups of all four
// warps; the warps meet in shared memory, in one of two buffers in turn, so that one barrier a token is enough: who
// writes a buffer again has passed the barrier of the token between, and behind that nobody reads the old sums.
template <class Tile>
struct KeySums {
  static constexpr bool kVFirst = Tile::kVFirst;
  alignas(16) float partial[kVFirst ? 1 : 2][kVFirst ? 1 : kWarps][2][Tile::kBlockV];

  __device__ __forceinline__ void reduce(float (&a)[Tile::kValues], float (&b)[Tile::kValues], int buffer) {
    constexpr int kFirst = kVFirst ? 1 : 8, kEnd = kVFirst ? 8 : 32;
#pragma unroll
    for (int i = 0; i < Tile::kValues; ++i) {
#pragma unroll
      for (int step = kFirst; step < kEnd; step *= 2) {
        a[i] += __shfl_xor_sync(kFullWarp, a[i], step);
        b[i] += __shfl_xor_sync(kFullWarp, b[i], step);
      }
    }
    if constexpr (!kVFirst) {
      const int value = Tile::first_value();
      if (Tile::lane() < 8) {
        auto& mine = partial[buffer][Tile::warp()];
#pragma unroll
        for (int i = 0; i < Tile::kValues; i += 4) {
          *reinterpret_cast<float4*>(&mine[0][value + i]) = {a[i], a[i + 1], a[i + 2], a[i + 3]};
          *reinterpret_cast<float4*>(&mine[1][value + i]) = {b[i], b[i + 1], b[i + 2], b[i + 3]};
        }
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < Tile::kValues; i += 4) {
        float4 sum[2] = {};
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
#pragma unroll
          for (int which = 0; which < 2; ++which) {
            const float4 x = *reinterpret_cast<const float4*>(&partial[buffer][warp][which][value + i]);
            sum[which].x += x.x, sum[which].y += x.y, sum[which].z += x.z, sum[which].w += x.w;
          }
        }
        a[i] = sum[0].x, a[i + 1] = sum[0].y, a[i + 2] = sum[0].z, a[i + 3] = sum[0].w;
        b[i] = sum[1].x, b[i + 1] = sum[1].y, b[i + 2] = sum[1].z, b[i + 3] = sum[1].w;
      }
    }
  }
};

}  // namespace atrex::recurrent_gdn
