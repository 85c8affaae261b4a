// Inverse of a unit lower triangular 64x64 matrix in shared memory, by a warpgroup whose warp w owns rows 16w..16w+15.
//
// By 16x16 blocks: forward substitution in float32 on 8x8 blocks of the diagonal, the rest by blocks in tf32, at last,
// one block row after the other, X_s = -(X_ss L_s) X_<s.
#pragma once

#include "params.h"
#include "ptx.cuh"

namespace atrex::chunk_gdn {

// Row pitch of the float32 block matrix: 16-byte rows, and 4-row-apart lanes fall into different banks.
inline constexpr int kPitch = kChunk + 4;
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
  b[0] = to_tf32(rows[row + 2 * t][column + group]);
  b[1] = to_tf32(rows[row + 2 * t + 1][column + group]);
}
__device__ __forceinline__ void store_accumulator(float (*rows)[kPitch], int row, int column, const float* d) {
  const int group = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  *reinterpret_cast<float2*>(&rows[row + group][column + 2 * t]) = {d[0], d[1]};
  *reinterpret_cast<float2*>(&rows[row + group + 8][column + 2 * t]) = {d[2], d[3]};
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
      *reinterpret_cast<float4*>(row + j) = *reinterpret_cast<const float4*>(&rows[block + i][block + j]);
    }
    x[i] = i == column ? 1.f : 0.f;
#pragma unroll
    for (int j = 0; j < i; ++j) x[i] -= row[j] * x[j];
  }
  __syncwarp();
  if (lane < 16) {
#pragma unroll
    for (int i = 0; i < 8; ++i) rows[block + i][block + column] = x[i];
  }
  __syncwarp();
  // Rows 8..15 of the products stay empty: these blocks have eight rows.
  const float2 x22 = *reinterpret_cast<const float2*>(&rows[first + 8 + group][first + 8 + 2 * t]);
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
  *reinterpret_cast<float2*>(&rows[first + 8 + group][first + 2 * t]) = {x21[0], x21[1]};
  __syncwarp();
}

// The row that a lane names to stmatrix for a 16x16 block in a packed triangular tile (params.h).
__device__ __forceinline__ uint32_t packed_block(int warp, int block) {
  const uint32_t lane = threadIdx.x % 32;
  return packed_column(block) + (2 * (warp - block) + (lane / 8 & 1)) * kGroupBytes + lane / 16 * 128 + lane % 8 * 16;
}

// Inverts the block matrix in place; its strictly lower part goes into the tile, once that has left shared memory.
// `sync` is a barrier of the warpgroup.
template <class T, class Sync>
__device__ __forceinline__ void invert(int warp, float (*blocks)[kPitch], uint32_t tile, Sync sync) {
  const int group = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  invert_diagonal(blocks, 16 * warp);
  uint32_t diagonal[2][4];  // -X_ss
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const int column = 16 * warp + 8 * step + 2 * t;
    const float2 upper = *reinterpret_cast<float2*>(&blocks[16 * warp + group][column]);
    const float2 lower = *reinterpret_cast<float2*>(&blocks[16 * warp + group + 8][column]);
    const float negative[4] = {-upper.x, -upper.y, -lower.x, -lower.y};
    accumulator_to_a(diagonal[step], negative);
  }
  if (threadIdx.x % 128 == 0) store_wait_read();

  // Block rows top down: once row m is final, every row below takes its share of it.
  float inverse[6][4] = {};
#pragma unroll
  for (int m = 0; m < 3; ++m) {
    uint32_t left[2][4];  // -(X_ss L_sm)
    if (warp > m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float product[4] = {};
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t b[2];
          load_b(b, blocks, 16 * warp + 8 * step, 16 * m + 8 * half);
          mma_tf32(product, diagonal[step], b);
        }
        accumulator_to_a(left[half], product);
      }
    }
    sync();
    if (warp > m) {
#pragma unroll
      for (int n = 0; n < 2 * m + 2; ++n) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t b[2];
          load_b(b, blocks, 16 * m + 8 * step, 8 * n);
          mma_tf32(inverse[n], left[step], b);
        }
      }
    }
    // Nobody reads the last row.
    if (m < 2 && warp == m + 1) {
#pragma unroll
      for (int n = 0; n < 2 * m + 2; ++n) store_accumulator(blocks, 16 * warp, 8 * n, inverse[n]);
    }
  }

#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block > warp) break;
    uint32_t fragment[4];
    if (block < 3 && block < warp) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* values = inverse[block < 3 ? 2 * block + e / 2 : 0] + e % 2 * 2;
        fragment[e] = pack2<T>(values[0], values[1]);
      }
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = group + e % 2 * 8, column = e / 2 * 8 + 2 * t;
        const float2 x = *reinterpret_cast<float2*>(&blocks[16 * warp + row][16 * warp + column]);
        fragment[e] = pack2<T>(row > column ? x.x : 0.f, row > column + 1 ? x.y : 0.f);
      }
    }
    store_matrix(tile + packed_block(warp, block), fragment);
  }
}

}  // namespace atrex::chunk_gdn
