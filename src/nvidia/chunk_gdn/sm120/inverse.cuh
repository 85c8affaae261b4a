// Inverse of a unit lower triangular 64x64 matrix in shared memory by a block of four warps, in the steps of
// block_matrix.cuh.
#pragma once

#include "block_matrix.cuh"
#include "instructions.cuh"

namespace atrex::chunk_gdn {

// Inverts the block matrix in place; its strictly lower part goes to the tile in memory.
template <class T>
__device__ __forceinline__ void invert(int warp, float (*blocks)[kPitch], uint4* tile) {
  const int lane = threadIdx.x % 32, group = lane / 4, t = lane % 4;
  invert_diagonal(blocks, 16 * warp);
  uint32_t left[3][2][4];  // for the blocks left of the diagonal
  {
    uint32_t diagonal[2][4];
    load_negative_diagonal(diagonal, warp, group, t, blocks);
#pragma unroll
    for (int m = 0; m < 3; ++m) {
      if (warp > m) multiply_diagonal(left[m], diagonal, warp, m, blocks);
    }
  }
  __syncthreads();

  // Block rows top down: row m is final, every row below takes its share of it.
  float inverse[6][4] = {};
#pragma unroll
  for (int m = 0; m < 3; ++m) {
    if (warp > m) add_share_of_row(inverse, left[m], m, blocks);
    if (m == 2) break;  // nobody reads the last row
    if (warp == m + 1) store_row(inverse, warp, m, blocks);
    __syncthreads();
  }

  tile += warp * (warp + 1) / 2 * 32 + lane;
#pragma unroll
  for (int block = 0; block < 3; ++block) {
    if (block >= warp) continue;
    const float *left_half = inverse[2 * block], *right_half = inverse[2 * block + 1];
    tile[block * 32] = {pack2<T>(left_half[0], left_half[1]), pack2<T>(right_half[0], right_half[1]),
                        pack2<T>(left_half[2], left_half[3]), pack2<T>(right_half[2], right_half[3])};
  }
  uint32_t fragment[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int row = group + e / 2 * 8, column = e % 2 * 8 + 2 * t;
    const float2 x = *reinterpret_cast<float2*>(&blocks[16 * warp + place_of_row(row)][16 * warp + column]);
    fragment[e] = pack2<T>(row > column ? x.x : 0.f, row > column + 1 ? x.y : 0.f);
  }
  tile[warp * 32] = {fragment[0], fragment[1], fragment[2], fragment[3]};
}

}  // namespace atrex::chunk_gdn
