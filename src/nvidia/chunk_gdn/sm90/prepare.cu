// The parallel pass: everything of a chunk that does not depend on the state.
//
// For one chunk and one q/k head, with a = exp(G_i - G_j) the decay between tokens j <= i and r the reciprocal norms:
//   scores   P_ij = scale r_i r_j a_ij (q_i . k_j)                     i >= j
//   system   L_ij = beta_i r_i r_j a_ij (k_i . k_j)                    i > j
//   inverse  X = (I + L)^-1 = I + strictly lower part
// so that u = X (beta o (v - exp(G) o (S^T k))). The unit diagonal stays out of the stored tile: the scan adds that
// term in float32, which keeps bf16's rounding of X off the largest term.
//
// One block of four warps serves one (chunk, q/k head) and loops over the v-heads of its group. Warp w owns rows
// 16w..16w+15. The inverse goes by 16x16 blocks: forward substitution in float32 on the diagonal, then, one block row
// after the other, X_s = -(X_ss L_s) X_<s in tf32.
#include "launch.h"
#include "ptx.cuh"
#include "sequence.cuh"

namespace atrex::chunk_gdn {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kTileElements = kChunk * kChunk;
constexpr int kLoadBytes = 4 * kTileElements * 2;
// Row pitch of the float32 block matrix: 16-byte rows, and 4-row-apart lanes fall into different banks.
constexpr int kPitch = kChunk + 4;
// exp(-100) is below float32's range: such a decay is an exact reset, and -inf is one of them.
constexpr float kResetDecay = -100.f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNormEpsilon = 1e-6f;

template <class T>
struct alignas(1024) SharedMemory {
  T k[2][kTileElements];  // 64-feature panels, 128-byte swizzled; dead after the products: then the two output tiles
  T q[2][kTileElements];
  float blocks[kChunk][kPitch];
  float cumulative[kWarps][kChunk];  // log2 of the decay since the chunk's start, resets left out
  int resets[kWarps][kChunk];        // resets up to and including this token
  float beta[kWarps][kChunk];
  float norm_k[kChunk], norm_q[kChunk];
  uint64_t loaded;
};

__device__ __forceinline__ float load_gate(const Gate& gate, int64_t b, int64_t t, int64_t h) {
  const int64_t at = b * gate.stride_b + t * gate.stride_t + h * gate.stride_h;
  switch (gate.dtype) {
    case DataType::kFloat32:
      return __ldg(static_cast<const float*>(gate.data) + at);
    case DataType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(gate.data)[at]);
    default:
      return __half2float(static_cast<const __half*>(gate.data)[at]);
  }
}

// Reciprocal norms of 64 rows of a swizzled tile pair, by two warps.
template <class T>
__device__ __forceinline__ void reciprocal_norms(const T (&panels)[2][kTileElements], float* out, int row) {
  float sum = 0.f;
#pragma unroll
  for (int panel = 0; panel < 2; ++panel) {
#pragma unroll
    for (int chunk = 0; chunk < 8; ++chunk) {
      const uint4 packed = reinterpret_cast<const uint4*>(panels[panel])[row * 8 + (chunk ^ (row & 7))];
      for (const uint32_t pair : {packed.x, packed.y, packed.z, packed.w}) {
        const float2 x = unpack2<T>(pair);
        sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
      }
    }
  }
  out[row] = rsqrtf(sum + kNormEpsilon);
}

