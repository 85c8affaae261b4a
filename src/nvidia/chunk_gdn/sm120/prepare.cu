// The parallel pass: everything of a chunk that does not depend on the state.
//
// For one chunk and one q/k head, with a = exp(G_i - G_j) the decay between tokens j <= i and r the reciprocal norms:
//   scores   P_ij = scale r_i r_j a_ij (q_i . k_j)                     i >= j
//   system   L_ij = beta_i r_i r_j a_ij (k_i . k_j)                    i > j
//   inverse  X = (I + L)^-1 = I + strictly lower part
// so that u = X (beta o (v - exp(G) o (S^T k))). The unit diagonal stays out of the stored tile: the scan adds that
// term in float32, which keeps bf16's rounding of X off the largest term.
//
// A block of four warps serves one work item, a chunk and a q/k head with up to four v-heads of its group: both
// products once, in registers, warp w those of rows 16w..16w+15, then scores and inverse of one v-head after the other.
// Several blocks share a multiprocessor, so that one's latencies hide the others'.
#include "chunk.cuh"
#include "gates.cuh"
#include "inverse.cuh"
#include "launch.h"
#include "ptx.cuh"
#include "sequence.cuh"
#include "tile.cuh"

namespace atrex::chunk_gdn {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocksPerMultiprocessor = 3;
constexpr int kMaxMembers = kItemHeads;  // one warp loads the gates of one v-head
static_assert(kMaxMembers == kThreads / 32);
constexpr int kClearBlocks = 64;  // behind those of the items: they clear what no sequence owns

// One work item.
struct Item {
  int batch, token, live;         // first token; tokens inside the sequence, none if the slot is not used
  int slot, first_head, members;  // v-heads
};

struct Memory {
  union {
    struct {
      unsigned char k[kTileBytes], q[kTileBytes];
    } tiles;
    struct {  // once the products are in registers
      float system[kChunk][kPitch];
      float norm_k[kChunk], norm_q[kChunk];
      // log2 of the decay since the chunk's start without the resets, and kResetLog2 for each reset
      float2 decay[kMaxMembers][kChunk];
      float beta[kMaxMembers][kChunk];
    } work;
  };
  Item item;
};
static_assert(kBlocksPerMultiprocessor * (sizeof(Memory) + 1024) <= 100 * 1024, "that many fit a multiprocessor");

// Reciprocal norm of a row: threads 2 r and 2 r + 1 return that of row r.
template <class T>
__device__ __forceinline__ float row_norm(const unsigned char* tile) {
  const int row = threadIdx.x / 2;
  return reciprocal_norm<T>(reinterpret_cast<const uint4*>(tile) + row * (kRowBytes / 16) + threadIdx.x % 2 * 8, row);
}

// Clears this block's share of [begin, end) bytes; both multiples of 16.
__device__ __forceinline__ void clear_share(void* data, int64_t begin, int64_t end, int share) {
  for (int64_t at = begin + (int64_t(share) * kThreads + threadIdx.x) * 16; at < end;
       at += kClearBlocks * kThreads * 16) {
    *reinterpret_cast<uint4*>(static_cast<char*>(data) + at) = uint4{};
  }
}

// One warp: the item with this index.
__device__ __forceinline__ Item find_item(const Problem& p, int index) {
  const int ratio = p.value_heads / p.heads;
  const int parts = item_parts(p.heads, p.value_heads);
  const int slot = index / (p.heads * parts), head = index / parts % p.heads;
  const Sequence seq = sequence_of_slot(p, slot);
  Item item;
  item.batch = seq.batch;
  item.token = seq.start + (slot - seq.slot) * kChunk;
  item.live = min(kChunk, seq.length - (slot - seq.slot) * kChunk);
  item.slot = slot;
  item.first_head = head * ratio + index % parts * kMaxMembers;
  item.members = min(kMaxMembers, (head + 1) * ratio - item.first_head);
  return item;
}

// One warp: the gates of one v-head for the scan.
__device__ __forceinline__ void store_gates(const Memory& smem, int member, float scale, int live, ChunkGates& out) {
  const auto& work = smem.work;
  const float2 end = work.decay[member][kChunk - 1];
  for (int t = threadIdx.x % 32; t < kChunk; t += 32) {
    const float2 decay = work.decay[member][t];
    const float since_start = decay.y == 0.f ? exp2_approximate(decay.x) : 0.f;
    const float until_end = decay.y == end.y ? exp2_approximate(end.x - decay.x) : 0.f;
    const float norm_k = t < live ? work.norm_k[t] : 0.f;
    const float norm_q = t < live ? work.norm_q[t] : 0.f;
    const float beta = work.beta[member][t];
    out.beta[t] = beta;
    out.decay_k[t] = beta * since_start * norm_k;
    out.decay_u[t] = until_end * norm_k;
    out.decay_q[t] = scale * since_start * norm_q;
  }
  if (threadIdx.x % 32 < 4) out.decay_chunk[threadIdx.x % 32] = end.y == 0.f ? exp2_approximate(end.x) : 0.f;
}

// One v-head's scores into their tile and its system, this warp's rows up to the diagonal, into the block matrix.
template <class T>
__device__ __forceinline__ void write_scores_and_system(int warp, const float2* decays, const float* betas,
                                                        const float (&qk)[32], const float (&kk)[32], uint4* tile,
                                                        float (*blocks)[kPitch]) {
  const int lane = threadIdx.x % 32, row = 16 * warp + lane / 4, t = lane % 4;
  const float2 rows[2] = {decays[row], decays[row + 8]};
  const float beta[2] = {betas[row], betas[row + 8]};
  tile += warp * (warp + 1) / 2 * 32 + lane;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block > warp) continue;
    uint32_t scores[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = 2 * block + half;
      const float4 columns = *reinterpret_cast<const float4*>(decays + 8 * n + 2 * t);
      float system[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 decay = decay_between(rows[i], columns);
        const int e = 4 * n + 2 * i;
        scores[2 * i + half] = pack2<T>(decay.x * qk[e], decay.y * qk[e + 1]);
        system[2 * i] = decay.x * beta[i] * kk[e];
        system[2 * i + 1] = decay.y * beta[i] * kk[e + 1];
      }
      store_accumulator(blocks, 16 * warp, 8 * n, system);
    }
    tile[block * 32] = {scores[0], scores[1], scores[2], scores[3]};
  }
}

