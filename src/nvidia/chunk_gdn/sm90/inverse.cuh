// Inverse of a unit lower triangular 64x64 matrix in shared memory by a warpgroup, in the steps of block_matrix.cuh.
#pragma once

#include "block_matrix.cuh"
#include "params.h"
#include "ptx.cuh"

namespace atrex::chunk_gdn {

// The row that a lane names to stmatrix for a 16x16 block in a packed tile (params.h).
__device__ __forceinline__ uint32_t tile_block(int warp, int block) {
  const uint32_t lane = threadIdx.x % 32;
  return packed_group(block, 2 * warp + (lane / 8 & 1)) + lane / 16 * 128 + lane % 8 * 16;
}

// Inverts the block matrix in place; its strictly lower part goes into the tile, once that has left shared memory.
// `sync` is a barrier of the warpgroup.
template <class T, class Sync>
__device__ __forceinline__ void invert(int warp, float (*blocks)[kPitch], uint32_t tile, Sync sync) {
  const int group = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  invert_diagonal(blocks, 16 * warp);
  uint32_t diagonal[2][4];
  load_negative_diagonal(diagonal, warp, group, t, blocks);
  if (threadIdx.x % 128 == 0) store_wait_read();

  // Block rows top down: once row m is final, every row below takes its share of it.
  float inverse[6][4] = {};
#pragma unroll
  for (int m = 0; m < 3; ++m) {
    uint32_t left[2][4];
    if (warp > m) multiply_diagonal(left, diagonal, warp, m, blocks);
    sync();
    if (warp > m) add_share_of_row(inverse, left, m, blocks);
    if (m < 2 && warp == m + 1) store_row(inverse, warp, m, blocks);  // nobody reads the last row
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
        const float2 x = *reinterpret_cast<float2*>(&blocks[16 * warp + place_of_row(row)][16 * warp + column]);
        fragment[e] = pack2<T>(row > column ? x.x : 0.f, row > column + 1 ? x.y : 0.f);
      }
    }
    store_matrix(tile + tile_block(warp, block), fragment);
  }
}

}  // namespace atrex::chunk_gdn
