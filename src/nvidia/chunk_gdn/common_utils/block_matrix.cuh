// Steps in which four warps invert a unit lower triangular 64x64 matrix in shared memory; warp w owns rows 16w..16w+15.
//
// By 16x16 blocks: forward substitution in float32 on 8x8 blocks of the diagonal, the rest by blocks in tf32, at last,
// one block row after the other, X_s = -(X_ss L_s) X_<s.
#pragma once

#include "instructions.cuh"
#include "tensors.h"

namespace atrex::chunk_gdn {

// Row pitch of the float32 block matrix, and where it keeps a row: accesses of accumulators (eight bytes a lane, four
// rows of four lanes at a time) and of B fragments (every other row, eight columns each) meet no bank twice.
inline constexpr int kPitch = kChunk + 8;
__device__ __forceinline__ int place_of_row(int row) { return row ^ (row >> 2 & 1); }

// A fragment (16 x 8, tf32) out of an accumulator tile. The reduction index is permuted (t -> 2t, t + 4 -> 2t + 1),
// which load_b answers by reading its rows in the same order.
__device__ __forceinline__ void accumulator_to_a(uint32_t* a, const float* d) {
  a[0] = to_tf32(d[0]);
  a[1] = to_tf32(d[2]);
  a[2] = to_tf32(d[1]);
  a[3] = to_tf32(d[3]);
}
__device__ __forceinline__ void load_b(uint32_t* b, const float (*rows)[kPitch], int row, int column) {
  const int group = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  b[0] = to_tf32(rows[row + place_of_row(2 * t)][column + group]);
  b[1] = to_tf32(rows[row + place_of_row(2 * t + 1)][column + group]);
}
__device__ __forceinline__ void store_accumulator(float (*rows)[kPitch], int row, int column, const float* d) {
  const int group = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  *reinterpret_cast<float2*>(&rows[row + place_of_row(group)][column + 2 * t]) = {d[0], d[1]};
  *reinterpret_cast<float2*>(&rows[row + 8 + place_of_row(group)][column + 2 * t]) = {d[2], d[3]};
}

// Inverse of the warp's 16x16 unit lower diagonal block, in place: two 8x8 blocks by forward substitution in float32,
// a column a lane, then the block below them, -(X_22 L_21) X_11.
__device__ __forceinline__ void invert_diagonal(float (*rows)[kPitch], int first) {
  const int lane = threadIdx.x % 32, group = lane / 4, t = lane % 4;
  const int block = first + lane / 8 % 2 * 8, column = lane % 8;
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float row[8];
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      *reinterpret_cast<float4*>(row + j) = *reinterpret_cast<const float4*>(&rows[block + place_of_row(i)][block + j]);
    }
    x[i] = i == column ? 1.f : 0.f;
#pragma unroll
    for (int j = 0; j < i; ++j) x[i] -= row[j] * x[j];
  }
  __syncwarp();
  if (lane < 16) {
#pragma unroll
    for (int i = 0; i < 8; ++i) rows[block + place_of_row(i)][block + column] = x[i];
  }
  __syncwarp();
  // Rows 8..15 of the products stay empty: these blocks have eight rows.
  const float2 x22 = *reinterpret_cast<const float2*>(&rows[first + 8 + place_of_row(group)][first + 8 + 2 * t]);
  const uint32_t a[4] = {to_tf32(-x22.x), 0, to_tf32(-x22.y), 0};
  uint32_t b[2], left[4];
  float product[4] = {};
  load_b(b, rows, first + 8, first);
  mma_tf32(product, a, b);
  accumulator_to_a(left, product);
  float x21[4] = {};
  load_b(b, rows, first, first);
  mma_tf32(x21, left, b);
  __syncwarp();
  *reinterpret_cast<float2*>(&rows[first + 8 + place_of_row(group)][first + 2 * t]) = {x21[0], x21[1]};
  __syncwarp();
}

// -X_ss of the warp's inverted diagonal block, as A fragments; of lane 4 group + t.
__device__ __forceinline__ void load_negative_diagonal(uint32_t (&diagonal)[2][4], int warp, int group, int t,
                                                       const float (*rows)[kPitch]) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const int column = 16 * warp + 8 * step + 2 * t;
    const float2 upper = *reinterpret_cast<const float2*>(&rows[16 * warp + place_of_row(group)][column]);
    const float2 lower = *reinterpret_cast<const float2*>(&rows[16 * warp + 8 + place_of_row(group)][column]);
    const float negative[4] = {-upper.x, -upper.y, -lower.x, -lower.y};
    accumulator_to_a(diagonal[step], negative);
  }
}

// -(X_ss L_sm) of the warp's block in block column m, as A fragments.
__device__ __forceinline__ void multiply_diagonal(uint32_t (&left)[2][4], const uint32_t (&diagonal)[2][4], int warp,
                                                  int m, const float (*rows)[kPitch]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float product[4] = {};
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t b[2];
      load_b(b, rows, 16 * warp + 8 * step, 16 * m + 8 * half);
      mma_tf32(product, diagonal[step], b);
    }
    accumulator_to_a(left[half], product);
  }
}

// The share of block row m, which is final, in the inverse's row of a warp below it: X_s += -(X_ss L_sm) X_m.
__device__ __forceinline__ void add_share_of_row(float (&inverse)[6][4], const uint32_t (&left)[2][4], int m,
                                                 const float (*rows)[kPitch]) {
#pragma unroll
  for (int n = 0; n < 2 * m + 2; ++n) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t b[2];
      load_b(b, rows, 16 * m + 8 * step, 8 * n);
      mma_tf32(inverse[n], left[step], b);
    }
  }
}

// Row m + 1, final now, for the warps below.
__device__ __forceinline__ void store_row(const float (&inverse)[6][4], int warp, int m, float (*rows)[kPitch]) {
#pragma unroll
  for (int n = 0; n < 2 * m + 2; ++n) store_accumulator(rows, 16 * warp, 8 * n, inverse[n]);
}

}  // namespace atrex::chunk_gdn