// Q K^T and K K^T, rows 16 warp + group (+ 8), columns 8 n + 2 t (+ 1) in element 4 n + {0, 1} (+ 2); up to the
// diagonal.
template <class T>
__device__ __forceinline__ void multiply(int warp, float (&qk)[32], float (&kk)[32], uint32_t q, uint32_t k) {
  const BlockAddress a_block = BlockAddress::by_columns(), b_block = BlockAddress::by_rows();
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    uint32_t a_q[4], a_k[4];
    load_matrix(a_q, a_block(q, warp, step));
    load_matrix(a_k, a_block(k, warp, step));
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block > warp) continue;
      uint32_t b[4];
      load_matrix(b, b_block(k, block, step));
      mma<T>(qk + 8 * block, a_q, b[0], b[1]);
      mma<T>(qk + 8 * block + 4, a_q, b[2], b[3]);
      mma<T>(kk + 8 * block, a_k, b[0], b[1]);
      mma<T>(kk + 8 * block + 4, a_k, b[2], b[3]);
    }
  }
}

template <class T>
__device__ __forceinline__ void prepare(const Problem& p) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<Memory*>(dynamic_smem);
  // Later rows are longer: blocks take turns in which of their warps has the last ones, since a multiprocessor gives
  // each warp of a block to a scheduler of its own. Through a shuffle, so that the compiler knows it to be uniform in
  // the warp.
  const int warp = __shfl_sync(0xffffffffu, (threadIdx.x / 32 + blockIdx.x) % 4, 0);
  const int items = p.slots * p.heads * item_parts(p.heads, p.value_heads);
  if (blockIdx.x >= items) {
    const int share = blockIdx.x - items;
    return clear_unused(p, [=](void* data, int64_t begin, int64_t end) { clear_share(data, begin, end, share); });
  }

  if (warp == 0) {
    const Item found = find_item(p, blockIdx.x);
    if (threadIdx.x % 32 == 0) smem.item = found;
  }
  __syncthreads();
  const Item item = smem.item;
  if (item.live <= 0) return;
  const uint32_t k = smem_address(smem.tiles.k), q = smem_address(smem.tiles.q);
  const int head = item.first_head / (p.value_heads / p.heads);
  TileCopy<kThreads>(k, p.k, item.batch, item.token, head, item.live).all();
  TileCopy<kThreads>(q, p.q, item.batch, item.token, head, item.live).all();
  LaneGates gates{};
  if (warp < item.members) gates = load_gates(p, item, warp);
  copy_wait();
  __syncthreads();

  float qk[32] = {}, kk[32] = {};
  multiply<T>(warp, qk, kk, q, k);
  float norm_k = 1.f, norm_q = 1.f;
  if (p.l2norm) {
    norm_k = row_norm<T>(smem.tiles.k);
    norm_q = row_norm<T>(smem.tiles.q);
  }
  __syncthreads();  // K and Q are read: their place is free
  auto& work = smem.work;
  if (threadIdx.x % 2 == 0) {
    work.norm_k[threadIdx.x / 2] = norm_k;
    work.norm_q[threadIdx.x / 2] = norm_q;
  }
  share_gates(p, work.decay[warp], work.beta[warp], gates);
  __syncthreads();

  scale_product(warp, qk, work.norm_q, work.norm_k, p.scale, item.live, 0);
  scale_product(warp, kk, work.norm_k, work.norm_k, 1.f, item.live, 1);
  if (warp < item.members) {
    store_gates(smem, warp, p.scale, item.live, p.prepared(item.slot, item.first_head + warp)->gates);
  }
  for (int member = 0; member < item.members; ++member) {
    Prepared* prepared = p.prepared(item.slot, item.first_head + member);
    if (member > 0) __syncthreads();  // the matrix before is no longer read
    write_scores_and_system<T>(warp, work.decay[member], work.beta[member], qk, kk, prepared->scores, work.system);
    __syncwarp();
    invert<T>(warp, work.system, prepared->inverse);
  }
  // Not earlier: blocks of the scan that come while these fill the card crowd on the few multiprocessors with room.
  grid_launch_dependents();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    atrex_chunk_gdn_prepare_bf16(const __grid_constant__ Problem p) {
  prepare<__nv_bfloat16>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    atrex_chunk_gdn_prepare_fp16(const __grid_constant__ Problem p) {
  prepare<__half>(p);
}

void launch_prepare(const Problem& p, bool fp16, cudaStream_t stream) {
  const int items = p.slots * p.heads * item_parts(p.heads, p.value_heads);
  const int blocks = items + (p.cu_seqlens != nullptr ? kClearBlocks : 0);
  auto* kernel = fp16 ? atrex_chunk_gdn_prepare_fp16 : atrex_chunk_gdn_prepare_bf16;
  launch(kernel, {blocks, kThreads, sizeof(Memory)}, /*overlap=*/false, stream, p);
}

}  // namespace atrex::chunk_gdn
