// The serial pass: walks the chunks of a sequence with the state in registers (walk.cuh).
//
// A block serves one work item after the other, a slice or two of one head of one sequence. Its load warp keeps three
// stages of tiles in flight, across items too; a warp watches the loads for the state warps; store warps hand whole
// tiles of outputs to the copy engine. Two blocks that serve neighbouring v-heads of one q/k head make a cluster: one
// loads K for both, the other Q. They take the same items of the same sequences, so they fill the same stages.
//
// Context parallelism cuts a sequence into segments. The transfer pass finds, for every segment but the last, what it
// does to a state, S_out = M S_in + N: N by a scan from zero (segment 0: from the initial state), M by a scan from the
// identity with v = 0. The scan then starts every segment at its own state, so the result is the serial one.
#pragma once

#include <algorithm>

#include "launch.h"
#include "walk.cuh"

namespace atrex::chunk_gdn {

// A padding sequence leaves the pool as it is: zeros for its outputs and checkpoints.
template <class T, int kWarpgroups, bool kCheckpoints>
__device__ __forceinline__ void clear_padding(const Problem& p, const Work& work, const Span& span) {
  constexpr int kRowChunks = kWarpgroups * kSliceRows * 2 / 16;
  const Sequence& seq = span.sequence;
  auto* out = static_cast<uint4*>(p.out);
  const int tokens = min(span.end * kChunk, seq.length) - span.first * kChunk;
  for (int i = threadIdx.x; i < tokens * kRowChunks; i += 128 * kWarpgroups) {
    const int64_t token = int64_t(seq.batch) * p.tokens + seq.start + span.first * kChunk + i / kRowChunks;
    out[((token * p.value_heads + work.value_head) * kHeadDim + work.slice * kSliceRows) / 8 + i % kRowChunks] =
        uint4{};
  }
  if constexpr (kCheckpoints) {
    const int row = checkpoints_before(p, work.sequence);
    const int last = min(span.end, seq.length / kChunk) / p.checkpoint_chunks;
    for (int i = span.first / p.checkpoint_chunks; i < last; ++i) {
      for (int slice = work.slice; slice < work.slice + kWarpgroups; ++slice) {
        const float zeros[64] = {};
        if (threadIdx.x < 128) store_state(zeros, p.checkpoints, row + i, work.value_head, slice);
      }
    }
  }
}

// Called by a full warp.
__device__ __forceinline__ Span span_of(const Problem& p, const Work& work) {
  Span span;
  span.sequence = sequence_at(p, work.sequence);
  const int chunks = span.sequence.chunks(), per_segment = (chunks + p.segments - 1) / p.segments;
  span.first = min(work.segment * per_segment, chunks);
  span.end = min(span.first + per_segment, chunks);
  span.state_row = work.sequence;
  span.padding = false;
  if (p.state_indices != nullptr) {
    span.state_row = load_index(p.state_indices, p.state_indices_int64, work.sequence);
    span.padding = uniform(span.state_row < 0 || span.state_row >= p.pool_rows);
  }
  return span;
}

// The load warp: one lane fills the stages in order.
template <class T, int kWarpgroups, Pass kPass>
__device__ __forceinline__ void load_chunks(const Problem& p, const ScanMaps& maps, ScanMemory<T, kWarpgroups>& smem,
                                            const Work& work, const Span& span, Ring& stage, bool begins) {
  constexpr bool kOutputs = kPass != Pass::kTransfer;
  constexpr bool kShared = kOutputs && kWarpgroups == 2;  // blocks of one slice gain nothing by it
  const int lane = threadIdx.x % 32;
  const Sequence& seq = span.sequence;
  if (kOutputs && work.segment > 1) named_barrier_sync(kTransfersDoneBarrier, 128 * kWarpgroups + 32);
  if (work.identity) {  // M: v = 0, once and for all stages
    for (auto& each : smem.stages) {
      auto* v = reinterpret_cast<uint4*>(each.v);
      for (int i = lane; i < int(sizeof(each.v) / 16); i += 32) v[i] = uint4{};
    }
    __syncwarp();  // the loading lane's arrivals on the full barriers publish it
  }
  const int head = work.value_head / (p.value_heads / p.heads);
  const int parts = item_parts(p.heads, p.value_heads);
  const int part = work.value_head % (p.value_heads / p.heads) / kItemHeads;
  const auto* counters = reinterpret_cast<const uint32_t*>(p.workspace + p.offsets.ready);
  int prepared = p.overlap ? span.first : span.end;  // chunks before this one are known to be prepared
  int bytes = kPanels * kTileElements * 2 + kInverseBytes;
  if (kOutputs) bytes += kPanels * kTileElements * 2 + sizeof(PackedTile);
  if (!work.identity) bytes += kWarpgroups * kTileElements * 2;

  const bool paired = kShared && cluster_size() == 2;
  const int rank = cluster_rank();

  // Announces all bytes of a chunk on its stage's full barrier and asks for what the preparation does not write. What
  // a pair shares, it asks for once the stage is empty in both blocks.
  auto load_inputs = [&](int chunk, const Ring& at) {
    auto& to = smem.stages[at.index];
    uint64_t* full = &smem.tiles_full[at.index];
    const int token = seq.start + chunk * kChunk;
    if (elect_one()) {
      mbarrier_expect(full, bytes);
      if (paired) {
        mbarrier_arrive_at(&smem.peer_empty[at.index], rank ^ 1);
      } else {
        load_panels(to.k, &maps.k, 0, head, token, seq.batch, full);
        if (kOutputs) load_panels(to.q, &maps.q, 0, head, token, seq.batch, full);
      }
      if (!work.identity) {
        for (int slice = 0; slice < kWarpgroups; ++slice) {
          load_panels(to.v[slice], &maps.v, work.slice + slice, work.value_head, token, seq.batch, full);
        }
      }
    }
    __syncwarp();
    if (paired) {
      mbarrier_wait(&smem.peer_empty[at.index], at.round);
      if (elect_one()) {
        if (rank == 0) {
          load_panels_for_both(to.k, &maps.k, 0, head, token, seq.batch, full);
        } else {
          load_panels_for_both(to.q, &maps.q, 0, head, token, seq.batch, full);
        }
      }
      __syncwarp();
    }
  };
  auto load_prepared = [&](int chunk, int index) {
    // A look at 32 counters takes as long as one at one: mostly the preparation is far ahead.
    while (prepared <= chunk) {
      const int64_t at = (int64_t(seq.slot + prepared + lane) * p.heads + head) * parts + part;
      const bool done = prepared + lane < span.end && load_acquire(counters + at) >= kItemReady;
      const uint32_t missing = ~__ballot_sync(0xffffffffu, done);
      prepared += missing == 0 ? 32 : __ffs(missing) - 1;
      __syncwarp();
      fence_async_proxy_all();
    }
    if (elect_one()) {
      const Prepared* from = p.prepared() + int64_t(seq.slot + chunk) * p.value_heads + work.value_head;
      auto& to = smem.tiles[index];
      load_bulk(&to.inverse.packed, &from->inverse, kInverseBytes, &smem.tiles_full[index]);
      if (kOutputs) load_bulk(&to.scores.packed, &from->scores, sizeof(PackedTile), &smem.tiles_full[index]);
    }
    __syncwarp();
  };

  // The block's first inputs come while the preparation still runs.
  const int early = begins ? min(span.end, span.first + kStages) : span.first;
  Ring ahead = stage;
  for (int chunk = span.first; chunk < early; ++chunk, ahead.advance()) load_inputs(chunk, ahead);
  if (begins && !p.overlap) grid_wait();
  for (int chunk = span.first; chunk < span.end; ++chunk, stage.advance()) {
    if (chunk >= early) {
      mbarrier_wait(&smem.tiles_empty[stage.index], stage.round ^ 1);
      load_inputs(chunk, stage);
    }
    load_prepared(chunk, stage.index);
  }
}

// The watching warp: tells the state warps when a chunk's tiles are there. Tokens past the sequence's end belong to the
// next one: nothing of theirs may be multiplied, not even by zero.
template <class T, int kWarpgroups>
__device__ __forceinline__ void watch_loads(ScanMemory<T, kWarpgroups>& smem, const Span& span, Ring& stage) {
  for (int chunk = span.first; chunk < span.end; ++chunk, stage.advance()) {
    mbarrier_wait(&smem.tiles_full[stage.index], stage.round);
    const int live = span.sequence.length - chunk * kChunk;
    if (live < kChunk) {
      auto& tiles = smem.stages[stage.index];
      for (int i = live * 8 + threadIdx.x % 32; i < kChunk * 8; i += 32) {
        for (auto& panel : tiles.k) reinterpret_cast<uint4*>(panel)[i] = uint4{};
        for (auto& panel : tiles.v) reinterpret_cast<uint4*>(panel)[i] = uint4{};
      }
      fence_async_proxy();
    }
    for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
      named_barrier_arrive(kTilesBarrier + stage.index * kWarpgroups + warpgroup, 128 + 32);
    }
  }
}

