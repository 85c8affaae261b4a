// The serial pass: walks the chunks of a sequence with the state in registers.
//
// A warp owns 16 value rows of S^T [128 v x 128 k] as float32 accumulators and needs nothing of other warps. Rounded to
// 16 bits in place, accumulators are A fragments, so all five products of a chunk take A from registers and only B (K,
// Q, the inverse, the scores) from shared memory:
//   x = S^T K^T        r = beta v - decay_k x       u = r + r X^T       (X: strictly lower inverse)
//   y = S^T Q^T        o = decay_q y + u P^T
//   S^T <- decay_chunk S^T + (decay_u u) K
// v and o go between registers and memory without shared memory. The warps of a block share the tiles of a chunk, two
// chunks in turn: all of them copy the next chunk's while they compute.
//
// Context parallelism cuts a sequence into segments. The transfer pass finds, for every segment but the last, what it
// does to a state, S_out = M S_in + N: N by a scan from zero (segment 0: from the initial state), M by a scan from the
// identity with v = 0. The scan then starts every segment at its own state, so the result is the serial one.
#pragma once

#include "launch.h"
#include "ptx.cuh"
#include "sequence.cuh"
#include "states.cuh"
#include "tile.cuh"

namespace atrex::chunk_gdn {

enum class Pass { kOutputs, kTransfer };

// Shared memory of one chunk, and of a block.
template <Pass kPass>
struct alignas(128) Stage {
  unsigned char k[kTileBytes];
  unsigned char q[kTileBytes];
  Prepared prepared;
};
template <>
struct alignas(128) Stage<Pass::kTransfer> {  // neither Q nor scores
  unsigned char k[kTileBytes];
  unsigned char prepared[offsetof(Prepared, scores)];
};
inline constexpr int kStages = 2;
template <Pass kPass>
inline constexpr int kScanBytes = kStages * sizeof(Stage<kPass>);
static_assert(kScanBytes<Pass::kOutputs> <= kMaxSharedBytes, "a block of sm_120 has 99 KB of shared memory");
static_assert(2 * (kScanBytes<Pass::kTransfer> + 1024) <= 100 * 1024, "two blocks of the transfer pass fit");

// What one block works on.
struct Work {
  int sequence, value_head, segment, slice;  // slice: the block's first
  bool identity;                             // transfer pass: M, not N
};

template <int kWarps, Pass kPass>
__device__ __forceinline__ Work work_of_block(const Problem& p) {
  constexpr int kBlocks = kSlices / kWarps;
  int rest = blockIdx.x;
  const int slice = rest % kBlocks * kWarps;
  rest /= kBlocks;
  int segment;
  bool identity = false;
  if constexpr (kPass == Pass::kTransfer) {
    const int items = 2 * p.segments - 3;  // N of segment 0, then N and M of segments 1 ..
    const int item = rest % items + 1;
    rest /= items;
    segment = item / 2;
    identity = item != 1 && item % 2 == 1;
  } else {
    segment = rest % p.segments;
    rest /= p.segments;
  }
  return {rest / p.value_heads, rest % p.value_heads, segment, slice, identity};
}

// A padding sequence: zeros for its outputs and for its checkpoints, which have rows like any other's.
template <int kWarps>
__device__ __forceinline__ void clear_padding(const Problem& p, const Work& work, const Sequence& seq, int first,
                                              int end) {
  constexpr int kRowPieces = kWarps * kSliceRows * 2 / 16;
  auto* out = static_cast<uint4*>(p.out);
  const int tokens = min(end * kChunk, seq.length) - first * kChunk;
  for (int i = threadIdx.x; i < tokens * kRowPieces; i += kWarps * 32) {
    const int64_t token = int64_t(seq.batch) * p.tokens + seq.start + first * kChunk + i / kRowPieces;
    out[((token * p.value_heads + work.value_head) * kHeadDim + work.slice * kSliceRows) / 8 + i % kRowPieces] =
        uint4{};
  }
  if (p.checkpoint_chunks) {
    const int row = checkpoints_before(p, work.sequence);
    const int last = min(end, seq.length / kChunk) / p.checkpoint_chunks;
    const float zeros[64] = {};
    for (int i = first / p.checkpoint_chunks; i < last; ++i) {
      store_state(zeros, p.checkpoints, row + i, work.value_head, work.slice + threadIdx.x / 32);
    }
  }
}

template <class T>
__device__ __forceinline__ void round_state(uint32_t (&operand)[32], const float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) operand[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
}

// d[16 rows x 64 tokens] += S^T tile^T. `between(step)` is work for the time that the tensor unit takes for a step.
inline constexpr int kStateSteps = kHeadDim / 16;
template <class T, class Between>
__device__ __forceinline__ void multiply_state(float (&d)[32], const uint32_t (&operand)[32], uint32_t tile,
                                               const BlockAddress& block, Between between) {
#pragma unroll
  for (int step = 0; step < kStateSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t b[4];
      load_matrix(b, block(tile, i, step));
      mma<T>(d + 8 * i, operand + 4 * step, b[0], b[1]);
      mma<T>(d + 8 * i + 4, operand + 4 * step, b[2], b[3]);
    }
    between(step);
  }
}

