// Pieces of the preparation: what needs no matrix product and no inverse.
#pragma once

#include "gates.cuh"
#include "instructions.cuh"
#include "sequence.cuh"

namespace atrex::chunk_gdn {

// Reciprocal norm of a row of 128 features by two neighbouring threads, of which each has a half: eight 16-byte pieces,
// permuted by the row so that piece c lies at c ^ (row & 7).
template <class T>
__device__ __forceinline__ float reciprocal_norm(const uint4* half, int row) {
  constexpr float kEpsilon = 1e-6f;
  float sum = 0.f;
#pragma unroll
  for (int piece = 0; piece < 8; ++piece) {
    const uint4 packed = half[piece ^ (row & 7)];
    for (const uint32_t pair : {packed.x, packed.y, packed.z, packed.w}) {
      const float2 x = unpack2<T>(pair);
      sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
    }
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  return rsqrtf(sum + kEpsilon);
}

// Outputs of the tokens and checkpoints that belong to no sequence are zero. `clear(data, begin, end)` clears a block's
// share of the bytes from begin to end, both multiples of 16.
template <class Clear>
__device__ __forceinline__ void clear_unused(const Problem& p, Clear clear) {
  const int used = monotone_offset(p, p.sequences);
  if (used < p.tokens) {
    const int64_t row_bytes = int64_t(p.value_heads) * kHeadDim * 2;
    clear(p.out, used * row_bytes, p.tokens * row_bytes);
  }
  if (p.checkpoint_chunks) {
    const int64_t row_bytes = p.checkpoints.stride_row * (p.checkpoints.dtype == DataType::kFloat32 ? 4 : 2);
    clear(p.checkpoints.data, checkpoints_before(p, p.sequences) * row_bytes, p.checkpoint_rows * row_bytes);
  }
}

// What the v-heads share: norms, scale, and zeros above the diagonal and past the sequence's end. Selected, not
// multiplied: a token that is NaN would reach the ones before it, and what lies past the end can be the next
// sequence's.
__device__ __forceinline__ void scale_product(int warp, float (&product)[32], const float* row_norms,
                                              const float* column_norms, float scale, int live, int from_diagonal) {
  const int first_row = warp * 16 + threadIdx.x % 32 / 4, first_column = threadIdx.x % 4 * 2;
  const float factors[2] = {scale * row_norms[first_row], scale * row_norms[first_row + 8]};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (n >= 2 * warp + 2) continue;  // never read
    const float2 norms = *reinterpret_cast<const float2*>(column_norms + 8 * n + first_column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + i / 2 * 8, column = 8 * n + first_column + i % 2;
      const bool on = row < live && row >= column + from_diagonal;
      product[4 * n + i] = on ? product[4 * n + i] * (factors[i / 2] * (i % 2 ? norms.y : norms.x)) : 0.f;
    }
  }
}

}  // namespace atrex::chunk_gdn