// A store warp: hands each whole tile of outputs to the copy engine. The state warpgroups store the last.
template <class T, int kWarpgroups>
__device__ __forceinline__ void store_outputs(const ScanMaps& maps, ScanMemory<T, kWarpgroups>& smem, const Work& work,
                                              const Span& span, int slice, uint32_t& parity) {
  for (int chunk = span.first; chunk + 1 < span.end; ++chunk, parity ^= 1) {
    mbarrier_wait(&smem.out_full[slice], parity);
    fence_async_proxy();
    if (elect_one()) {
      store_panel(&maps.out, smem.out[slice], work.slice + slice, work.value_head, span.sequence.start + chunk * kChunk,
                  span.sequence.batch);
      store_commit();
      store_wait_read();
    }
    __syncwarp();
    named_barrier_arrive(kOutEmptyBarrier + slice, 128 + 32);
  }
}

// Calls `serve` with each of the block's work items that there is something to do for; called by full warps.
template <int kWarpgroups, Pass kPass, class Serve>
__device__ __forceinline__ void for_each_work(const Problem& p, int works, Serve serve) {
#pragma unroll 1
  for (int index = blockIdx.x; index < works; index += gridDim.x) {
    const Work work = work_at<kWarpgroups, kPass>(p, index);
    const Span span = span_of(p, work);
    // A segment without chunks transfers nothing; of segment 0 the scan wants the initial state.
    if (kPass == Pass::kTransfer && (span.padding || (work.segment > 0 && span.first == span.end))) continue;
    serve(work, span);
  }
}

