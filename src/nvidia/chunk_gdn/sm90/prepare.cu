// The parallel pass: everything of a chunk that does not depend on the state.
//
// For one chunk and one q/k head, with a = exp(G_i - G_j) the decay between tokens j <= i and r the reciprocal norms:
//   scores   P_ij = scale r_i r_j a_ij (q_i . k_j)                     i >= j
//   system   L_ij = beta_i r_i r_j a_ij (k_i . k_j)                    i > j
//   inverse  X = (I + L)^-1 = I + strictly lower part
// so that u = X (beta o (v - exp(G) o (S^T k))). The unit diagonal stays out of the stored tile: the scan adds that
// term in float32, which keeps bf16's rounding of X off the largest term.
//
// A work item is one (chunk, q/k head) with up to four v-heads of its group. A team of two warpgroups serves it: the
// systems warpgroup fetches items, keeps both products in registers, and writes scores and systems, the inverse
// warpgroup inverts one system after the other. Two teams share a persistent block, so that one's latencies hide the
// other's. In every warpgroup, warp w owns rows 16w..16w+15. The inverse goes by 16x16 blocks: forward substitution in
// float32 on 8x8 blocks of the diagonal, the rest by blocks in tf32, at last, one block row after the other,
// X_s = -(X_ss L_s) X_<s.
#include "launch.h"
#include "ptx.cuh"
#include "sequence.cuh"

namespace atrex::chunk_gdn {
namespace {

constexpr int kTeams = 2;
constexpr int kTeamThreads = 256;
constexpr int kThreads = kTeams * kTeamThreads;
constexpr int kMaxMembers = kItemHeads;  // one scores warp loads the gates of one v-head
static_assert(kMaxMembers == 4);
constexpr int kTileElements = kChunk * kChunk;
constexpr int kLoadBytes = 4 * kTileElements * 2;
// Row pitch of the float32 block matrix: 16-byte rows, and 4-row-apart lanes fall into different banks.
constexpr int kPitch = kChunk + 4;
// exp(-100) is below float32's range: such a decay is an exact reset, and -inf is one of them.
constexpr float kResetDecay = -100.f;
// Stands for a reset in log2: below what the other decays of a chunk can make up for, so that exp2 gives exact zero.
constexpr float kResetLog2 = -16384.f;
static_assert(-kResetLog2 > kChunk * -kResetDecay * 1.45f + 150.f);
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNormEpsilon = 1e-6f;

// One work item.
struct Item {
  int64_t first_tile;       // index of the first v-head's tiles
  int batch, token, live;   // first token; tokens inside the sequence, none if the slot is not used
  int first_head, members;  // v-heads
};

// Which system is in a buffer.
struct SystemInfo {
  int64_t tile;  // index of its tile; -1: there are no more
  int last_of;   // the item whose last system it is, or -1
};

template <class T>
struct alignas(1024) TeamMemory {
  T k[2][kTileElements];  // 64-feature panels, 128-byte swizzled
  T q[2][kTileElements];
  T inverse[kTileElements];
  T scores[2][kTileElements];  // one can be written while the other is stored
  float systems[2][kChunk][kPitch];
  SystemInfo infos[2];
  float norm_k[kChunk], norm_q[kChunk];
  // Of two items in turn: the next one's arrive while this one's are in use.
  // Decay: log2 of the decay since the chunk's start without the resets, and kResetLog2 for each reset.
  float2 decay[2][kMaxMembers][kChunk];
  float beta[2][kMaxMembers][kChunk];
  Item items[2];
  uint64_t item_full;  // K and Q are there, and the gates
  uint64_t system_full[2], system_empty[2];
};

// Barriers of a team.
enum TeamBarrier { kInverseBarrier, kSystemsBarrier, kTeamBarriers };

__device__ __forceinline__ int barrier_id(TeamBarrier barrier) {
  return 1 + threadIdx.x / kTeamThreads * kTeamBarriers + barrier;
}

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A gate as it lies in memory: one of the two is loaded, without a branch and without a use, so that several loads are
// under way at a time. Zero if not loaded.
struct RawGate {
  uint32_t wide;
  uint16_t half;
};
__device__ __forceinline__ RawGate load_gate(const Gate& gate, int64_t b, int64_t t, int64_t h, bool on) {
  const int64_t at = b * gate.stride_b + t * gate.stride_t + h * gate.stride_h;
  const bool wide = gate.dtype == DataType::kFloat32;
  RawGate raw;
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %2, 0; mov.b32 %0, 0;\n"
      "@p ld.global.nc.b32 %0, [%1];}"
      : "=&r"(raw.wide)
      : "l"(static_cast<const char*>(gate.data) + at * (wide ? 4 : 2)), "r"(int(on && wide)));
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %2, 0; mov.b16 %0, 0;\n"
      "@p ld.global.nc.b16 %0, [%1];}"
      : "=&h"(raw.half)
      : "l"(static_cast<const char*>(gate.data) + at * (wide ? 4 : 2)), "r"(int(on && !wide)));
  return raw;
}
__device__ __forceinline__ float gate_value(const RawGate& raw, DataType dtype) {
  if (dtype == DataType::kFloat32) return __uint_as_float(raw.wide);
  return dtype == DataType::kBFloat16 ? __uint_as_float(uint32_t(raw.half) << 16)
                                      : __half2float(__ushort_as_half(raw.half));
}