// d[16 rows x 64 tokens] += a[16 x 64] m^T, with m lower triangular as Prepared has it.
template <class T>
__device__ __forceinline__ void multiply_lower(float (&d)[32], const uint32_t (&a)[16], const uint4* m) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = step; i < 4; ++i) {
      const uint4 b = m[(i * (i + 1) / 2 + step) * 32 + threadIdx.x % 32];
      mma<T>(d + 8 * i, a + 4 * step, b.x, b.y);
      mma<T>(d + 8 * i + 4, a + 4 * step, b.z, b.w);
    }
  }
}

// ---- The kernel's body --------------------------------------------------------------------------------------------

template <class T, int kWarps, Pass kPass>
__device__ __forceinline__ void scan(const Problem& p) {
  constexpr bool kOutputs = kPass == Pass::kOutputs;
  constexpr int kThreads = kWarps * 32;
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto* stages = reinterpret_cast<Stage<kPass>*>(dynamic_smem);
  const int lane = threadIdx.x % 32, group = lane / 4, t = lane % 4;

  const Work work = work_of_block<kWarps, kPass>(p);
  const Sequence seq = sequence_at(p, work.sequence);
  const int slice = work.slice + threadIdx.x / 32;
  const int per_segment = (seq.chunks() + p.segments - 1) / p.segments;
  const int first = min(work.segment * per_segment, seq.chunks());
  const int end = min(first + per_segment, seq.chunks());
  const int64_t sequence_head = int64_t(work.sequence) * p.value_heads + work.value_head;
  const int64_t first_cut = sequence_head * (p.segments - 1);

  int64_t state_row = work.sequence;
  if (p.state_indices != nullptr) {
    state_row = load_index(p.state_indices, p.state_indices_int64, work.sequence);
    if (state_row < 0 || state_row >= p.pool_rows) {  // padding: the pool stays as it is
      grid_wait();
      if constexpr (kOutputs) clear_padding<kWarps>(p, work, seq, first, end);
      return;
    }
  }

  // ---- The state that this segment starts from
  float s[64];             // S^T
  uint32_t s_operand[32];  // S^T rounded
  if (kPass == Pass::kTransfer && work.identity) {
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = slice * kSliceRows + fragment_row(i) == fragment_column(i) ? 1.f : 0.f;
  } else if (work.segment == 0 && !(kOutputs && p.segments > 1) && p.initial.data != nullptr) {
    load_state(s, p.initial, state_row, work.value_head, slice);
  } else {
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = 0.f;
  }
  // In every block, also where nothing is left to do: who waits for this grid relies on all before it.
  grid_wait();
  if constexpr (kPass == Pass::kTransfer) {
    // The scan's last segment may overwrite a pool's row before its first segment has started: hand over a copy.
    if (work.segment == 0) store_fragment(s, p.workspace + p.offsets.initial, sequence_head, slice);
    // A segment without chunks transfers nothing; of segment 0 the scan wants the initial state.
    if (work.segment > 0 && first == end) return;
  } else if (p.segments > 1) {
    if (work.segment == 0) {
      load_fragment(s, p.workspace + p.offsets.initial, sequence_head, slice);
    } else {
      load_fragment(s, p.workspace + p.offsets.offsets, first_cut, slice);
    }
    // S <- M_j S + N_j for the segments in between that have chunks: a short sequence does not fill all.
    const int transfers = min(work.segment, per_segment > 0 ? (seq.chunks() + per_segment - 1) / per_segment : 0);
    for (int j = 1; j < transfers; ++j) {
      round_state<T>(s_operand, s);
      load_fragment(s, p.workspace + p.offsets.offsets, first_cut + j, slice);
      apply_transfer<T>(s, s_operand, p.workspace + p.offsets.transfers, first_cut + j);
    }
  }

  // ---- One chunk, in pieces
  const BlockAddress by_rows = BlockAddress::by_rows(), by_columns = BlockAddress::by_columns();
  const int head = work.value_head / (p.value_heads / p.heads);
  const int64_t token_stride = int64_t(p.value_heads) * kHeadDim;
  // A lane's places in v, of the chunk to be loaded, and in the outputs, of the chunk at work.
  const int64_t first_token = seq.start + first * kChunk + group;
  const auto* v_from = static_cast<const T*>(p.v.data) + seq.batch * p.v.stride_b + first_token * p.v.stride_t +
                       work.value_head * p.v.stride_h + slice * kSliceRows + 4 * t;
  auto* out_to = static_cast<T*>(p.out) + (int64_t(seq.batch) * p.tokens + first_token) * token_stride +
                 work.value_head * kHeadDim + slice * kSliceRows + 4 * t;

  // The copies of a chunk's tiles into a stage, for the chunk `end` of nothing: without branches, so that the compiler
  // can spread them over the matrix products around.
  using Copy = TileCopy<kThreads>;
  auto live_tokens = [&](int chunk) { return chunk < end ? seq.length - chunk * kChunk : 0; };
  auto copy = [&](const void* tile, const Activation& x, int chunk) {
    return Copy(smem_address(tile), x, seq.batch, seq.start + chunk * kChunk, head, live_tokens(chunk));
  };
  constexpr int kPreparedQuads = sizeof(Stage<kPass>::prepared) / 16;
  constexpr int kPreparedPasses = (kPreparedQuads + kThreads - 1) / kThreads;
  static_assert(kPreparedPasses <= kStateSteps, "one pass a step");
  auto copy_prepared = [&](Stage<kPass>& stage, int chunk, int pass) {
    const auto* from = reinterpret_cast<const uint4*>(p.prepared(seq.slot + chunk, work.value_head));
    const int at = pass * kThreads + int(threadIdx.x);
    if (at < kPreparedQuads) copy_async_or_clear(smem_address(&stage.prepared) + at * 16, from + at, chunk < end);
  };
  // The four values that a lane has of tokens 8 n + group; zeros past the sequence's end: those tokens belong to the
  // next one, and nothing of theirs may be multiplied, not even by zero.
  uint2 v[8];
  auto load_v = [&](int chunk) {
    const int live = work.identity ? 0 : live_tokens(chunk);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      v[n] = load_pair_if(v_from, 8 * n + group < live);
      v_from += 8 * p.v.stride_t;
    }
  };

  // ---- The walk
  if (first < end) {
    auto& stage = stages[first & 1];
    copy(stage.k, p.k, first).all();
    if constexpr (kOutputs) copy(stage.q, p.q, first).all();
#pragma unroll
    for (int pass = 0; pass < kPreparedPasses; ++pass) copy_prepared(stage, first, pass);
    load_v(first);
  }
