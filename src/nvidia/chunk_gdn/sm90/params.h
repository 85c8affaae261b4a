// What crosses the line between the host launchers and the kernels: plain data, no torch, no pybind11.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "workspace.h"

namespace atrex::chunk_gdn {

inline constexpr int kSliceRows = 64;  // value rows that one state warpgroup owns
inline constexpr int kTileElements = kChunk * kChunk;
inline constexpr uint32_t kItemReady = 2;  // in an item's counter: its two warpgroups are through

// Workspace: per (slot, v-head) the strictly lower inverse, the scores and the gates; a counter an item, for a scan
// that runs beside the preparation; then what context parallelism hands from its transfer pass to the scan.
inline constexpr size_t kTileBytes = kTileElements * 2 * 10 / 16;
// Scores and inverses are lower triangular: of their 16x16 blocks only those on and below the diagonal are kept. A
// block column is a stack of 8-row groups, each two 8x8 blocks of 128 bytes side by side, as wgmma reads an operand
// without swizzle; in the workspace the columns are packed, in the scan's shared memory each has its full height.
inline constexpr uint32_t kGroupBytes = 256;
inline constexpr uint32_t kColumnBytes = kChunk / 8 * kGroupBytes;
__host__ __device__ constexpr uint32_t packed_column(int column) {  // where the column's group 2 column begins
  return column * kColumnBytes - column * (column - 1) * kGroupBytes;
}
static_assert(packed_column(3) + 2 * kGroupBytes == kTileBytes);

struct Workspace {  // offsets in bytes
  size_t inverse, scores, gates, ready, initial, offsets, transfers, bytes;
};

inline Workspace workspace_of(int64_t slots, int64_t heads, int64_t value_heads, int64_t sequences, int64_t segments) {
  auto align = [](size_t n) { return (n + 1023) / 1024 * 1024; };
  const size_t chunk_heads = slots * value_heads;
  const size_t cuts = segments > 1 ? sequences * value_heads * (segments - 1) : 0;
  Workspace w{};
  w.inverse = 0;
  w.scores = w.inverse + chunk_heads * kTileBytes;
  w.gates = w.scores + chunk_heads * kTileBytes;
  w.ready = align(w.gates + chunk_heads * sizeof(ChunkGates));
  w.initial = align(w.ready + slots * heads * item_parts(heads, value_heads) * sizeof(uint32_t));
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
  bool overlap;  // the scan runs beside the preparation and waits for each item's counter to reach kItemReady

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
};

}  // namespace atrex::chunk_gdn