// Reciprocal norms of the 64 rows of a swizzled tile pair, by a warpgroup: two threads a row, one panel each.
template <class T>
__device__ __forceinline__ void reciprocal_norms(const T (&panels)[2][kTileElements], float* out) {
  const int row = threadIdx.x % 128 / 2;
  const auto* chunks = reinterpret_cast<const uint4*>(panels[threadIdx.x % 2]) + row * 8;
  float sum = 0.f;
#pragma unroll
  for (int chunk = 0; chunk < 8; ++chunk) {
    const uint4 packed = chunks[chunk ^ (row & 7)];
    for (const uint32_t pair : {packed.x, packed.y, packed.z, packed.w}) {
      const float2 x = unpack2<T>(pair);
      sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
    }
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  if (threadIdx.x % 2 == 0) out[row] = rsqrtf(sum + kNormEpsilon);
}

// Clears this block's share of [begin, end) bytes; both multiples of 16.
__device__ __forceinline__ void clear_share(void* data, int64_t begin, int64_t end) {
  const int64_t step = int64_t(gridDim.x) * kThreads * 16;
  for (int64_t at = begin + (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 16; at < end; at += step) {
    *reinterpret_cast<uint4*>(static_cast<char*>(data) + at) = uint4{};
  }
}

// Outputs of the tokens and checkpoints that belong to no sequence are zero.
__device__ __forceinline__ void clear_unused(const Problem& p) {
  const int used = monotone_offset(p, p.sequences);
  if (used < p.tokens) {
    const int64_t row_bytes = int64_t(p.value_heads) * kHeadDim * 2;
    clear_share(p.out, used * row_bytes, p.tokens * row_bytes);
  }
  if (p.checkpoint_chunks) {
    const int64_t row_bytes = p.checkpoints.stride_row * (p.checkpoints.dtype == DataType::kFloat32 ? 4 : 2);
    clear_share(p.checkpoints.data, checkpoints_before(p, p.sequences) * row_bytes, p.checkpoint_rows * row_bytes);
  }
}

// One warp: the item with this index.
__device__ __forceinline__ Item find_item(const Problem& p, int index) {
  const int ratio = p.value_heads / p.heads;
  const int parts = item_parts(p.heads, p.value_heads);
  const int slot = index / (p.heads * parts), head = index / parts % p.heads;
  const int sequence = sequence_of_slot(p, slot);
  const Sequence seq = sequence < 0 ? Sequence{} : sequence_at(p, sequence);
  Item item;
  item.batch = seq.batch;
  item.token = seq.start + (slot - seq.slot) * kChunk;
  item.live = min(kChunk, seq.length - (slot - seq.slot) * kChunk);
  item.first_head = head * ratio + index % parts * kMaxMembers;
  item.members = min(kMaxMembers, (head + 1) * ratio - item.first_head);
  item.first_tile = int64_t(slot) * p.value_heads + item.first_head;
  return item;
}

// The gates of one v-head, two tokens a lane.
struct LaneGates {
  RawGate g[2], beta[2];
};

__device__ __forceinline__ LaneGates load_gates(const Problem& p, const Item& item, int member) {
  LaneGates gates;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = threadIdx.x % 32 * 2 + i;
    gates.g[i] = load_gate(p.g, item.batch, item.token + t, item.first_head + member, t < item.live);
    gates.beta[i] = load_gate(p.beta, item.batch, item.token + t, item.first_head + member, t < item.live);
  }
  return gates;
}

// One warp: decays and beta of one v-head into shared memory.
__device__ __forceinline__ void share_gates(const Problem& p, float2* decays, float* betas, const LaneGates& gates) {
  const int lane = threadIdx.x % 32;
  float decay[2], reset[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float g = gate_value(gates.g[i], p.g.dtype);
    reset[i] = g <= kResetDecay ? kResetLog2 : 0.f;
    decay[i] = g <= kResetDecay ? 0.f : g * kLog2E;
  }
  float sum = decay[0] + decay[1];
  float resets = reset[0] + reset[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float left_sum = __shfl_up_sync(0xffffffffu, sum, step);
    const float left_resets = __shfl_up_sync(0xffffffffu, resets, step);
    if (lane >= step) {
      sum += left_sum;
      resets += left_resets;
    }
  }
  *reinterpret_cast<float4*>(decays + 2 * lane) = {sum - decay[1], resets - reset[1], sum, resets};
  *reinterpret_cast<float2*>(betas + 2 * lane) = {gate_value(gates.beta[0], p.beta.dtype),
                                                  gate_value(gates.beta[1], p.beta.dtype)};
}

// The systems warpgroup: finds an item and asks for its K and Q; its gates are on their way on return.
template <class T>
__device__ __forceinline__ LaneGates fetch_item(int warp, const Problem& p, TeamMemory<T>& smem,
                                                const CUtensorMap& map_k, const CUtensorMap& map_q, int index,
                                                int buffer) {
  if (warp == 0) {
    const Item item = find_item(p, index);
    if (threadIdx.x % 32 == 0) {
      smem.items[buffer] = item;
      if (item.live > 0) {
        const int head = item.first_head / (p.value_heads / p.heads);
        mbarrier_expect(&smem.item_full, kLoadBytes);
        for (int panel = 0; panel < 2; ++panel) {
          load_tile(smem.k[panel], &map_k, panel * 64, head, item.token, item.batch, &smem.item_full);
          load_tile(smem.q[panel], &map_q, panel * 64, head, item.token, item.batch, &smem.item_full);
        }
      } else {
        mbarrier_arrive(&smem.item_full);
      }
    }
  }
  named_barrier_sync(barrier_id(kSystemsBarrier), 128);
  const Item item = smem.items[buffer];
  LaneGates gates{};
  if (warp < item.members && item.live > 0) gates = load_gates(p, item, warp);
  return gates;
}

// Completes the item: `item_full` also waits for the four gates warps.
template <class T>
__device__ __forceinline__ void complete_item(int warp, const Problem& p, TeamMemory<T>& smem, const LaneGates& gates,
                                              int buffer) {
  share_gates(p, smem.decay[buffer][warp], smem.beta[buffer][warp], gates);
  __syncwarp();
  mbarrier_arrive_if(&smem.item_full, threadIdx.x % 32 == 0);
}

// One warp: the gates of one v-head for the scan.
template <class T>
__device__ __forceinline__ void store_gates(const TeamMemory<T>& smem, int buffer, int member, float scale, int live,
                                            ChunkGates* out) {
  const float2 end = smem.decay[buffer][member][kChunk - 1];
  for (int t = threadIdx.x % 32; t < kChunk; t += 32) {
    const float2 decay = smem.decay[buffer][member][t];
    const float since_start = decay.y == 0.f ? exp2_approximate(decay.x) : 0.f;
    const float until_end = decay.y == end.y ? exp2_approximate(end.x - decay.x) : 0.f;
    const float norm_k = t < live ? smem.norm_k[t] : 0.f;
    const float norm_q = t < live ? smem.norm_q[t] : 0.f;
    const float beta = smem.beta[buffer][member][t];
    out->beta[t] = beta;
    out->decay_k[t] = beta * since_start * norm_k;
    out->decay_u[t] = until_end * norm_k;
    out->decay_q[t] = scale * since_start * norm_q;
  }
  if (threadIdx.x % 32 < 4) out->decay_chunk[threadIdx.x % 32] = end.y == 0.f ? exp2_approximate(end.x) : 0.f;
}

// exp2 of the decay between the tokens of a row and of two neighbouring columns. Capped, so that zeros above the
// diagonal, where the decay is a growth, stay zero when they are multiplied by it.
__device__ __forceinline__ float2 decay_between(const float2& row, const float4& columns) {
  return {exp2_approximate(fminf(row.x - columns.x + (row.y - columns.y), 126.f)),
          exp2_approximate(fminf(row.x - columns.z + (row.y - columns.w), 126.f))};
}

// A fragment (16 x 8, tf32) out of an accumulator tile. The reduction index is permuted (t -> 2t, t + 4 -> 2t + 1),
// which load_b answers by reading its rows in the same order.
__device__ __forceinline__ void accumulator_to_a(uint32_t* a, const float* d) {
  a[0] = to_tf32(d[0]);
  a[1] = to_tf32(d[2]);
  a[2] = to_tf32(d[1]);
  a[3] = to_tf32(d[3]);
}
__device__ __forceinline__ void load_b(uint32_t* b, const float (*rows)[kPitch], int row, int column) {
  const int group = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  b[0] = to_tf32(rows[row + 2 * t][column + group]);
  b[1] = to_tf32(rows[row + 2 * t + 1][column + group]);
}
__device__ __forceinline__ void store_accumulator(float (*rows)[kPitch], int row, int column, const float* d) {
  const int group = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  *reinterpret_cast<float2*>(&rows[row + group][column + 2 * t]) = {d[0], d[1]};
  *reinterpret_cast<float2*>(&rows[row + group + 8][column + 2 * t]) = {d[2], d[3]};
}

// Inverse of the warp's 16x16 unit lower diagonal block, in place: two 8x8 blocks by forward substitution in float32,
// a column a lane, then the block below them, -(X_22 L_21) X_11.
__device__ __forceinline__ void invert_diagonal(float (*rows)[kPitch], int first) {
  const int lane = threadIdx.x % 32, group = lane / 4, t = lane % 4;
  const int block = first + lane / 8 % 2 * 8, column = lane % 8;
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float row[8];
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      *reinterpret_cast<float4*>(row + j) = *reinterpret_cast<const float4*>(&rows[block + i][block + j]);
    }
    x[i] = i == column ? 1.f : 0.f;
#pragma unroll
    for (int j = 0; j < i; ++j) x[i] -= row[j] * x[j];
  }
  __syncwarp();
  if (lane < 16) {
#pragma unroll
    for (int i = 0; i < 8; ++i) rows[block + i][block + column] = x[i];
  }
  __syncwarp();
  // Rows 8..15 of the products stay empty: these blocks have eight rows.
  const float2 x22 = *reinterpret_cast<const float2*>(&rows[first + 8 + group][first + 8 + 2 * t]);
  const uint32_t a[4] = {to_tf32(-x22.x), 0, to_tf32(-x22.y), 0};
  uint32_t b[2], left[4];
  float product[4] = {};
  load_b(b, rows, first + 8, first);
  mma_tf32(product, a, b);
  accumulator_to_a(left, product);
  float x21[4] = {};
  load_b(b, rows, first, first);
  mma_tf32(x21, left, b);
  *reinterpret_cast<float2*>(&rows[first + 8 + group][first + 2 * t]) = {x21[0], x21[1]};
  __syncwarp();
}