// Clears this block's share of [begin, end) bytes; both multiples of 16.
__device__ __forceinline__ void clear_share(void* data, int64_t begin, int64_t end) {
  const int64_t step = int64_t(gridDim.x) * kThreads * 16;
  for (int64_t at = begin + (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 16; at < end; at += step) {
    *reinterpret_cast<uint4*>(static_cast<char*>(data) + at) = uint4{};
  }
}

// One warp: the gates of one v-head, two tokens a lane.
template <class T>
__device__ __forceinline__ void chunk_gates(const Problem& p, SharedMemory<T>& smem, int buffer, const Sequence& seq,
                                            int token, int live, int value_head, ChunkGates* out) {
  const int lane = threadIdx.x % 32;
  float decay[2], beta[2];
  int reset[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i;
    const bool on = t < live;
    const float g = on ? load_gate(p.g, seq.batch, token + t, value_head) : 0.f;
    beta[i] = on ? load_gate(p.beta, seq.batch, token + t, value_head) : 0.f;
    reset[i] = g <= kResetDecay;
    decay[i] = reset[i] ? 0.f : g * kLog2E;
  }
  float sum = decay[0] + decay[1];
  int resets = reset[0] + reset[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float left_sum = __shfl_up_sync(0xffffffffu, sum, step);
    const int left_resets = __shfl_up_sync(0xffffffffu, resets, step);
    if (lane >= step) {
      sum += left_sum;
      resets += left_resets;
    }
  }
  const float end_sum = __shfl_sync(0xffffffffu, sum, 31);
  const int end_resets = __shfl_sync(0xffffffffu, resets, 31);
  const float cumulative[2] = {sum - decay[1], sum};
  const int count[2] = {resets - reset[1], resets};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = 2 * lane + i;
    smem.cumulative[buffer][t] = cumulative[i];
    smem.resets[buffer][t] = count[i];
    smem.beta[buffer][t] = beta[i];
    const float since_start = count[i] == 0 ? exp2f(cumulative[i]) : 0.f;
    const float until_end = count[i] == end_resets ? exp2f(end_sum - cumulative[i]) : 0.f;
    const float norm_k = t < live ? smem.norm_k[t] : 0.f;
    const float norm_q = t < live ? smem.norm_q[t] : 0.f;
    out->beta[t] = beta[i];
    out->decay_k[t] = beta[i] * since_start * norm_k;
    out->decay_u[t] = until_end * norm_k;
    out->decay_q[t] = p.scale * since_start * norm_q;
  }
  if (lane < 4) out->decay_chunk[lane] = end_resets == 0 ? exp2f(end_sum) : 0.f;
}

// Inverse of the warp's 16x16 unit lower diagonal block, in place, column by column in float32.
__device__ __forceinline__ void invert_diagonal(float (*rows)[kPitch], int first) {
  const int column = threadIdx.x % 16;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.f : 0.f;
#pragma unroll
  for (int i = 1; i < 16; ++i) {
    float row[16];
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      *reinterpret_cast<float4*>(row + j) = *reinterpret_cast<const float4*>(&rows[first + i][first + j]);
    }
    float even = x[i], odd = 0.f;
#pragma unroll
    for (int j = 0; j < i; ++j) (j % 2 ? odd : even) -= row[j] * x[j];
    x[i] = even + odd;
  }
  __syncwarp();
  if (threadIdx.x % 32 < 16) {
#pragma unroll
    for (int i = 0; i < 16; ++i) rows[first + i][first + column] = x[i];
  }
  __syncwarp();
}

// A fragment (16 x 8, tf32) out of an accumulator tile. The reduction index is permuted (t -> 2t, t + 4 -> 2t + 1),
// which load_b below answers by reading its rows in the same order.
__device__ __forceinline__ void accumulator_to_a(uint32_t* a, const float* d, float sign) {
  a[0] = to_tf32(sign * d[0]);
  a[1] = to_tf32(sign * d[2]);
  a[2] = to_tf32(sign * d[1]);
  a[3] = to_tf32(sign * d[3]);
}
__device__ __forceinline__ void load_b(uint32_t* b, const float (*rows)[kPitch], int row, int column) {
  const int group = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  b[0] = to_tf32(rows[row + 2 * t][column + group]);
  b[1] = to_tf32(rows[row + 2 * t + 1][column + group]);
}