#pragma unroll 1
  for (int chunk = first; chunk < end; ++chunk) {
    // This chunk's tiles are there, and all warps are done with those of the chunk before: fill their place.
    copy_wait();
    __syncthreads();
    const Stage<kPass>& stage = stages[chunk & 1];
    const auto& prepared = reinterpret_cast<const Prepared&>(stage.prepared);
    const ChunkGates& gates = prepared.gates;
    auto pair = [&](const float* of_tokens, int n) {
      return *reinterpret_cast<const float2*>(of_tokens + 8 * n + 2 * t);
    };

    float x[32] = {};  // S^T K^T, then r, then u
    round_state<T>(s_operand, s);
    auto& next_stage = stages[~chunk & 1];
    constexpr int kStepsAPass = kStateSteps / Copy::kPasses;
    auto next_k = copy(next_stage.k, p.k, chunk + 1);
    [[maybe_unused]] auto next_q = next_k;
    if constexpr (kOutputs) next_q = copy(next_stage.q, p.q, chunk + 1);
    multiply_state<T>(x, s_operand, smem_address(stage.k), by_rows, [&](int step) {
      if (step < kPreparedPasses) copy_prepared(next_stage, chunk + 1, step);
      if (step % kStepsAPass == 0) {
        next_k.pass();
        if constexpr (kOutputs) next_q.pass();
      }
    });
    const float decay_chunk = gates.decay_chunk[0];
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] *= decay_chunk;
    float y[32] = {};  // S^T Q^T, then o
    if constexpr (kOutputs) multiply_state<T>(y, s_operand, smem_address(stage.q), by_rows, [](int) {});

    uint32_t operand[16];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 beta = pair(gates.beta, n), decay_k = pair(gates.decay_k, n);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 value = unpack2<T>(transpose(i ? v[n].y : v[n].x));
        float* r = x + 4 * n + 2 * i;
        r[0] = fmaf(-decay_k.x, r[0], beta.x * value.x);
        r[1] = fmaf(-decay_k.y, r[1], beta.y * value.y);
        operand[2 * n + i] = pack2<T>(r[0], r[1]);
      }
    }
    load_v(chunk + 1);
    multiply_lower<T>(x, operand, prepared.inverse);

    uint32_t u[16];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 decay_u = pair(gates.decay_u, n);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* of_u = x + 4 * n + 2 * i;
        operand[2 * n + i] = pack2<T>(of_u[0] * decay_u.x, of_u[1] * decay_u.y);
        if constexpr (kOutputs) u[2 * n + i] = pack2<T>(of_u[0], of_u[1]);
      }
    }
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; ++i) {
        uint32_t b[4];
        load_matrix_transposed(b, by_columns(smem_address(stage.k), step, i));
        mma<T>(s + 8 * i, operand + 4 * step, b[0], b[1]);
        mma<T>(s + 8 * i + 4, operand + 4 * step, b[2], b[3]);
      }
    }

    if constexpr (kOutputs) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 decay_q = pair(gates.decay_q, n);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          y[4 * n + 2 * i] *= decay_q.x;
          y[4 * n + 2 * i + 1] *= decay_q.y;
        }
      }
      multiply_lower<T>(y, u, prepared.scores);
      const int live = seq.length - chunk * kChunk;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const uint2 packed = {transpose(pack2<T>(y[4 * n], y[4 * n + 1])),
                              transpose(pack2<T>(y[4 * n + 2], y[4 * n + 3]))};
        store_pair_if(out_to, packed, 8 * n + group < live);
        out_to += 8 * token_stride;
      }
      if (p.checkpoint_chunks && (chunk + 1) % p.checkpoint_chunks == 0 && (chunk + 1) * kChunk <= seq.length) {
        // Looked up anew: registers are short, and this is rare.
        const int row = checkpoints_before(p, work.sequence) + (chunk + 1) / p.checkpoint_chunks - 1;
        store_state(s, p.checkpoints, row, work.value_head, slice);
      }
    }
  }

  copy_wait();  // those of nothing

  // ---- The state that this segment leaves behind
  if constexpr (!kOutputs) grid_launch_dependents();  // not earlier, as in the preparation
  if constexpr (kOutputs) {
    if (p.final.data != nullptr && work.segment == p.segments - 1) {
      store_state(s, p.final, state_row, work.value_head, slice);
    }
  } else if (work.identity) {
    // S^T after a scan from the identity is M^T.
    store_transfer<T>(s, p.workspace + p.offsets.transfers, first_cut + work.segment, slice);
  } else {
    store_fragment(s, p.workspace + p.offsets.offsets, first_cut + work.segment, slice);
  }
}

using ScanKernel = void (*)(Problem);
struct ScanKernels {
  ScanKernel transfer, outputs_4, outputs_8;
};

inline void launch_scan(const Problem& p, int warps, cudaStream_t stream, const ScanKernels& kernels) {
  const int heads = p.sequences * p.value_heads;
  if (p.segments > 1) {
    launch(kernels.transfer, {heads * (2 * p.segments - 3) * 2, 128, kScanBytes<Pass::kTransfer>}, /*overlap=*/true,
           stream, p);
  }
  // Without tokens nothing of this operator runs before it, and a foreign kernel may let it start too early.
  launch(warps == 4 ? kernels.outputs_4 : kernels.outputs_8,
         {heads * p.segments * (kSlices / warps), warps * 32, kScanBytes<Pass::kOutputs>}, /*overlap=*/p.tokens > 0,
         stream, p);
}

}  // namespace atrex::chunk_gdn