// The row that a lane names to stmatrix, and a 16x16 block's place in a swizzled 64x64 tile.
__device__ __forceinline__ uint32_t block_offset(int warp, int block) {
  const uint32_t lane = threadIdx.x % 32, row = warp * 16 + (lane / 8 & 1) * 8 + lane % 8;
  return row * 128 + ((2 * block + lane / 16) ^ (row & 7)) * 16;
}

// One v-head's scores into their tile and its system, this warp's rows up to the diagonal, into the block matrix.
template <class T>
__device__ __forceinline__ void write_scores_and_system(int warp, const float2* decays, const float* betas,
                                                        const float (&qk)[32], const float (&kk)[32], uint32_t tile,
                                                        float (*blocks)[kPitch]) {
  const int row = 16 * warp + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float2 rows[2] = {decays[row], decays[row + 8]};
  const float beta[2] = {betas[row], betas[row + 8]};
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    uint32_t scores[4] = {};
    if (block <= warp) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = 2 * block + half;
        const float4 columns = *reinterpret_cast<const float4*>(decays + 8 * n + 2 * t);
        float system[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 decay = decay_between(rows[i], columns);
          const int e = 4 * n + 2 * i;
          scores[2 * half + i] = pack2<T>(decay.x * qk[e], decay.y * qk[e + 1]);
          system[2 * i] = decay.x * beta[i] * kk[e];
          system[2 * i + 1] = decay.y * beta[i] * kk[e + 1];
        }
        store_accumulator(blocks, 16 * warp, 8 * n, system);
      }
    }
    store_matrix(tile + block_offset(warp, block), scores);
  }
}