template <class T>
__device__ __forceinline__ void prepare(const Problem& p, const CUtensorMap& map_k, const CUtensorMap& map_q) {
  extern __shared__ unsigned char raw[];
  auto& smem = *reinterpret_cast<SharedMemory<T>*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t{1023});
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, t = lane % 4;
  const int slot = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
  const int ratio = p.value_heads / p.heads;
  grid_launch_dependents();

  if (p.cu_seqlens != nullptr) {
    const int64_t row_bytes = int64_t(p.value_heads) * kHeadDim * 2;
    clear_share(p.out, monotone_offset(p, p.sequences) * row_bytes, p.tokens * row_bytes);
    if (p.checkpoint_chunks) {
      const int64_t bytes = p.checkpoints.stride_row * (p.checkpoints.dtype == DataType::kFloat32 ? 4 : 2);
      clear_share(p.checkpoints.data, checkpoints_before(p, p.sequences) * bytes, p.checkpoint_rows * bytes);
    }
  }

  const int index = sequence_of_slot(p, slot);
  if (index < 0) return;
  const Sequence seq = sequence_at(p, index);
  const int chunk = slot - seq.slot;
  if (chunk >= seq.chunks()) return;
  const int token = seq.start + chunk * kChunk;
  const int live = min(kChunk, seq.length - chunk * kChunk);

  // ---- K and Q
  if (threadIdx.x == 0) {
    mbarrier_init(&smem.loaded, 1);
    mbarrier_init_fence();
    mbarrier_expect(&smem.loaded, kLoadBytes);
    for (int panel = 0; panel < 2; ++panel) {
      load_tile(smem.k[panel], &map_k, panel * 64, head, token, seq.batch, &smem.loaded);
      load_tile(smem.q[panel], &map_q, panel * 64, head, token, seq.batch, &smem.loaded);
    }
  }
  __syncthreads();
  mbarrier_wait(&smem.loaded, 0);

  // ---- K K^T and Q K^T, rows 16 warp + group (+ 8), columns 8 n + 2 t (+ 1) in element 4 n + {0, 1} (+ 2)
  float kk[32], qk[32];
  {
    const uint64_t desc_k = smem_descriptor(smem_address(smem.k), 16, 1024);
    const uint64_t desc_q = smem_descriptor(smem_address(smem.q), 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint64_t at = step / 4 * 512 + step % 4 * 2;
      wgmma_64x64<T>(kk, desc_k + at, desc_k + at, step > 0);
      wgmma_64x64<T>(qk, desc_q + at, desc_k + at, step > 0);
    }
    wgmma_commit();
    if (p.l2norm) {
      const int row = threadIdx.x % 64;
      threadIdx.x < 64 ? reciprocal_norms<T>(smem.k, smem.norm_k, row) : reciprocal_norms<T>(smem.q, smem.norm_q, row);
    } else {
      (threadIdx.x < 64 ? smem.norm_k : smem.norm_q)[threadIdx.x % 64] = 1.f;
    }
    wgmma_wait<0>();
    tie(kk);
    tie(qk);
  }
  __syncthreads();  // the norms are written, and nobody reads K and Q any more

  T* const inverse_tile = smem.k[0];
  const uint32_t tile_row = 16 * warp + (lane / 8 & 1) * 8 + lane % 8;  // the row this lane names to stmatrix
  auto tile_offset = [&](int pair) { return tile_row * 128 + ((2 * pair + lane / 16) ^ (tile_row & 7)) * 16; };

  for (int member = 0; member < ratio; ++member) {
    const int buffer = member % kWarps;
    const int64_t chunk_head = int64_t(slot) * p.value_heads + head * ratio + member;

    // ---- Gates of the next four v-heads, one a warp
    if (buffer == 0) {
      __syncthreads();  // the last group's gates have been read
      if (member + warp < ratio) {
        auto* out = reinterpret_cast<ChunkGates*>(p.workspace + p.offsets.gates) + chunk_head + warp;
        chunk_gates(p, smem, warp, seq, token, live, head * ratio + member + warp, out);
      }
      __syncthreads();
    }

    // ---- P into its tile, L into the block matrix. Two tiles take turns: the store of the last v-head may be under way.
    T* const scores_tile = member % 2 ? smem.q[0] : smem.k[1];
    {
      uint32_t scores[16];
      float row_cumulative[2], row_beta[2], row_norm_q[2];
      int row_resets[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 16 * warp + group + 8 * i;
        row_cumulative[i] = smem.cumulative[buffer][row];
        row_resets[i] = smem.resets[buffer][row];
        row_beta[i] = smem.beta[buffer][row] * smem.norm_k[row];
        row_norm_q[i] = p.scale * smem.norm_q[row];
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        scores[2 * n] = scores[2 * n + 1] = 0;
        if (n >= 2 * warp + 2) continue;  // above the diagonal
        float score[4], system[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = 16 * warp + group + e / 2 * 8, column = 8 * n + 2 * t + e % 2;
          const bool same = row_resets[e / 2] == smem.resets[buffer][column];
          const float decay = same ? exp2f(row_cumulative[e / 2] - smem.cumulative[buffer][column]) : 0.f;
          const float scaled = decay * smem.norm_k[column];
          const bool on = row < live;
          score[e] = on && row >= column ? scaled * row_norm_q[e / 2] * qk[4 * n + e] : 0.f;
          system[e] = on && row > column ? scaled * row_beta[e / 2] * kk[4 * n + e] : 0.f;
        }
        scores[2 * n] = pack2<T>(score[0], score[1]);
        scores[2 * n + 1] = pack2<T>(score[2], score[3]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          *reinterpret_cast<float2*>(&smem.blocks[16 * warp + group + 8 * i][8 * n + 2 * t]) = {system[2 * i],
                                                                                               system[2 * i + 1]};
        }
      }
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        store_matrix(smem_address(scores_tile) + tile_offset(pair), &scores[4 * pair]);
      }
    }
    __syncwarp();

    // ---- Diagonal block, then -(X_ss L_sj) for the blocks left of it as A fragments
    invert_diagonal(smem.blocks, 16 * warp);
    uint32_t left[3][2][4];
    {
      uint32_t diagonal[2][4];
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const float2 upper = *reinterpret_cast<float2*>(&smem.blocks[16 * warp + group][16 * warp + 8 * step + 2 * t]);
        const float2 lower =
            *reinterpret_cast<float2*>(&smem.blocks[16 * warp + group + 8][16 * warp + 8 * step + 2 * t]);
        const float tile[4] = {upper.x, upper.y, lower.x, lower.y};
        accumulator_to_a(diagonal[step], tile, -1.f);
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
            load_b(b, smem.blocks, 16 * warp + 8 * step, 16 * j + 8 * half);
            mma_tf32(product, diagonal[step], b);
          }
          accumulator_to_a(left[j][half], product, 1.f);
        }
      }
    }
    if (threadIdx.x == 0) store_wait_read_if<0>(true);  // the tiles of the last v-head have left shared memory
    __syncthreads();

    // ---- Block rows top down: row m is final, every row below takes its share of it
    float inverse[6][4] = {};
