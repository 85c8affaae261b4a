// What crosses the line between the host launchers and the kernels: plain data, no torch, no pybind11.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "workspace.h"

namespace atrex::chunk_gdn {

inline constexpr int kSliceRows = 16;                  // value rows that one warp of the scan owns
inline constexpr int kSlices = kHeadDim / kSliceRows;  // of a v-head
inline constexpr int kMaxSharedBytes = 99 * 1024;      // that a block of sm_120 can have

// The lower block triangle of a 64x64 matrix of 16-bit elements in 16x16 blocks, block (i, j) at i (i + 1) / 2 + j.
// A block is 32 uint4, one a lane, in the order of B fragments: for lane 4 g + t the columns 2 t and 2 t + 1 of row g
// of its four 8x8 parts, (0, 0), (0, 1), (1, 0), (1, 1).
inline constexpr int kTileBlocks = 10;
inline constexpr int kTileQuads = kTileBlocks * 32;

// What the preparation hands to the scan for one (chunk slot, v-head). The transfer pass reads all but the scores.
struct Prepared {
  uint4 inverse[kTileQuads];  // strictly lower part
  ChunkGates gates;
  uint4 scores[kTileQuads];
};
static_assert(sizeof(Prepared) % 16 == 0, "asynchronous copies move 16 bytes");

// Workspace: what is prepared, then what context parallelism hands from its transfer pass to the scan.
struct Workspace {  // offsets in bytes; `prepared` is at 0
  size_t initial, offsets, transfers, bytes;
};

inline Workspace workspace_of(int64_t slots, int64_t value_heads, int64_t sequences, int64_t segments) {
  const size_t cuts = segments > 1 ? sequences * value_heads * (segments - 1) : 0;
  Workspace w{};
  w.initial = (slots * value_heads * sizeof(Prepared) + 1023) / 1024 * 1024;
  w.offsets = w.initial + (segments > 1 ? sequences * value_heads * kStateFloatBytes : 0);
  w.transfers = w.offsets + cuts * kStateFloatBytes;
  w.bytes = w.transfers + cuts * kTransferBytes;
  return w;
}

struct Problem {
  int batch, tokens, heads, value_heads;
  int sequences;           // batch, or N of cu_seqlens
  const void* cu_seqlens;  // null: one sequence a batch entry
  bool cu_seqlens_int64;
  float scale;
  bool l2norm;
  int slots;     // chunk slots in all, see sequence.cuh
  int segments;  // stretches that a sequence is cut into for context parallelism; 1: none

  Activation q, k, v;
  Gate g, beta;
  void* out;  // [B, T, HV, 128], contiguous

  States initial, final;      // the same memory when states live in a pool
  const void* state_indices;  // null: row i of `initial` and `final` belongs to sequence i
  bool state_indices_int64;
  int64_t pool_rows;

  States checkpoints;
  int checkpoint_chunks;  // 0: none
  int64_t checkpoint_rows;

  unsigned char* workspace;
  Workspace offsets;

  __device__ Prepared* prepared(int64_t slot, int value_head) const {
    return reinterpret_cast<Prepared*>(workspace) + slot * value_heads + value_head;
  }
};

}  // namespace atrex::chunk_gdn