// Inverts the block matrix in place; its strictly lower part goes into the tile, once that has left shared memory.
template <class T>
__device__ __forceinline__ void invert(int warp, float (*blocks)[kPitch], uint32_t tile) {
  const int group = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  invert_diagonal(blocks, 16 * warp);
  // -(X_ss L_sj) for the blocks left of the diagonal, as A fragments
  uint32_t left[3][2][4];
  {
    uint32_t diagonal[2][4];
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int column = 16 * warp + 8 * step + 2 * t;
      const float2 upper = *reinterpret_cast<float2*>(&blocks[16 * warp + group][column]);
      const float2 lower = *reinterpret_cast<float2*>(&blocks[16 * warp + group + 8][column]);
      const float negative[4] = {-upper.x, -upper.y, -lower.x, -lower.y};
      accumulator_to_a(diagonal[step], negative);
    }
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      if (j >= warp) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float product[4] = {};
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t b[2];
          load_b(b, blocks, 16 * warp + 8 * step, 16 * j + 8 * half);
          mma_tf32(product, diagonal[step], b);
        }
        accumulator_to_a(left[j][half], product);
      }
    }
  }
  if (threadIdx.x % 128 == 0) store_wait_read();
  named_barrier_sync(barrier_id(kInverseBarrier), 128);

  // Block rows top down: row m is final, every row below takes its share of it.
  float inverse[6][4] = {};