#pragma unroll
    for (int m = 0; m < 3; ++m) {
      if (warp > m) {
#pragma unroll
        for (int n = 0; n < 2 * m + 2; ++n) {
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            uint32_t b[2];
            load_b(b, smem.blocks, 16 * m + 8 * step, 8 * n);
            mma_tf32(inverse[n], left[m][step], b);
          }
        }
      }
      if (warp == m + 1) {
#pragma unroll
        for (int n = 0; n < 2 * m + 2; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            *reinterpret_cast<float2*>(&smem.blocks[16 * warp + group + 8 * i][8 * n + 2 * t]) = {
                inverse[n][2 * i], inverse[n][2 * i + 1]};
          }
        }
      }
      if (m < 2) __syncthreads();
    }

    // ---- The inverse into its tile, both tiles out
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t fragment[4] = {};
      if (pair < warp && pair < 3) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float* tile = inverse[pair < 3 ? 2 * pair + e / 2 : 0];
          fragment[e] = pack2<T>(tile[e % 2 * 2], tile[e % 2 * 2 + 1]);
        }
      } else if (pair == warp) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = group + e % 2 * 8, column = e / 2 * 8 + 2 * t;
          const float2 x = *reinterpret_cast<float2*>(&smem.blocks[16 * warp + row][16 * warp + column]);
          fragment[e] = pack2<T>(row > column ? x.x : 0.f, row > column + 1 ? x.y : 0.f);
        }
      }
      store_matrix(smem_address(inverse_tile) + tile_offset(pair), fragment);
    }
    fence_async_proxy();
    __syncthreads();
    if (threadIdx.x == 0) {
      store_bulk(p.workspace + p.offsets.inverse + chunk_head * kTileBytes, inverse_tile, kTileBytes);
      store_bulk(p.workspace + p.offsets.scores + chunk_head * kTileBytes, scores_tile, kTileBytes);
      store_commit();
    }
  }
  if (threadIdx.x == 0) store_wait_all();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 3)
    atrex_chunk_gdn_prepare_bf16(const __grid_constant__ Problem p, const __grid_constant__ CUtensorMap map_k,
                                 const __grid_constant__ CUtensorMap map_q) {
  prepare<__nv_bfloat16>(p, map_k, map_q);
}
extern "C" __global__ void __launch_bounds__(kThreads, 3)
    atrex_chunk_gdn_prepare_fp16(const __grid_constant__ Problem p, const __grid_constant__ CUtensorMap map_k,
                                 const __grid_constant__ CUtensorMap map_q) {
  prepare<__half>(p, map_k, map_q);
}

void launch_prepare(const Problem& p, bool fp16, const CUtensorMap& map_k, const CUtensorMap& map_q,
                    cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(SharedMemory<__half>) + 1024;
  auto* kernel = fp16 ? atrex_chunk_gdn_prepare_fp16 : atrex_chunk_gdn_prepare_bf16;
  launch(kernel, p.slots * p.heads, kThreads, kSharedBytes, /*overlap=*/false, stream, p, map_k, map_q);
}

}  // namespace atrex::chunk_gdn