template <class T, int kWarpgroups, Pass kPass>
__device__ __forceinline__ void scan(const Problem& p, const ScanMaps& maps, int works) {
  using Threads = ScanThreads<kWarpgroups>;
  constexpr bool kOutputs = kPass != Pass::kTransfer;
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<ScanMemory<T, kWarpgroups>*>(dynamic_smem);
  // Through a shuffle, so that the compiler knows it to be uniform in the warp.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);

  if (threadIdx.x == 0) {
    for (auto& barrier : smem.tiles_full) mbarrier_init(&barrier, 1);
    for (auto& barrier : smem.tiles_empty) mbarrier_init(&barrier, 4 * kWarpgroups * kReleasingLanes);
    for (auto& barrier : smem.peer_empty) mbarrier_init(&barrier, 1);
    for (auto& barrier : smem.out_full) mbarrier_init(&barrier, 4);
    for (auto& barrier : smem.transfer_full) mbarrier_init(&barrier, 1);
    mbarrier_init_fence();
  }
  for (auto& tiles : smem.tiles) {
    for (int i = threadIdx.x; i < int(sizeof(tiles.scores.zeros) / 16); i += Threads::kBlock) {
      reinterpret_cast<uint4*>(tiles.scores.zeros)[i] = uint4{};
      reinterpret_cast<uint4*>(tiles.inverse.zeros)[i] = uint4{};
    }
  }
  fence_async_proxy();
  __syncthreads();
  cluster_sync();  // no block arrives at another's barriers, or fills its stages, before these are ready

  if (warp >= Threads::kState / 32) {
    if constexpr (kWarpgroups == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    const int role = warp - Threads::kState / 32;
    if (role == 0) {
      Ring stage;
      bool begins = true;
      for_each_work<kWarpgroups, kPass>(p, works, [&](const Work& work, const Span& span) {
        if (span.padding) return;
        load_chunks<T, kWarpgroups, kPass>(p, maps, smem, work, span, stage, begins);
        begins = false;
      });
    } else if (role == 1) {
      Ring stage;
      for_each_work<kWarpgroups, kPass>(p, works, [&](const Work&, const Span& span) {
        if (!span.padding) watch_loads(smem, span, stage);
      });
    } else if (kOutputs) {
      uint32_t parity = 0;
      for_each_work<kWarpgroups, kPass>(p, works, [&](const Work& work, const Span& span) {
        if (!span.padding) store_outputs(maps, smem, work, span, role - 2, parity);
      });
      store_wait_all();
    }
  } else {
    if constexpr (kWarpgroups == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Ring stage;
    for_each_work<kWarpgroups, kPass>(p, works, [&](const Work& work, const Span& span) {
      if (span.padding) {
        if constexpr (kOutputs) clear_padding<T, kWarpgroups, kPass == Pass::kOutputsAndCheckpoints>(p, work, span);
      } else {
        walk<T, kWarpgroups, kPass>(p, smem, work, span, warp, stage);
      }
    });
    grid_wait();  // the grid ends after the preparation: what that has cleared is clear for whoever comes next
  }
}

using ScanKernel = void (*)(Problem, ScanMaps, int);
struct ScanKernels {
  ScanKernel transfer, outputs_1, outputs_2, checkpoints_1, checkpoints_2;
};

// Early behind the operator's own kernels alone: without tokens there are none, and whoever wrote the states may be at
// it.
template <class T, int kWarpgroups>
void launch_pass(ScanKernel kernel, const Problem& p, int works, int blocks, int cluster, const ScanMaps& maps,
                 cudaStream_t stream) {
  const Grid grid = {std::min(works, blocks / cluster * cluster), ScanThreads<kWarpgroups>::kBlock,
                     sizeof(ScanMemory<T, kWarpgroups>), cluster};
  launch(kernel, grid, /*overlap=*/p.tokens > 0, stream, p, maps, works);
}

template <class T>
void launch_scan(const Problem& p, int warpgroups, int blocks, const ScanMaps& maps, cudaStream_t stream,
                 const ScanKernels& kernels) {
  const int heads = p.sequences * p.value_heads;
  if (p.segments > 1) {  // every segment's block is its own
    const int transfers = heads * (2 * p.segments - 3);
    launch_pass<T, 2>(kernels.transfer, p, transfers, transfers, 1, maps, stream);
    blocks = heads * p.segments * 2;
  }
  if (warpgroups == 1) {
    launch_pass<T, 1>(p.checkpoint_chunks ? kernels.checkpoints_1 : kernels.outputs_1, p, heads * p.segments * 2,
                      blocks, 1, maps, stream);
  } else {
    const int cluster = p.value_heads / p.heads % 2 == 0 ? 2 : 1;
    launch_pass<T, 2>(p.checkpoint_chunks ? kernels.checkpoints_2 : kernels.outputs_2, p, heads * p.segments, blocks,
                      cluster, maps, stream);
  }
}

}  // namespace atrex::chunk_gdn