#pragma unroll
  for (int m = 0; m < 3; ++m) {
    if (warp > m) {
#pragma unroll
      for (int n = 0; n < 2 * m + 2; ++n) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t b[2];
          load_b(b, blocks, 16 * m + 8 * step, 8 * n);
          mma_tf32(inverse[n], left[m][step], b);
        }
      }
    }
    if (m == 2) break;  // nobody reads the last row
    if (warp == m + 1) {
#pragma unroll
      for (int n = 0; n < 2 * m + 2; ++n) store_accumulator(blocks, 16 * warp, 8 * n, inverse[n]);
    }
    named_barrier_sync(barrier_id(kInverseBarrier), 128);
  }

#pragma unroll
  for (int block = 0; block < 4; ++block) {
    uint32_t fragment[4] = {};
    if (block < 3 && block < warp) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* values = inverse[block < 3 ? 2 * block + e / 2 : 0] + e % 2 * 2;
        fragment[e] = pack2<T>(values[0], values[1]);
      }
    } else if (block == warp) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = group + e % 2 * 8, column = e / 2 * 8 + 2 * t;
        const float2 x = *reinterpret_cast<float2*>(&blocks[16 * warp + row][16 * warp + column]);
        fragment[e] = pack2<T>(row > column ? x.x : 0.f, row > column + 1 ? x.y : 0.f);
      }
    }
    store_matrix(tile + block_offset(warp, block), fragment);
  }
}

