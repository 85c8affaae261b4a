// The share of one state that a block holds in registers: kBlockV of the 128 value columns, all 128 keys, 16 KB.
//
// Four warps; each lane moves eight 16-byte vectors, and the eight lanes of a group move 128 bytes in a row.
//   V first ([V, K]): a group of eight lanes owns kValues rows; lane i of it holds the keys of vectors i, i + 8, ...
//   K first ([K, V]): a group owns eight rows of keys; lane i of it holds the kValues columns of vector i.
// Either way a lane holds kValues x kKeys elements, and the loads of a tile are independent of each other. They stay as
// they are in memory, two to a register if they are bfloat16: the number of blocks that fit decides the bandwidth.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "params.h"

namespace atrex::recurrent_gdn {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr unsigned kFullWarp = 0xffffffffu;
inline constexpr int kGridY =
    65535;  // sequences in the grid's second dimension, which can hold no more; then the third

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

  uint4 vectors[kLoads];

  // Which of the lane's values and keys element e of vector i belongs to.
  static constexpr __device__ int value(int i, int e) { return kVFirst ? i % kValues : e; }
  static constexpr __device__ int key(int i, int e) { return kVFirst ? i / kValues * kVector + e : i; }

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
  // Where the lane's first vector lies in a state, and vector i behind it, in elements.
  static __device__ __forceinline__ int first_offset(int slice) {
    const int value = slice * kBlockV + first_value();
    return kVFirst ? value * kHeadDim + first_key(0) : first_key(0) * kHeadDim + value;
  }
  static constexpr __device__ int offset(int i) {
    return kVFirst ? i % kValues * kHeadDim + i / kValues * 8 * kVector : i * kHeadDim;
  }

  // Issues the loads. Streamed: nobody reads a state twice before the cache is full of others.
  __device__ __forceinline__ void load(const State* state, int slice) {
    state += first_offset(slice);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) vectors[i] = __ldcs(reinterpret_cast<const uint4*>(state + offset(i)));
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) vectors[i] = uint4{};
  }
  __device__ __forceinline__ void store(State* state, int slice) const {
    state += first_offset(slice);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) __stcs(reinterpret_cast<uint4*>(state + offset(i)), vectors[i]);
  }

  __device__ __forceinline__ void get(int i, float (&elements)[kVector]) const {
    const uint32_t words[4] = {vectors[i].x, vectors[i].y, vectors[i].z, vectors[i].w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kBf16) {
        const float2 pair = unpack2<__nv_bfloat16>(words[w]);
        elements[2 * w] = pair.x;
        elements[2 * w + 1] = pair.y;
      } else {
        elements[w] = __uint_as_float(words[w]);
      }
    }
  }
  // The same by other instructions: of two equal ones the assembler would make one, and hold the elements unpacked, in
  // twice the registers, from the first use to the second.
  __device__ __forceinline__ void get_again(int i, float (&elements)[kVector]) const {
    if constexpr (kBf16) {
      const uint32_t words[4] = {vectors[i].x, vectors[i].y, vectors[i].z, vectors[i].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        elements[2 * w] = __uint_as_float(__byte_perm(words[w], 0, 0x1044));
        elements[2 * w + 1] = __uint_as_float(__byte_perm(words[w], 0, 0x3244));
      }
    } else {
      get(i, elements);
    }
  }
  __device__ __forceinline__ void set(int i, const float (&elements)[kVector]) {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kBf16) {
        words[w] = pack2<__nv_bfloat16>(elements[2 * w], elements[2 * w + 1]);
      } else {
        words[w] = __float_as_uint(elements[w]);
      }
    }
    vectors[i] = {words[0], words[1], words[2], words[3]};
  }
};

// Sums over all keys for each of the lane's columns; every lane gets its sums. Always in the same order.
//
// V first: the keys of a row lie in the eight lanes of a group. K first: they lie in the four groups of all four
// warps. The warps leave their parts in shared memory; behind a barrier each thread adds up one column, and behind
// another all read the totals. The next token's parts are written after the second barrier, when the old ones have been
// read, and its totals after its first barrier, when the old totals have.
template <class Tile>
struct KeySums {
  static constexpr bool kVFirst = Tile::kVFirst;
  static constexpr int kColumns = kVFirst ? 1 : Tile::kBlockV;
  alignas(16) float parts[kWarps][2][kColumns];
  alignas(16) float totals[2][kColumns];

  __device__ __forceinline__ void reduce(float (&a)[Tile::kValues], float (&b)[Tile::kValues]) {
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
        auto& mine = parts[Tile::warp()];
#pragma unroll
        for (int i = 0; i < Tile::kValues; i += 4) {
          *reinterpret_cast<float4*>(&mine[0][value + i]) = {a[i], a[i + 1], a[i + 2], a[i + 3]};
          *reinterpret_cast<float4*>(&mine[1][value + i]) = {b[i], b[i + 1], b[i + 2], b[i + 3]};
        }
      }
      __syncthreads();
      if (threadIdx.x < 2 * kColumns) {
        const int which = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
        float total = parts[0][which][column];
#pragma unroll
        for (int warp = 1; warp < kWarps; ++warp) total += parts[warp][which][column];
        totals[which][column] = total;
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < Tile::kValues; i += 4) {
        const float4 x = *reinterpret_cast<const float4*>(&totals[0][value + i]);
        const float4 y = *reinterpret_cast<const float4*>(&totals[1][value + i]);
        a[i] = x.x, a[i + 1] = x.y, a[i + 2] = x.z, a[i + 3] = x.w;
        b[i] = y.x, b[i + 1] = y.y, b[i + 2] = y.z, b[i + 3] = y.w;
      }
    }
  }
};

}  // namespace atrex::recurrent_gdn
