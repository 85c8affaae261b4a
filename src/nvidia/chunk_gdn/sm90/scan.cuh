// The serial pass: walks the chunks of a sequence with the state in registers.
//
// A state warpgroup owns 64 value rows of S^T [128 v x 128 k] as float32 accumulators. Rounded to 16 bits in place,
// accumulators have the layout of wgmma's A operand, so all five products of a chunk take A from registers and only
// B (K, Q, the inverse, the scores) from shared memory:
//   x = S^T K^T        r = beta v - decay_k x       u = r + r X^T       (X: strictly lower inverse)
//   y = S^T Q^T        o = decay_q y + u P^T
//   S^T <- decay_chunk S^T + (decay_u u) K
// One producer warp keeps three stages of tiles in flight.
//
// Context parallelism cuts a sequence into segments. The transfer pass finds, for every segment but the last, what it
// does to a state, S_out = M S_in + N: N by a scan from zero (segment 0: from the initial state), M by a scan from the
// identity with v = 0. The scan then starts every segment at its own state, so the result is the serial one.
//
// No branch may stand between a wgmma and the wait whose result is read (ptxas would serialise every wgmma): an
// iteration has one place with nothing in flight, its top, and all waiting on barriers and branching happens there.
#pragma once

#include "launch.h"
#include "ptx.cuh"
#include "sequence.cuh"
#include "states.cuh"