// Q K^T and K K^T, rows 16 warp + group (+ 8), columns 8 n + 2 t (+ 1) in element 4 n + {0, 1} (+ 2).
template <class T>
__device__ __forceinline__ void multiply(float (&qk)[32], float (&kk)[32], const T (&q)[2][kTileElements],
                                         const T (&k)[2][kTileElements]) {
  const uint64_t desc_q = smem_descriptor(smem_address(q), 16, 1024);
  const uint64_t desc_k = smem_descriptor(smem_address(k), 16, 1024);
  tie(qk);
  tie(kk);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint64_t at = step / 4 * 512 + step % 4 * 2;
    wgmma_64x64<T>(qk, desc_q + at, desc_k + at, step > 0);
    wgmma_64x64<T>(kk, desc_k + at, desc_k + at, step > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  tie(qk);
  tie(kk);
}

// What the v-heads share: norms, scale, and zeros above the diagonal and past the sequence's end. Selected, not
// multiplied: tokens past the end belong to the next sequence and can be NaN.
__device__ __forceinline__ void scale_product(int warp, float (&product)[32], const float* row_norms,
                                              const float* column_norms, float scale, int live, int from_diagonal) {
  const int first_row = warp * 16 + threadIdx.x % 32 / 4, first_column = threadIdx.x % 4 * 2;
  const float factors[2] = {scale * row_norms[first_row], scale * row_norms[first_row + 8]};
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    if (n >= 2 * warp + 2) continue;  // never read
    const float2 norms = *reinterpret_cast<const float2*>(column_norms + 8 * n + first_column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + i / 2 * 8, column = 8 * n + first_column + i % 2;
      const bool on = row < live && row >= column + from_diagonal;
      product[4 * n + i] = on ? product[4 * n + i] * (factors[i / 2] * (i % 2 ? norms.y : norms.x)) : 0.f;
    }
  }
}

