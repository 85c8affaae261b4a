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

// A 64x64 tile of scores or of an inverse, which are lower triangular. It is a row of four columns of 16 tokens; a
// column is a stack of 8-row groups, each two 8x8 blocks of 128 bytes side by side, as wgmma reads an operand without
// swizzle. Of the last two columns the lower halves alone are kept, group beside group: the zeros that the scan has in
// front of them are their upper halves.
inline constexpr uint32_t kGroupBytes = 256;
struct PackedTile {
  unsigned char lower[4][2][kGroupBytes];
  unsigned char whole[2][8][kGroupBytes];
};
struct TriangularTile {
  unsigned char zeros[4][2][kGroupBytes];
  PackedTile packed;
};
static_assert(offsetof(TriangularTile, packed) == sizeof(TriangularTile::zeros));
// Where the column's group `group`, one that is kept, lies in a packed tile.
__host__ __device__ constexpr uint32_t packed_group(int column, int group) {
  return column < 2 ? offsetof(PackedTile, whole) + (8 * column + group) * kGroupBytes
                    : (2 * (group - 4) + column - 2) * kGroupBytes;
}

// Where the gates keep token t. Of 16 tokens an accumulator's thread has 2 (lane % 4) and the next, and the two that
// are 8 further on: these four lie side by side.
__device__ __forceinline__ int gate_place(int t) { return t / 16 * 16 + t % 8 / 2 * 4 + t / 8 % 2 * 2 + t % 2; }

// All that the preparation hands to the scan of one (chunk, v-head).
struct alignas(128) Prepared {
  PackedTile scores;
  PackedTile inverse;  // strictly lower part
  ChunkGates gates;    // copied together with the inverse
};
inline constexpr uint32_t kInverseBytes = sizeof(PackedTile) + sizeof(ChunkGates);
static_assert(offsetof(Prepared, gates) == offsetof(Prepared, inverse) + sizeof(PackedTile));

// Workspace: what is prepared of each (slot, v-head); a counter an item, for a scan that runs beside the preparation;
// then what context parallelism hands from its transfer pass to the scan.
struct Workspace {  // offsets in bytes
  size_t ready, initial, offsets, transfers, bytes;
};

inline Workspace workspace_of(int64_t slots, int64_t heads, int64_t value_heads, int64_t sequences, int64_t segments) {
  auto align = [](size_t n) { return (n + 1023) / 1024 * 1024; };
  const size_t cuts = segments > 1 ? sequences * value_heads * (segments - 1) : 0;
  Workspace w{};
  w.ready = align(slots * value_heads * sizeof(Prepared));
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

  __device__ Prepared* prepared() const { return reinterpret_cast<Prepared*>(workspace); }
};

}  // namespace atrex::chunk_gdn
