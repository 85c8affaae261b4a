// Where a state's elements lie in the registers of the warp that owns the slice, and what acts on them there.
#pragma once

#include "params.h"
#include "ptx.cuh"

namespace atrex::chunk_gdn {

// A warp's slice of S^T, 16 value rows x 128 key columns, as accumulators of 16 x 8 products side by side. Element i of
// lane 4 g + t is in row g + 8 (i / 2 % 2) and column 8 (i / 4) + 2 t + i % 2.
__device__ __forceinline__ int fragment_row(int i) { return threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
__device__ __forceinline__ int fragment_column(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
// The value that its row stands for: rows g and g + 8 interleaved in pairs, so that a lane's values of a token, once
// transposed, are four neighbours in memory.
__device__ __forceinline__ int fragment_value(int i) {
  const int row = fragment_row(i);
  return row % 8 / 2 * 4 + row / 8 * 2 + row % 2;
}

// M^T of a transfer as B operand: slice i has its rows 16 i .. 16 i + 15, reduction step i of the product S^T M^T.
__device__ __forceinline__ uint4* transfer_quads(unsigned char* data, int64_t cut, int slice) {
  return reinterpret_cast<uint4*>(data + cut * kTransferBytes) + slice * 8 * 32 + threadIdx.x % 32;
}
template <class T>
__device__ __forceinline__ void store_transfer(const float (&s)[64], unsigned char* data, int64_t cut, int slice) {
  uint4* quads = transfer_quads(data, cut, slice);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint4 quad;
    quad.x = transpose(pack2<T>(s[8 * i], s[8 * i + 1]));
    quad.y = transpose(pack2<T>(s[8 * i + 2], s[8 * i + 3]));
    quad.z = transpose(pack2<T>(s[8 * i + 4], s[8 * i + 5]));
    quad.w = transpose(pack2<T>(s[8 * i + 6], s[8 * i + 7]));
    quads[i * 32] = quad;
  }
}
// S^T <- S^T M^T + N^T; S^T as A operand.
template <class T>
__device__ __forceinline__ void apply_transfer(float (&s)[64], const uint32_t (&operand)[32], unsigned char* data,
                                               int64_t cut) {
#pragma unroll
  for (int step = 0; step < kSlices; ++step) {
    const uint4* quads = transfer_quads(data, cut, step);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 quad = quads[i * 32];
      mma<T>(s + 8 * i, operand + 4 * step, quad.x, quad.y);
      mma<T>(s + 8 * i + 4, operand + 4 * step, quad.z, quad.w);
    }
  }
}

}  // namespace atrex::chunk_gdn