template <class T>
__device__ __forceinline__ void prepare(const Problem& p, const CUtensorMap& map_k, const CUtensorMap& map_q) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  // Through shuffles, so that the compiler knows them to be uniform in the warp.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0);
  auto& smem = reinterpret_cast<TeamMemory<T>*>(dynamic_smem)[warpgroup / 2];
  const bool elected = threadIdx.x % 128 == 0;
  const int items = p.slots * p.heads * item_parts(p.heads, p.value_heads);
  const int first = blockIdx.x * kTeams + warpgroup / 2, stride = gridDim.x * kTeams;
  grid_wait();  // the counters are zero
  grid_launch_dependents();
  auto* ready = reinterpret_cast<uint32_t*>(p.workspace + p.offsets.ready);

  if (threadIdx.x % kTeamThreads == 0) {
    mbarrier_init(&smem.item_full, 5);  // the loads and the four gates warps
    for (int buffer = 0; buffer < 2; ++buffer) {
      mbarrier_init(&smem.system_full[buffer], 4);
      mbarrier_init(&smem.system_empty[buffer], 4);
    }
    mbarrier_init_fence();
  }
  if (p.cu_seqlens != nullptr) clear_unused(p);
  __syncthreads();
  if (first >= items) return;

  if (warpgroup % 2 == 0) {
    // ================ Inverse warpgroup
    for (int count = 0;; ++count) {
      const int buffer = count & 1;
      mbarrier_wait(&smem.system_full[buffer], count / 2 & 1);
      const SystemInfo info = smem.infos[buffer];
      if (info.tile < 0) break;
      invert<T>(warp, smem.systems[buffer], smem_address(smem.inverse));
      fence_async_proxy();
      __syncwarp();
      mbarrier_arrive_if(&smem.system_empty[buffer], threadIdx.x % 32 == 0);
      named_barrier_sync(barrier_id(kInverseBarrier), 128);
      if (elected) {
        store_bulk(p.workspace + p.offsets.inverse + info.tile * kTileBytes, smem.inverse, kTileBytes);
        store_commit();
        if (p.overlap && info.last_of >= 0) {
          store_wait_all();
          signal(ready + info.last_of);
        }
      }
    }
  } else {
    // ================ Systems warpgroup
    complete_item(warp, p, smem, fetch_item(warp, p, smem, map_k, map_q, first, 0), 0);
    int count = 0;  // systems written
    uint32_t parity = 0;
    for (int index = first; index < items; index += stride, parity ^= 1) {
      // Wait for the item; with K and Q read, fetch the next.
      mbarrier_wait(&smem.item_full, parity);
      const Item item = smem.items[parity];
      float qk[32], kk[32];
      if (item.live > 0) {
        multiply(qk, kk, smem.q, smem.k);
        if (p.l2norm) {
          reciprocal_norms<T>(smem.k, smem.norm_k);
          reciprocal_norms<T>(smem.q, smem.norm_q);
        } else {
          (threadIdx.x % 2 ? smem.norm_k : smem.norm_q)[threadIdx.x % 128 / 2] = 1.f;
        }
      }
      named_barrier_sync(barrier_id(kSystemsBarrier), 128);
      const bool more = index + stride < items;
      LaneGates next{};
      if (more) next = fetch_item(warp, p, smem, map_k, map_q, index + stride, parity ^ 1);
      if (item.live > 0) {
        scale_product(warp, qk, smem.norm_q, smem.norm_k, p.scale, item.live, 0);
        scale_product(warp, kk, smem.norm_k, smem.norm_k, 1.f, item.live, 1);
        for (int member = 0; member < item.members; ++member, ++count) {
          // Wait until the inverse warpgroup has released the buffer, fill it, hand it over.
          const int buffer = count & 1;
          mbarrier_wait(&smem.system_empty[buffer], ~(count / 2) & 1);  // at once in the first round
          write_scores_and_system<T>(warp, smem.decay[parity][member], smem.beta[parity][member], qk, kk,
                                     smem_address(smem.scores[buffer]), smem.systems[buffer]);
          if (threadIdx.x % 128 == 0) {
            smem.infos[buffer] = {item.first_tile + member, member + 1 == item.members ? index : -1};
          }
          fence_async_proxy();
          __syncwarp();
          mbarrier_arrive_if(&smem.system_full[buffer], threadIdx.x % 32 == 0);
          if (elected) store_wait_read();  // the other scores tile, written next, is free
          named_barrier_sync(barrier_id(kSystemsBarrier), 128);
          if (elected) {
            store_bulk(p.workspace + p.offsets.scores + (item.first_tile + member) * kTileBytes, smem.scores[buffer],
                       kTileBytes);
            store_commit();
          }
        }
        if (warp < item.members) {
          auto* gates = reinterpret_cast<ChunkGates*>(p.workspace + p.offsets.gates) + item.first_tile + warp;
          store_gates(smem, parity, warp, p.scale, item.live, gates);
        }
        if (p.overlap) {
          named_barrier_sync(barrier_id(kSystemsBarrier), 128);  // the gates of all warps are stored
          if (elected) {
            store_wait_all();
            signal(ready + index);
          }
        }
      }
      if (more) complete_item(warp, p, smem, next, parity ^ 1);
    }
    const int buffer = count & 1;
    mbarrier_wait(&smem.system_empty[buffer], ~(count / 2) & 1);
    if (threadIdx.x % 128 == 0) smem.infos[buffer].tile = -1;
    __syncwarp();
    mbarrier_arrive_if(&smem.system_full[buffer], threadIdx.x % 32 == 0);
  }
  if (elected) store_wait_all();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    atrex_chunk_gdn_prepare_bf16(const __grid_constant__ Problem p, const __grid_constant__ CUtensorMap map_k,
                                 const __grid_constant__ CUtensorMap map_q) {
  prepare<__nv_bfloat16>(p, map_k, map_q);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    atrex_chunk_gdn_prepare_fp16(const __grid_constant__ Problem p, const __grid_constant__ CUtensorMap map_k,
                                 const __grid_constant__ CUtensorMap map_q) {
  prepare<__half>(p, map_k, map_q);
}

extern "C" __global__ void __launch_bounds__(kThreads) atrex_chunk_gdn_reset(uint32_t* counters, int count) {
  grid_launch_dependents();
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) counters[i] = 0;
}

void launch_prepare(const Problem& p, bool fp16, int blocks, const CUtensorMap& map_k, const CUtensorMap& map_q,
                    cudaStream_t stream) {
  if (p.overlap) {
    auto* ready = reinterpret_cast<uint32_t*>(p.workspace + p.offsets.ready);
    const int items = p.slots * p.heads * item_parts(p.heads, p.value_heads);
    launch(atrex_chunk_gdn_reset, 8, kThreads, 0, /*overlap=*/false, stream, ready, items);
  }
  auto* kernel = fp16 ? atrex_chunk_gdn_prepare_fp16 : atrex_chunk_gdn_prepare_bf16;
  launch(kernel, blocks, kThreads, kTeams * sizeof(TeamMemory<__half>), p.overlap, stream, p, map_k, map_q);
}

}  // namespace atrex::chunk_gdn
