// Pieces of the preparation: what needs no matrix product and no inverse.
#pragma once

#include "gates.cuh"
#include "ptx.cuh"
#include "sequence.cuh"

namespace atrex::chunk_gdn {

inline constexpr int kPrepareThreads = 512;
inline constexpr float kNormEpsilon = 1e-6f;

// Reciprocal norms of the 64 rows of a swizzled tile pair, by a warpgroup: two threads a row, one panel each.
template <class T>
__device__ __forceinline__ void reciprocal_norms(const T (&panels)[2][kTileElements], float* out) {
  const int row = threadIdx.x % 128 / 2;
  const auto* chunks = reinterpret_cast<const uint4*>(panels[threadIdx.x % 2]) + row * 8;
  float sum = 0.f;
#pragma unroll
  for (int chunk = 0; chunk < 8; ++chunk) {
    const uint4 packed = chunks[chunk ^ (row & 7)];
    for (const uint32_t pair : {packed.x, packed.y, packed.z, packed.w}) {
      const float2 x = unpack2<T>(pair);
      sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
    }
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  if (threadIdx.x % 2 == 0) out[row] = rsqrtf(sum + kNormEpsilon);
}

// Clears this block's share of [begin, end) bytes; both multiples of 16.
__device__ __forceinline__ void clear_share(void* data, int64_t begin, int64_t end) {
  const int64_t step = int64_t(gridDim.x) * kPrepareThreads * 16;
  for (int64_t at = begin + (int64_t(blockIdx.x) * kPrepareThreads + threadIdx.x) * 16; at < end; at += step) {
    *reinterpret_cast<uint4*>(static_cast<char*>(data) + at) = uint4{};
  }
}

// Outputs of the tokens and checkpoints that belong to no sequence are zero.
__device__ __forceinline__ void clear_unused(const Problem& p) {
  const int used = monotone_offset(p, p.sequences);
  if (used < p.tokens) {
    const int64_t row_bytes = int64_t(p.value_heads) * kHeadDim * 2;
    clear_share(p.out, used * row_bytes, p.tokens * row_bytes);
  }
  if (p.checkpoint_chunks) {
    const int64_t row_bytes = p.checkpoints.stride_row * (p.checkpoints.dtype == DataType::kFloat32 ? 4 : 2);
    clear_share(p.checkpoints.data, checkpoints_before(p, p.sequences) * row_bytes, p.checkpoint_rows * row_bytes);
  }
}

// One warp: the gates of one v-head for the scan.
__device__ __forceinline__ void store_gates(const float2* decays, const float* betas, const float* norms_k,
                                            const float* norms_q, float scale, int live, ChunkGates* out) {
  const float2 end = decays[kChunk - 1];
  for (int t = threadIdx.x % 32; t < kChunk; t += 32) {
    const float2 decay = decays[t];
    const float since_start = decay.y == 0.f ? exp2_approximate(decay.x) : 0.f;
    const float until_end = decay.y == end.y ? exp2_approximate(end.x - decay.x) : 0.f;
    const float norm_k = t < live ? norms_k[t] : 0.f;
    const float norm_q = t < live ? norms_q[t] : 0.f;
    const float beta = betas[t];
    out->beta[t] = beta;
    out->decay_k[t] = beta * since_start * norm_k;
    out->decay_u[t] = until_end * norm_k;
    out->decay_q[t] = scale * since_start * norm_q;
  }
  if (threadIdx.x % 32 < 4) out->decay_chunk[threadIdx.x % 32] = end.y == 0.f ? exp2_approximate(end.x) : 0.f;
}

// What the v-heads share: norms, scale, and zeros above the diagonal and past the sequence's end. Selected, not
// multiplied: tokens past the end belong to the next sequence and can be NaN.
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
