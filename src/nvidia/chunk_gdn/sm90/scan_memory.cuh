// Shared memory, barriers and work items of the scan.
#pragma once

#include "ptx.cuh"
#include "sequence.cuh"

namespace atrex::chunk_gdn {

enum class Pass { kOutputs, kOutputsAndCheckpoints, kTransfer };

inline constexpr int kStages = 3;
inline constexpr int kPanels = kHeadDim / 64;  // 64-feature panels of a K or Q tile

// What one block works on.
struct Work {
  int sequence, value_head, segment, slice;  // slice: first 64-row slice
  bool identity;                             // transfer pass: M, not N
};

template <int kWarpgroups, Pass kPass>
__device__ __forceinline__ Work work_at(const Problem& p, int index) {
  int rest = index;
  if constexpr (kPass == Pass::kTransfer) {
    const int items = 2 * p.segments - 3;  // N of segment 0, then N and M of segments 1 ..
    const int item = rest % items + 1;
    rest /= items;
    return {rest / p.value_heads, rest % p.value_heads, item / 2, 0, item != 1 && item % 2 == 1};
  } else {
    constexpr int kBlocks = kHeadDim / (kSliceRows * kWarpgroups);
    const int slice = rest % kBlocks * kWarpgroups;
    rest /= kBlocks;
    const int value_head = rest % p.value_heads;  // neighbours in a cluster
    rest /= p.value_heads;
    return {rest / p.segments, value_head, rest % p.segments, slice, false};
  }
}

// The block's part of its sequence.
struct Span {
  Sequence sequence;
  int first, end;  // chunks
  bool padding;    // the slot stays as it is
  int64_t state_row;
};

template <class T, int kWarpgroups>
struct Stage {
  T k[kPanels][kTileElements];
  T q[kPanels][kTileElements];
  T v[kWarpgroups][kTileElements];
};

// What is prepared: as in Prepared, with the zeros.
struct alignas(128) TileStage {
  TriangularTile scores, inverse;
  ChunkGates gates;
};
static_assert(offsetof(TileStage, gates) == offsetof(TileStage, inverse) + sizeof(TriangularTile));

template <class T, int kWarpgroups>
struct alignas(1024) ScanMemory {
  Stage<T, kWarpgroups> stages[kStages];
  T out[kWarpgroups][kTileElements];
  TileStage tiles[kStages];
  uint64_t tiles_full[kStages], tiles_empty[kStages];
  uint64_t peer_empty[kStages];  // the cluster's other block is ready for the stage's next fill
  uint64_t out_full[kWarpgroups];
  uint64_t transfer_full[2];
};

// Arrivals of a warp that releases a stage. One lane speaks for it: all lanes' reads of the stage came before a wgmma,
// which the warp executes as one. racecheck credits the lane alone, so builds for it let all arrive.
#ifdef ATREX_RACECHECK
inline constexpr int kReleasingLanes = 32;
#else
inline constexpr int kReleasingLanes = 1;
#endif

template <int kWarpgroups>
struct ScanThreads {
  static constexpr int kState = 128 * kWarpgroups;
  // A load warp, for each state warpgroup a store warp, and one that watches the loads. setmaxnreg works on whole
  // warpgroups, and only two state warpgroups need the registers of these.
  static constexpr int kCopy = kWarpgroups == 1 ? 96 : 128;
  static constexpr int kBlock = kState + kCopy;
};

// Those of a warpgroup, each with as many numbers: kWarpgroupBarrier; kOutEmptyBarrier, where a store warp tells that
// the last outputs have left shared memory; kTilesBarrier of a stage, where the watching warp tells that its tiles are
// there. State warps wait for other warps at these and not at mbarriers: that takes no loop (walk.cuh).
enum NamedBarrier {
  kStateBarrier = 1,
  kTransfersDoneBarrier,
  kWarpgroupBarrier,
  kOutEmptyBarrier = kWarpgroupBarrier + 2,
  kTilesBarrier = kOutEmptyBarrier + 2,
};
static_assert(kTilesBarrier + 2 * kStages <= 16);

// A place in the ring of stages.
struct Ring {
  int index = 0;
  uint32_t round = 0;  // parity
  __device__ __forceinline__ void advance() {
    if (++index == kStages) {
      index = 0;
      round ^= 1;
    }
  }
};

}  // namespace atrex::chunk_gdn