namespace atrex::chunk_gdn {

enum class Pass { kOutputs, kOutputsAndCheckpoints, kTransfer };

inline constexpr int kStages = 3;
inline constexpr int kTileElements = kChunk * kChunk;
inline constexpr int kPanels = kHeadDim / 64;  // 64-feature panels of a K or Q tile

template <class T, int kWarpgroups>
struct Stage {
  T k[kPanels][kTileElements];
  T q[kPanels][kTileElements];
  T v[kWarpgroups][kTileElements];
  T inverse[kTileElements];
  T scores[kTileElements];
};

template <class T, int kWarpgroups>
struct alignas(1024) ScanMemory {
  Stage<T, kWarpgroups> stages[kStages];
  T out[kWarpgroups][kTileElements];
  ChunkGates gates[kStages];
  uint64_t tiles_full[kStages], tiles_empty[kStages];
  uint64_t out_full[kWarpgroups], out_empty[kWarpgroups];
  uint64_t transfer_full[2];
};

template <int kWarpgroups>
struct ScanThreads {
  static constexpr int kState = 128 * kWarpgroups;
  // A load warp, and for each state warpgroup a store warp. setmaxnreg works on whole warpgroups, and only two state
  // warpgroups need the registers of these.
  static constexpr int kCopy = kWarpgroups == 1 ? 64 : 128;
  static constexpr int kBlock = kState + kCopy;
};

enum NamedBarrier { kWarpgroupBarrier = 1 /* and 2 */, kStateBarrier = 3, kTransfersDoneBarrier };

// What one block works on.
struct Work {
  int sequence, value_head, segment, slice;  // slice: first 64-row slice
  bool identity;                             // transfer pass: M, not N
};

template <int kWarpgroups, Pass kPass>
__device__ __forceinline__ Work work_of_block(const Problem& p) {
  int rest = blockIdx.x;
  if constexpr (kPass == Pass::kTransfer) {
    const int items = 2 * p.segments - 3;  // N of segment 0, then N and M of segments 1 ..
    const int item = rest % items + 1;
    rest /= items;
    return {rest / p.value_heads, rest % p.value_heads, item / 2, 0, item != 1 && item % 2 == 1};
  } else {
    constexpr int kBlocks = kHeadDim / (kSliceRows * kWarpgroups);
    const int slice = rest % kBlocks * kWarpgroups;
    rest /= kBlocks;
    const int segment = rest % p.segments;
    rest /= p.segments;
    return {rest / p.value_heads, rest % p.value_heads, segment, slice, false};
  }
}

// The block's share of a padding sequence's checkpoints, which have rows like any other's.
template <int kWarpgroups>
__device__ __forceinline__ void clear_checkpoints(const Problem& p, const Work& work, const Sequence& seq, int first,
                                                  int end) {
  const int row = checkpoints_before(p, work.sequence);
  const int last = min(end, seq.length / kChunk) / p.checkpoint_chunks;
  for (int i = first / p.checkpoint_chunks; i < last; ++i) {
    for (int slice = work.slice; slice < work.slice + kWarpgroups; ++slice) {
      const float zeros[64] = {};
      if (threadIdx.x < 128) store_state(zeros, p.checkpoints, row + i, work.value_head, slice);
    }
  }
}

// ---- The kernel's body --------------------------------------------------------------------------------------------

template <class T, int kWarpgroups, Pass kPass>
__device__ __forceinline__ void scan(const Problem& p, const ScanMaps& maps) {
  using Threads = ScanThreads<kWarpgroups>;
  using Memory = ScanMemory<T, kWarpgroups>;
  constexpr bool kOutputs = kPass != Pass::kTransfer;
  constexpr bool kCheckpoints = kPass == Pass::kOutputsAndCheckpoints;
  // Whether what r takes is read well before its use. Beside the outputs that is slower, or does not fit the registers.
  constexpr bool kAhead = !kOutputs;
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<Memory*>(dynamic_smem);
  // Through a shuffle, so that the compiler knows it to be uniform in the warp.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;

  const Work work = work_of_block<kWarpgroups, kPass>(p);
  const Sequence seq = sequence_at(p, work.sequence);
  const int per_segment = (seq.chunks() + p.segments - 1) / p.segments;
  const int first = min(work.segment * per_segment, seq.chunks());
  const int end = min(first + per_segment, seq.chunks());
  const int64_t sequence_head = int64_t(work.sequence) * p.value_heads + work.value_head;

  // A segment without chunks transfers nothing; of segment 0 the scan wants the initial state.
  if (kPass == Pass::kTransfer && work.segment > 0 && first == end) return;

  int64_t state_row = work.sequence;
  if (p.state_indices != nullptr) {
    state_row = load_index(p.state_indices, p.state_indices_int64, work.sequence);
    if (state_row < 0 || state_row >= p.pool_rows) {  // padding: zeros out, the pool stays as it is
      if constexpr (kOutputs) {
        constexpr int kRowChunks = kWarpgroups * kSliceRows * 2 / 16;
        auto* out = static_cast<uint4*>(p.out);
        const int tokens = min(end * kChunk, seq.length) - first * kChunk;
        for (int i = threadIdx.x; i < tokens * kRowChunks; i += Threads::kBlock) {
          const int64_t token = int64_t(seq.batch) * p.tokens + seq.start + first * kChunk + i / kRowChunks;
          out[((token * p.value_heads + work.value_head) * kHeadDim + work.slice * kSliceRows) / 8 + i % kRowChunks] =
              uint4{};
        }
        if constexpr (kCheckpoints) clear_checkpoints<kWarpgroups>(p, work, seq, first, end);
        if (p.overlap) grid_wait();
      }
      return;
    }
  }

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&smem.tiles_full[stage], 1);
      mbarrier_init(&smem.tiles_empty[stage], 4 * kWarpgroups);
    }
    for (int slice = 0; slice < kWarpgroups; ++slice) {
      mbarrier_init(&smem.out_full[slice], 4);
      mbarrier_init(&smem.out_empty[slice], 1);
    }
    for (auto& barrier : smem.transfer_full) mbarrier_init(&barrier, 1);
    mbarrier_init_fence();
  }
  __syncthreads();

  if (warp >= 4 * kWarpgroups) {
    if constexpr (kWarpgroups == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    const int store_slice = warp - 4 * kWarpgroups - 1;
    if (store_slice >= 0) {
      // ================ Store warps: one lane hands each whole tile of outputs to the copy engine.
      if constexpr (kOutputs) {
        if (store_slice >= kWarpgroups || lane != 0) return;
        for (int chunk = first; chunk + 1 < end; ++chunk) {
          mbarrier_wait(&smem.out_full[store_slice], (chunk - first) & 1);
          store_tile(&maps.out, smem.out[store_slice], (work.slice + store_slice) * kSliceRows, work.value_head,
                     seq.start + chunk * kChunk, seq.batch);
          store_commit();
          store_wait_read();
          mbarrier_arrive(&smem.out_empty[store_slice]);
        }
        store_wait_all();
      }
      return;
    }
    // ================ Load warp: one lane fills the stages in order.
    if (kOutputs && work.segment > 1) named_barrier_sync(kTransfersDoneBarrier, Threads::kState + 32);
    if (work.identity) {  // M: v = 0, once and for all stages
      for (auto& stage : smem.stages) {
        auto* v = reinterpret_cast<uint4*>(stage.v);
        for (int i = lane; i < int(sizeof(stage.v) / 16); i += 32) v[i] = uint4{};
      }
      __syncwarp();  // lane 0's arrivals on the full barriers publish it
    }
    const int head = work.value_head / (p.value_heads / p.heads);
    int bytes = kPanels * kTileElements * 2 + int(kTileBytes) + int(sizeof(ChunkGates));
    if (!work.identity) bytes += kWarpgroups * kTileElements * 2;
    if (kOutputs) bytes += kPanels * kTileElements * 2 + int(kTileBytes);
    const int parts = item_parts(p.heads, p.value_heads);
    const int part = work.value_head % (p.value_heads / p.heads) / kItemHeads;
    const auto* counters = reinterpret_cast<const uint32_t*>(p.workspace + p.offsets.ready);
    int prepared = p.overlap ? first : end;  // chunks before this one are known to be prepared
    if (!p.overlap) grid_wait();
    for (int chunk = first; chunk < end; ++chunk) {
      const int index = (chunk - first) % kStages;
      const uint32_t round = (chunk - first) / kStages;
      auto& stage = smem.stages[index];
      uint64_t* full = &smem.tiles_full[index];
      const int token = seq.start + chunk * kChunk;
      const int64_t chunk_head = int64_t(seq.slot + chunk) * p.value_heads + work.value_head;
      // Wait until the state warpgroups have released the stage, then announce all bytes on its full barrier.
      mbarrier_wait(&smem.tiles_empty[index], (round + 1) & 1);  // at once in the first round
      if (lane == 0) {
        mbarrier_expect(full, bytes);
        for (int panel = 0; panel < kPanels; ++panel) {
          load_tile(stage.k[panel], &maps.k, panel * 64, head, token, seq.batch, full);
          if (kOutputs) load_tile(stage.q[panel], &maps.q, panel * 64, head, token, seq.batch, full);
        }
        if (!work.identity) {
          for (int slice = 0; slice < kWarpgroups; ++slice) {
            load_tile(stage.v[slice], &maps.v, (work.slice + slice) * kSliceRows, work.value_head, token, seq.batch,
                      full);
          }
        }
      }
      // A look at 32 counters takes as long as one at one: mostly the preparation is far ahead.
      while (prepared <= chunk) {
        const int64_t item = (int64_t(seq.slot + prepared + lane) * p.heads + head) * parts + part;
        const bool done = prepared + lane < end && load_acquire(counters + item) >= kItemReady;
        const uint32_t missing = ~__ballot_sync(0xffffffffu, done);
        prepared += missing == 0 ? 32 : __ffs(missing) - 1;
        __syncwarp();
        fence_async_proxy_all();
      }
      if (lane == 0) {
        load_bulk(&smem.gates[index], p.workspace + p.offsets.gates + chunk_head * sizeof(ChunkGates),
                  sizeof(ChunkGates), full);
        load_bulk(stage.inverse, p.workspace + p.offsets.inverse + chunk_head * kTileBytes, kTileBytes, full);
        if constexpr (kOutputs) {
          load_bulk(stage.scores, p.workspace + p.offsets.scores + chunk_head * kTileBytes, kTileBytes, full);
        }
      }
      __syncwarp();
    }
  } else {
    // ================ State warpgroups
    if constexpr (kWarpgroups == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int warpgroup = warp / 4;
    const int slice = work.slice + warpgroup;

    float s[64];             // S^T
    uint32_t s_operand[32];  // S^T rounded
    float x[32], y[32];      // S^T K^T, then u; S^T Q^T, then o
    uint32_t v[16];          // v^T, packed
    float beta_v[32];        // beta v^T
    float2 decay_k[8];
    uint32_t u_state[16], u_scores[16];
    float2 decay_q[8];

    // ---- The state that this segment starts from
    if (kPass == Pass::kTransfer && work.identity) {
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = slice * kSliceRows + fragment_row(i) == fragment_column(i) ? 1.f : 0.f;
    } else if (work.segment == 0 && !(kOutputs && p.segments > 1)) {
      if (p.initial.data != nullptr) {
        load_state(s, p.initial, state_row, work.value_head, slice);
      } else {
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] = 0.f;
      }
      // The scan's last segment may overwrite a pool's row before its first segment has started: hand over a copy.
      if constexpr (kPass == Pass::kTransfer) store_fragment(s, p.workspace + p.offsets.initial, sequence_head, slice);
    } else if (kPass == Pass::kTransfer) {
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = 0.f;
    } else {
      grid_wait();
      const int64_t cut = sequence_head * (p.segments - 1);
      if (work.segment == 0) {
        load_fragment(s, p.workspace + p.offsets.initial, sequence_head, slice);
      } else {
        load_fragment(s, p.workspace + p.offsets.offsets, cut, slice);
      }
      // S <- M_j S + N_j for the segments in between that have chunks (a short sequence does not fill all); M_j is a B
      // operand of 128 rows in the stage's K and Q.
      const int transfers = min(work.segment, per_segment > 0 ? (seq.chunks() + per_segment - 1) / per_segment : 0);
      auto fetch = [&](int j) {
        if (threadIdx.x == 0 && j < transfers) {
          mbarrier_expect(&smem.transfer_full[j & 1], kTransferBytes);
          load_bulk(smem.stages[j & 1].k, p.workspace + p.offsets.transfers + (cut + j) * kTransferBytes,
                    kTransferBytes, &smem.transfer_full[j & 1]);
        }
      };
      fetch(1);
      for (int j = 1; j < transfers; ++j) {
        fetch(j + 1);
#pragma unroll
        for (int i = 0; i < 32; ++i) s_operand[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
        load_fragment(s, p.workspace + p.offsets.offsets, cut + j, slice);
        mbarrier_wait(&smem.transfer_full[j & 1], (j - 1) / 2 & 1);
        const uint64_t transfer = smem_descriptor(smem_address(smem.stages[j & 1].k), kTransferBytes / 2, 1024);
        tie(s);
        tie(s_operand);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 8; ++step) wgmma_64x128<T>(s, s_operand + 4 * step, transfer + 128 * step);
        wgmma_commit();
        wgmma_wait<0>();
        tie(s);
        named_barrier_sync(kStateBarrier, Threads::kState);  // the buffer may be filled again
      }
      if (work.segment > 1) named_barrier_sync(kTransfersDoneBarrier, Threads::kState + 32);
    }

    tie(s);  // a constant start would make ptxas insert waits

    // ---- One chunk, in pieces
    const uint32_t matrix_row = lane / 16 * 8 + lane % 8;
    const uint32_t matrix_offset = matrix_row * 128 + ((warp % 4 * 2 + lane / 8 % 2) ^ (lane & 7)) * 16;
    const int t2 = lane % 4 * 2;

    auto load_gates = [&](float2(&to)[8], const float* from) {
#pragma unroll
      for (int n = 0; n < 8; ++n) to[n] = load_shared2(from + 8 * n + t2);
    };
    // What r takes besides x.
    auto multiply_v = [&](int stage) {
      const ChunkGates& gates = smem.gates[stage];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 beta = load_shared2(gates.beta + 8 * n + t2);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 value = unpack2<T>(v[2 * n + i]);
          beta_v[4 * n + 2 * i] = beta.x * value.x;
          beta_v[4 * n + 2 * i + 1] = beta.y * value.y;
        }
      }
      load_gates(decay_k, gates.decay_k);
    };
    auto load_v = [&](int stage) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        load_matrix_transposed(v + 4 * step,
                               smem_address(smem.stages[stage].v[warpgroup]) + matrix_offset + step * 2048);
      }
      if constexpr (kAhead) {
        multiply_v(stage);
        tie(beta_v);
      }
    };
    auto round_state = [&] {
#pragma unroll
      for (int i = 0; i < 32; ++i) s_operand[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
    };
    auto decay_state = [&](float decay) {
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] *= decay;
      tie(s);
    };
    auto multiply_k = [&](int stage) {
      const uint64_t k = smem_descriptor(smem_address(smem.stages[stage].k), 16, 1024);
      tie(x);
      tie(s_operand);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        wgmma_64x64<T>(x, s_operand + 4 * step, k + step / 4 * 512 + step % 4 * 2, step > 0);
      }
      wgmma_commit();
    };
    auto multiply_q = [&](int stage) {
      const uint64_t q = smem_descriptor(smem_address(smem.stages[stage].q), 16, 1024);
      tie(y);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        wgmma_64x64<T>(y, s_operand + 4 * step, q + step / 4 * 512 + step % 4 * 2, step > 0);
      }
      wgmma_commit();
    };
    // x (and y) in flight on entry; on exit u is packed and nothing is in flight. `meanwhile` runs under the product.
    auto solve = [&](int stage, auto meanwhile) {
      const ChunkGates& gates = smem.gates[stage];
      [[maybe_unused]] const float decay_chunk = gates.decay_chunk[0];
      float2 decay_u[8];
      if constexpr (!kAhead) multiply_v(stage);
      wgmma_wait<kOutputs ? 1 : 0>();
      tie(x);
      uint32_t r[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        x[2 * i] = fmaf(-decay_k[i / 2].x, x[2 * i], beta_v[2 * i]);
        x[2 * i + 1] = fmaf(-decay_k[i / 2].y, x[2 * i + 1], beta_v[2 * i + 1]);
        r[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
      }
      const uint64_t inverse = smem_descriptor(smem_address(smem.stages[stage].inverse), 16, 1024);
      tie(r);
      tie(x);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) wgmma_64x64<T>(x, r + 4 * step, inverse + 2 * step, true);
      wgmma_commit();
      meanwhile();
      if constexpr (!kCheckpoints) decay_state(decay_chunk);  // S^T itself is no operand in flight
      load_gates(decay_u, gates.decay_u);
      if constexpr (kOutputs && kAhead) load_gates(decay_q, gates.decay_q);
      wgmma_wait<0>();
      tie(x);
      tie(r);
      tie(y);
      tie(s_operand);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        u_state[i] = pack2<T>(x[2 * i] * decay_u[i / 2].x, x[2 * i + 1] * decay_u[i / 2].y);
        if constexpr (kOutputs) u_scores[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
      }
    };
    auto update_state = [&](int stage) {
      const uint64_t k = smem_descriptor(smem_address(smem.stages[stage].k), kTileBytes, 1024);
      tie(u_state);
      tie(s);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) wgmma_64x128<T>(s, u_state + 4 * step, k + 128 * step);
      wgmma_commit();
    };
    auto finish_outputs = [&](int stage) {
      const uint64_t scores = smem_descriptor(smem_address(smem.stages[stage].scores), 16, 1024);
      if constexpr (!kAhead) load_gates(decay_q, smem.gates[stage].decay_q);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          y[4 * n + 2 * i] *= decay_q[n].x;
          y[4 * n + 2 * i + 1] *= decay_q[n].y;
        }
      }
      tie(u_scores);
      tie(y);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) wgmma_64x64<T>(y, u_scores + 4 * step, scores + 2 * step, true);
      wgmma_commit();
    };
    const uint32_t out_buffer = smem_address(smem.out[warpgroup]);
    auto stage_outputs = [&](const uint32_t (&packed)[16]) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        store_matrix_transposed(out_buffer + matrix_offset + step * 2048, packed + 4 * step);
      }
    };
    // Tokens past the sequence's end belong to the next one: nothing of theirs may be multiplied, not even by zero.
    auto clear_tail = [&](int stage, int chunk) {
      const int live = seq.length - chunk * kChunk;
      if (live >= kChunk) return;
      constexpr int kClearPanels = kPanels / kWarpgroups;
      auto* k = reinterpret_cast<uint4*>(smem.stages[stage].k[warpgroup * kClearPanels]);
      auto* tile = reinterpret_cast<uint4*>(smem.stages[stage].v[warpgroup]);
      for (int i = live * 8 + threadIdx.x % 128; i < kChunk * 8; i += 128) {
        for (int panel = 0; panel < kClearPanels; ++panel) k[panel * kTileElements / 8 + i] = uint4{};
        tile[i] = uint4{};
      }
      fence_async_proxy();
      named_barrier_sync(kStateBarrier, Threads::kState);
    };
    auto store_checkpoint = [&](int chunks_done, int64_t row) {
      store_state(s, p.checkpoints, row + chunks_done / p.checkpoint_chunks - 1, work.value_head, slice);
    };
    int64_t checkpoint_row = 0;
    if constexpr (kCheckpoints) checkpoint_row = checkpoints_before(p, work.sequence);

    // ---- The walk
    if (first < end) {
      mbarrier_wait(&smem.tiles_full[0], 0);
      clear_tail(0, first);
      load_v(0);
      round_state();
      multiply_k(0);
      if constexpr (kOutputs) multiply_q(0);
      solve(0, [] {});
      int stage = 0;
      uint32_t parity = 0;
#pragma unroll 1
      for (int chunk = first; chunk + 1 < end; ++chunk) {
        // Nothing is in flight. Wait for the next chunk's tiles, and until the last outputs have left shared memory.
        const int current = stage;
        if (++stage == kStages) {
          stage = 0;
          parity ^= 1;
        }
        mbarrier_wait(&smem.tiles_full[stage], parity);
        if constexpr (kOutputs) mbarrier_wait(&smem.out_empty[warpgroup], ~(chunk - first) & 1);
        clear_tail(stage, chunk + 1);
        if constexpr (kCheckpoints) {
          if (chunk > first && chunk % p.checkpoint_chunks == 0) store_checkpoint(chunk, checkpoint_row);
          decay_state(smem.gates[current].decay_chunk[0]);
        }
        // State and outputs of this chunk; meanwhile v of the next.
        update_state(current);
        if constexpr (kOutputs) finish_outputs(current);
        load_v(stage);
        // The state is done first: round it and start the next chunk's x.
        wgmma_wait<kOutputs ? 1 : 0>();
        tie(s);
        tie(u_state);
        round_state();
        multiply_k(stage);
        if constexpr (kOutputs) {
          // The outputs are done: start the next chunk's y behind x, hand the outputs to the copy engine.
          wgmma_wait<1>();
          tie(y);
          tie(u_scores);
          uint32_t packed[16];
#pragma unroll
          for (int i = 0; i < 16; ++i) packed[i] = pack2<T>(y[2 * i], y[2 * i + 1]);
          tie(packed);
          multiply_q(stage);
          stage_outputs(packed);
        }
        // All reads of this chunk's tiles are over: release its stage.
        mbarrier_arrive_if(&smem.tiles_empty[current], lane == 0);
        solve(stage, [&] {
          if constexpr (kOutputs) {
            fence_async_proxy();
            __syncwarp();
            mbarrier_arrive_if(&smem.out_full[warpgroup], lane == 0);
          }
        });
      }

      // ---- The last chunk: its outputs are stored row by row, since a whole tile would run into the next sequence.
      if constexpr (kCheckpoints) {
        if (end - 1 > first && (end - 1) % p.checkpoint_chunks == 0) store_checkpoint(end - 1, checkpoint_row);
        decay_state(smem.gates[stage].decay_chunk[0]);
      }
      update_state(stage);
      if constexpr (kOutputs) finish_outputs(stage);
      wgmma_wait<0>();
      tie(s);
      if constexpr (kOutputs) {
        tie(y);
        uint32_t packed[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) packed[i] = pack2<T>(y[2 * i], y[2 * i + 1]);
        mbarrier_wait(&smem.out_empty[warpgroup], ~(end - 1 - first) & 1);
        stage_outputs(packed);
        named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);
        const int live = min(kChunk, seq.length - (end - 1) * kChunk);
        const int64_t token = int64_t(seq.batch) * p.tokens + seq.start + (end - 1) * kChunk;
        auto* out = static_cast<T*>(p.out) + (token * p.value_heads + work.value_head) * kHeadDim + slice * kSliceRows;
        for (int i = threadIdx.x % 128; i < live * 8; i += 128) {
          const int row = i / 8, column = i % 8;
          uint4 value;
          asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                       : "r"(out_buffer + row * 128 + (column ^ (row & 7)) * 16));
          reinterpret_cast<uint4*>(out + int64_t(row) * p.value_heads * kHeadDim)[column] = value;
        }
        if constexpr (kCheckpoints) {
          if (end % p.checkpoint_chunks == 0 && end * kChunk <= seq.length) store_checkpoint(end, checkpoint_row);
        }
      }
    }

    // ---- The state that this segment leaves behind
    if constexpr (kOutputs) {
      // The grid ends after the preparation: what that has cleared is clear for whoever comes next.
      if (p.overlap) grid_wait();
      if (p.final.data != nullptr && work.segment == p.segments - 1) {
        store_state(s, p.final, state_row, work.value_head, slice);
      }
    } else {
      const int64_t cut = sequence_head * (p.segments - 1) + work.segment;
      if (!work.identity) {
        store_fragment(s, p.workspace + p.offsets.offsets, cut, slice);
      } else {
        // S^T after a scan from the identity is M^T: row j is the reduction index of the product that applies it.
        unsigned char* tile = p.workspace + p.offsets.transfers + cut * kTransferBytes;
#pragma unroll
        for (int i = 0; i < 64; i += 2) {
          const int row = slice * kSliceRows + fragment_row(i), column = fragment_column(i);
          const int at = column / 64 * int(kTransferBytes / 2) + row * 128 + ((column / 8 % 8) ^ (row & 7)) * 16;
          *reinterpret_cast<uint32_t*>(tile + at + column % 8 * 2) = pack2<T>(s[i], s[i + 1]);
        }
      }
    }
  }
}

using ScanKernel = void (*)(Problem, ScanMaps);
struct ScanKernels {
  ScanKernel transfer, outputs_1, outputs_2, checkpoints_1, checkpoints_2;
};

template <class T>
void launch_scan(const Problem& p, int warpgroups, const ScanMaps& maps, cudaStream_t stream,
                 const ScanKernels& kernels) {
  const int heads = p.sequences * p.value_heads;
  if (p.segments > 1) {
    launch(kernels.transfer, heads * (2 * p.segments - 3), ScanThreads<2>::kBlock, sizeof(ScanMemory<T, 2>),
           /*overlap=*/true, stream, p, maps);
  }
  if (warpgroups == 1) {
    launch(p.checkpoint_chunks ? kernels.checkpoints_1 : kernels.outputs_1, heads * p.segments * 2,
           ScanThreads<1>::kBlock, sizeof(ScanMemory<T, 1>), /*overlap=*/true, stream, p, maps);
  } else {
    launch(p.checkpoint_chunks ? kernels.checkpoints_2 : kernels.outputs_2, heads * p.segments, ScanThreads<2>::kBlock,
           sizeof(ScanMemory<T, 2>), /*overlap=*/true, stream, p, maps);
  }
}

}  // namespace atrex::chunk_gdn
