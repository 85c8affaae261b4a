// What crosses the line between the host launchers and the kernels: plain data, no torch, no pybind11.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace atrex::chunk_gdn {

inline constexpr int kChunk = 64;      // tokens of a chunk
inline constexpr int kHeadDim = 128;   // K = V
inline constexpr int kSliceRows = 64;  // value rows that one state warpgroup owns
inline constexpr int kTileElements = kChunk * kChunk;

enum class DataType : int { kFloat32, kBFloat16, kFloat16 };

// A [B, T, H, 128] activation; strides in elements, the last dimension is contiguous.
struct Activation {
  const void* data;
  int64_t stride_b, stride_t, stride_h;
};

// A [B, T, HV] gate; strides in elements.
struct Gate {
  const void* data;
  int64_t stride_b, stride_t, stride_h;
  DataType dtype;
};

// States [rows, HV, K, V] or [rows, HV, V, K], fp32 or bf16; strides in elements.
struct States {
  void* data;  // null: absent
  int64_t stride_row, stride_h, stride_k, stride_v;
  DataType dtype;
};

// One (chunk, v-head)'s vectors, written by the prepare kernel and read by the scan.
// G is the cumulative log decay inside the chunk, r the reciprocal norms (1 without l2norm).
struct ChunkGates {
  float beta[kChunk];
  float decay_k[kChunk];  // beta exp(G) r_k: scales (S^T k)
  float decay_u[kChunk];  // exp(G_end - G) r_k: scales u in the state update
  float decay_q[kChunk];  // scale exp(G) r_q: scales (S^T q)
  float decay_chunk[4];   // exp(G_end), four times to keep 16-byte copies
};
static_assert(sizeof(ChunkGates) % 16 == 0, "bulk copies move multiples of 16 bytes");

// The prepare kernel's work items: a chunk and a q/k head with up to four of its v-heads.
inline constexpr int kItemHeads = 4;
inline constexpr uint32_t kItemReady = 2;  // the item's two warpgroups are through
__host__ __device__ inline int item_parts(int heads, int value_heads) {
  return (value_heads / heads + kItemHeads - 1) / kItemHeads;
}

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
inline constexpr size_t kStateFloatBytes = size_t{kHeadDim} * kHeadDim * 4;
inline constexpr size_t kTransferBytes = size_t{kHeadDim} * kHeadDim * 2;

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
