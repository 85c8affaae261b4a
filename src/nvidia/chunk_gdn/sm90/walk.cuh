// A state warpgroup's part of the scan: one work item, chunk after chunk.
//
// It owns 64 value rows of S^T [128 v x 128 k] as float32 accumulators. Rounded to 16 bits in place, accumulators have
// the layout of wgmma's A operand, so all five products of a chunk take A from registers and only B (K, Q, the
// inverse, the scores) from shared memory:
//   x = S^T K^T        r = beta v - decay_k x       u = r + r X^T       (X: strictly lower inverse)
//   y = S^T Q^T        o = decay_q y + u P^T
//   S^T <- decay_chunk S^T + (decay_u u) K
//
// No branch may stand between a wgmma and the wait whose result is read (ptxas would serialise every wgmma): an
// iteration has one place with nothing, or y alone, in flight, its top, and all branching happens there. So no wait on
// an mbarrier, which is a loop, stands in an iteration: other warps wait for copies and tell it at named barriers.
#pragma once

#include "scan_memory.cuh"
#include "states.cuh"

namespace atrex::chunk_gdn {

template <class T, int kWarpgroups, Pass kPass>
__device__ __forceinline__ void walk(const Problem& p, ScanMemory<T, kWarpgroups>& smem, const Work& work,
                                     const Span& span, int warp, Ring& stage) {
  constexpr bool kOutputs = kPass != Pass::kTransfer;
  constexpr bool kCheckpoints = kPass == Pass::kOutputsAndCheckpoints;
  constexpr int kState = 128 * kWarpgroups;
  // Whether the wait for y stands at the top of the next iteration: ptxas moves a wait up to the one before it, in
  // front of u's arithmetic, which is to run under y, but not across the loop's edge. That takes registers.
  constexpr bool kYOverEdge = kPass == Pass::kOutputs && kWarpgroups == 1;
  const int lane = threadIdx.x % 32;
  const int first = span.first, end = span.end;
  const Sequence& seq = span.sequence;
  const int warpgroup = warp / 4;
  const int slice = work.slice + warpgroup;
  const int64_t sequence_head = int64_t(work.sequence) * p.value_heads + work.value_head;

  float s[64];             // S^T
  uint32_t s_operand[32];  // S^T rounded
  float x[32], y[32];      // S^T K^T, then u; S^T Q^T, then o
  uint32_t v[16];          // v^T, packed
  float beta_v[32];        // beta v^T
  float2 decay_k[8];
  uint32_t u_state[16], u_scores[16];

  // ---- The state that this segment starts from
  if (kPass == Pass::kTransfer && work.identity) {
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = slice * kSliceRows + fragment_row(i) == fragment_column(i) ? 1.f : 0.f;
  } else if (work.segment == 0 && !(kOutputs && p.segments > 1)) {
    if (p.initial.data != nullptr) {
      load_state(s, p.initial, span.state_row, work.value_head, slice);
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
    const int per_segment = (seq.chunks() + p.segments - 1) / p.segments;
    const int transfers = min(work.segment, per_segment > 0 ? (seq.chunks() + per_segment - 1) / per_segment : 0);
    auto fetch = [&](int j) {
      if (threadIdx.x == 0 && j < transfers) {
        mbarrier_expect(&smem.transfer_full[j & 1], kTransferBytes);
        load_bulk(smem.stages[j & 1].k, p.workspace + p.offsets.transfers + (cut + j) * kTransferBytes, kTransferBytes,
                  &smem.transfer_full[j & 1]);
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
      named_barrier_sync(kStateBarrier, kState);  // the buffer may be filled again
    }
    if (work.segment > 1) named_barrier_sync(kTransfersDoneBarrier, kState + 32);
  }

  tie(s);  // a constant start would make ptxas insert waits

  // ---- One chunk, in pieces
  const uint32_t matrix_row = lane / 16 * 8 + lane % 8;
  const uint32_t matrix_offset = matrix_row * 128 + ((warp % 4 * 2 + lane / 8 % 2) ^ (lane & 7)) * 16;

  auto load_gate_piece = [&](float2(&to)[8], const float* from, int piece) {
    const float4 values = load_shared4(from + 16 * piece + lane % 4 * 4);
    to[2 * piece] = {values.x, values.y};
    to[2 * piece + 1] = {values.z, values.w};
  };
  auto load_gates = [&](float2(&to)[8], const float* from) {
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) load_gate_piece(to, from, piece);
  };
  auto load_v = [&](int stage) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      load_matrix_transposed(v + 4 * step, smem_address(smem.stages[stage].v[warpgroup]) + matrix_offset + step * 2048);
    }
  };
  // What r takes besides x.
  auto multiply_v = [&](int stage) {
    float2 beta[8];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i % 4 == 0) load_gate_piece(beta, smem.tiles[stage].gates.beta, i / 4);
      const float2 value = unpack2<T>(v[i]);
      beta_v[2 * i] = beta[i / 2].x * value.x;
      beta_v[2 * i + 1] = beta[i / 2].y * value.y;
    }
    load_gates(decay_k, smem.tiles[stage].gates.decay_k);
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
  auto finish_y = [&] {
    wgmma_wait<0>();
    tie(y);
    tie(s_operand);
  };
  // x in flight on entry; on exit u is packed and y, at most, in flight.
  auto solve = [&](int stage) {
    const ChunkGates& gates = smem.tiles[stage].gates;
    float2 decay_u[8];
    wgmma_wait<0>();
    tie(x);
    uint32_t r[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[2 * i] = fmaf(-decay_k[i / 2].x, x[2 * i], beta_v[2 * i]);
      x[2 * i + 1] = fmaf(-decay_k[i / 2].y, x[2 * i + 1], beta_v[2 * i + 1]);
      r[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
    }
    tie(r);
    tie(x);
    wgmma_fence();
    wgmma_triangular<T>(x, r, smem.tiles[stage].inverse);
    wgmma_commit();
    if constexpr (kOutputs) multiply_q(stage);
    hold_loads();
    if constexpr (!kOutputs) load_gates(decay_u, gates.decay_u);
    if constexpr (!kCheckpoints) decay_state(gates.decay_chunk[0]);  // S^T itself is no operand in flight
    wgmma_wait<kOutputs ? 1 : 0>();
    tie(x);
    tie(r);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (kOutputs && i % 4 == 0) load_gate_piece(decay_u, gates.decay_u, i / 4);
      u_state[i] = pack2<T>(x[2 * i] * decay_u[i / 2].x, x[2 * i + 1] * decay_u[i / 2].y);
    }
    tie(u_state);
    if constexpr (kOutputs && !kYOverEdge) finish_y();
  };
  auto update_state = [&](int stage) {
    const uint64_t k = smem_descriptor(smem_address(smem.stages[stage].k), kTileElements * 2, 1024);
    tie(u_state);
    tie(s);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) wgmma_64x128<T>(s, u_state + 4 * step, k + 128 * step);
    wgmma_commit();
  };
  auto finish_outputs = [&](int stage) {
    float2 decay_q[8];
    hold_loads();
    load_gates(decay_q, smem.tiles[stage].gates.decay_q);
#pragma unroll
    for (int i = 0; i < 16; ++i) u_scores[i] = pack2<T>(x[2 * i], x[2 * i + 1]);
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
    wgmma_triangular<T>(y, u_scores, smem.tiles[stage].scores);
    wgmma_commit();
  };
  const uint32_t out_buffer = smem_address(smem.out[warpgroup]);
  auto stage_outputs = [&](int chunk) {
    uint32_t packed[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) packed[i] = pack2<T>(y[2 * i], y[2 * i + 1]);
    tie(packed);
    // Until the last outputs have left shared memory.
    named_barrier_sync_if(kOutEmptyBarrier + warpgroup, 128 + 32, chunk > first);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      store_matrix_transposed(out_buffer + matrix_offset + step * 2048, packed + 4 * step);
    }
  };
  auto store_checkpoint = [&](int chunks_done, int64_t row) {
    store_state(s, p.checkpoints, row + chunks_done / p.checkpoint_chunks - 1, work.value_head, slice);
  };
  int64_t checkpoint_row = 0;
  if constexpr (kCheckpoints) checkpoint_row = checkpoints_before(p, work.sequence);

  // Until the chunk's tiles are there, and what was prepared of it.
  auto wait_tiles = [&] { named_barrier_sync(kTilesBarrier + stage.index * kWarpgroups + warpgroup, 128 + 32); };
  auto release = [&](int stage) { mbarrier_arrive_if(&smem.tiles_empty[stage], lane < kReleasingLanes); };

  // ---- The walk
  if (first < end) {
    wait_tiles();
    load_v(stage.index);
    multiply_v(stage.index);
    round_state();
    multiply_k(stage.index);
    solve(stage.index);
#pragma unroll 1
    for (int chunk = first; chunk + 1 < end; ++chunk) {
      if constexpr (kYOverEdge) finish_y();
      const int current = stage.index;
      stage.advance();
      if constexpr (kCheckpoints) {
        if (chunk > first && chunk % p.checkpoint_chunks == 0) store_checkpoint(chunk, checkpoint_row);
        decay_state(smem.tiles[current].gates.decay_chunk[0]);
      }
      // State and outputs of this chunk; in the transfer pass, meanwhile, v of the next.
      update_state(current);
      if constexpr (kOutputs) {
        finish_outputs(current);
      } else {
        wait_tiles();
        load_v(stage.index);
      }
      // The state is done first: round it and start the next chunk's x. Under that, what y and v ask for.
      wgmma_wait<kOutputs ? 1 : 0>();
      tie(s);
      tie(u_state);
      round_state();
      if constexpr (kOutputs) wait_tiles();
      multiply_k(stage.index);
      if constexpr (kOutputs) {
        wgmma_wait<1>();
        tie(y);
        tie(u_scores);
        stage_outputs(chunk);
        __syncwarp();
        mbarrier_arrive_if(&smem.out_full[warpgroup], lane == 0);
        load_v(stage.index);
      }
      // All reads of this chunk's tiles are over: release its stage.
      release(current);
      multiply_v(stage.index);
      solve(stage.index);
    }

    // ---- The last chunk: its outputs are stored row by row, since a whole tile would run into the next sequence.
    if constexpr (kYOverEdge) finish_y();
    if constexpr (kCheckpoints) {
      if (end - 1 > first && (end - 1) % p.checkpoint_chunks == 0) store_checkpoint(end - 1, checkpoint_row);
      decay_state(smem.tiles[stage.index].gates.decay_chunk[0]);
    }
    update_state(stage.index);
    if constexpr (kOutputs) finish_outputs(stage.index);
    wgmma_wait<0>();
    tie(s);
    release(stage.index);
    stage.advance();
    if constexpr (kOutputs) {
      tie(y);
      stage_outputs(end - 1);
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
      named_barrier_sync(kWarpgroupBarrier + warpgroup, 128);  // the next outputs may be written there
      if constexpr (kCheckpoints) {
        if (end % p.checkpoint_chunks == 0 && end * kChunk <= seq.length) store_checkpoint(end, checkpoint_row);
      }
    }
  }

  // ---- The state that this segment leaves behind
  if constexpr (kOutputs) {
    if (p.final.data != nullptr && work.segment == p.segments - 1) {
      store_state(s, p.final, span.state_row, work.value_head, slice);
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

}  // namespace atrex::chunk_gdn
