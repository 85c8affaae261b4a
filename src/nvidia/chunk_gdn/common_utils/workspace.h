// What the kernels hand to each other in the workspace, as far as the architecture does not shape it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "tensors.h"

namespace atrex::chunk_gdn {

// One (chunk, v-head)'s vectors, written by the prepare kernel and read by the scan.
// G is the cumulative log decay inside the chunk, r the reciprocal norms (1 without l2norm).
struct ChunkGates {
  float beta[kChunk];
  float decay_k[kChunk];  // beta exp(G) r_k: scales (S^T k)
  float decay_u[kChunk];  // exp(G_end - G) r_k: scales u in the state update
  float decay_q[kChunk];  // scale exp(G) r_q: scales (S^T q)
  float decay_chunk[4];   // exp(G_end), four times to keep 16-byte copies
};
static_assert(sizeof(ChunkGates) % 16 == 0, "copies into shared memory move multiples of 16 bytes");

// The prepare kernel's work items: a chunk and a q/k head with up to four of its v-heads.
inline constexpr int kItemHeads = 4;
__host__ __device__ inline int item_parts(int heads, int value_heads) {
  return (value_heads / heads + kItemHeads - 1) / kItemHeads;
}

// What context parallelism hands from its transfer pass to the scan: states, and the matrices that act on them.
inline constexpr size_t kStateFloatBytes = size_t{kHeadDim} * kHeadDim * 4;
inline constexpr size_t kTransferBytes = size_t{kHeadDim} * kHeadDim * 2;

}  // namespace atrex::chunk_gdn
