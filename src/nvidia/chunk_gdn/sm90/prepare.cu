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
// other's. In every warpgroup, warp w owns rows 16w..16w+15.
#include "chunk.cuh"
#include "gates.cuh"
#include "inverse.cuh"
#include "launch.h"
#include "ptx.cuh"
#include "sequence.cuh"

namespace atrex::chunk_gdn {
namespace {

constexpr int kTeams = 2;
constexpr int kThreads = 512;
constexpr int kTeamThreads = kThreads / kTeams;
static_assert(kItemHeads == 4, "one systems warp loads the gates of one v-head");
constexpr int kLoadBytes = 4 * kTileElements * 2;

// One work item.
struct Item {
  int64_t first_tile;       // index of the first v-head's tiles
  int batch, token, live;   // first token; tokens inside the sequence, none if the slot is not used
  int first_head, members;  // v-heads
  int counter;              // of the items in the order of their slots
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
  // Zero above the diagonal from the start.
  PackedTile inverse;
  PackedTile scores[2];  // one can be written while the other is stored
  float systems[2][kChunk][kPitch];
  SystemInfo infos[2];
  float norm_k[kChunk], norm_q[kChunk];
  // Of two items in turn: the next one's arrive while this one's are in use.
  // Decay: log2 of the decay since the chunk's start without the resets, and kResetLog2 for each reset.
  float2 decay[2][kItemHeads][kChunk];
  float beta[2][kItemHeads][kChunk];
  Item items[3];       // this one, the next, whose tiles are fetched, and the one after it, which is looked up
  uint64_t item_full;  // K and Q are there, and the gates
  uint64_t system_full[2], system_empty[2];
};

// Barriers of a team.
enum TeamBarrier { kInverseBarrier, kSystemsBarrier, kTeamBarriers };

__device__ __forceinline__ int barrier_id(TeamBarrier barrier) {
  return 1 + threadIdx.x / kTeamThreads * kTeamBarriers + barrier;
}

// Items are visited chunk by chunk, across the sequences (as if these were equally long). A scan beside the preparation
// wants the first chunks first; one behind it finds in L2 what was written last, so they come last.
__device__ __forceinline__ int slots_per_sequence(const Problem& p) {
  return (p.slots + p.sequences - 1) / p.sequences;
}
__device__ __forceinline__ int visited_items(const Problem& p) {
  return slots_per_sequence(p) * p.sequences * p.heads * item_parts(p.heads, p.value_heads);
}

// One warp: the item visited as the index-th.
__device__ __forceinline__ Item find_item(const Problem& p, int index) {
  const int ratio = p.value_heads / p.heads;
  const int parts = item_parts(p.heads, p.value_heads);
  const int visit = index / (p.heads * parts), head = index / parts % p.heads;
  const int turn = visit / p.sequences, per_sequence = slots_per_sequence(p);
  const int slot = visit % p.sequences * per_sequence + (p.overlap ? turn : per_sequence - 1 - turn);
  const Sequence seq = slot < p.slots ? sequence_of_slot(p, slot) : Sequence{};
  Item item;
  item.batch = seq.batch;
  item.token = seq.start + (slot - seq.slot) * kChunk;
  item.live = min(kChunk, seq.length - (slot - seq.slot) * kChunk);
  item.first_head = head * ratio + index % parts * kItemHeads;
  item.members = min(kItemHeads, (head + 1) * ratio - item.first_head);
  item.first_tile = int64_t(slot) * p.value_heads + item.first_head;
  item.counter = (slot * p.heads + head) * parts + index % parts;
  return item;
}

// The systems warpgroup asks for an item's K and Q; its gates are on their way on return.
template <class T>
__device__ __forceinline__ LaneGates fetch_item(int warp, const Problem& p, TeamMemory<T>& smem,
                                                const CUtensorMap& map_k, const CUtensorMap& map_q, const Item& item) {
  if (warp == 0 && elect_one()) {
    if (item.live > 0) {
      const int head = item.first_head / (p.value_heads / p.heads);
      mbarrier_expect(&smem.item_full, kLoadBytes);
      load_panels(smem.k, &map_k, 0, head, item.token, item.batch, &smem.item_full);
      load_panels(smem.q, &map_q, 0, head, item.token, item.batch, &smem.item_full);
    } else {
      mbarrier_arrive(&smem.item_full);
    }
  }
  LaneGates gates{};
  if (warp < item.members && item.live > 0) gates = load_gates(p, item, warp);
  return gates;
}

// Completes the item: `item_full` also waits for the gates.
template <class T>
__device__ __forceinline__ void complete_item(int warp, const Problem& p, TeamMemory<T>& smem, const LaneGates& gates,
                                              int buffer) {
  share_gates(p, smem.decay[buffer][warp], smem.beta[buffer][warp], gates);
  mbarrier_arrive(&smem.item_full);
}

// One warp: the gates of one v-head for the scan.
__device__ __forceinline__ void store_gates(const float2* decays, const float* betas, const float* norms_k,
                                            const float* norms_q, float scale, int live, ChunkGates* out) {
  const float2 end = decays[kChunk - 1];
  for (int t = threadIdx.x % 32; t < kChunk; t += 32) {
    const float2 decay = decays[t];
    const float since_start = decay.y == 0.f ? exp2_approximate(decay.x) : 0.f;
    const float until_end = decay.y == end.y ? exp2_approximate(end.x - decay.x) : 0.f;
    const float norm_k = t < live ? norms_k[t] : 0.f;
    const float norm_q = t < live ? norms_q[t] : 0.f;
    const float beta = betas[t];
    const int place = gate_place(t);
    out->beta[place] = beta;
    out->decay_k[place] = beta * since_start * norm_k;
    out->decay_u[place] = until_end * norm_k;
    out->decay_q[place] = scale * since_start * norm_q;
  }
  if (threadIdx.x % 32 < 4) out->decay_chunk[threadIdx.x % 32] = end.y == 0.f ? exp2_approximate(end.x) : 0.f;
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
    uint32_t scores[4];
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
      store_matrix(tile + tile_block(warp, block), scores);
    }
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

// The inverse warpgroups of all blocks, which have to wait at first: a thread's share of clearing [begin, end) bytes,
// both multiples of 16.
__device__ __forceinline__ void clear_share(void* data, int64_t begin, int64_t end) {
  const int64_t step = int64_t(gridDim.x) * kTeams * 128 * 16;
  const int64_t share = (int64_t(blockIdx.x) * kTeams + threadIdx.x / kTeamThreads) * 128 + threadIdx.x % 128;
  for (int64_t at = begin + share * 16; at < end; at += step) {
    *reinterpret_cast<uint4*>(static_cast<char*>(data) + at) = uint4{};
  }
}

// Reciprocal norms of the 64 rows of a swizzled tile pair, by a warpgroup: two threads a row, one panel each.
template <class T>
__device__ __forceinline__ void reciprocal_norms(const T (&panels)[2][kTileElements], float* out) {
  const int row = threadIdx.x % 128 / 2;
  const float norm = reciprocal_norm<T>(reinterpret_cast<const uint4*>(panels[threadIdx.x % 2]) + row * 8, row);
  if (threadIdx.x % 2 == 0) out[row] = norm;
}

template <class T>
__device__ __forceinline__ void prepare(const Problem& p, const CUtensorMap& map_k, const CUtensorMap& map_q) {
  extern __shared__ __align__(1024) unsigned char dynamic_smem[];
  // Through shuffles, so that the compiler knows them to be uniform in the warp.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x % 128 / 32, 0);
  auto& smem = reinterpret_cast<TeamMemory<T>*>(dynamic_smem)[warpgroup / 2];
  const bool elected = threadIdx.x % 128 == 0;
  const int items = visited_items(p);
  const int first = blockIdx.x * kTeams + warpgroup / 2, stride = gridDim.x * kTeams;
  auto* ready = reinterpret_cast<uint32_t*>(p.workspace + p.offsets.ready);

  // The first warp of the systems warpgroup, which has least to do, looks items up: that takes loads one after the
  // other. So the first item is looked up while the block gets ready.
  auto look_up = [&](int index, int place) {
    if (warpgroup % 2 == 1 && warp == 0 && index < items) {
      const Item item = find_item(p, index);
      if (threadIdx.x % 32 == 0) smem.items[place] = item;
    }
  };
  if (warpgroup == 0 && warp == 1 && elect_one()) {
    prefetch_map(&map_k);
    prefetch_map(&map_q);
  }
  look_up(first, 0);
  if (threadIdx.x % kTeamThreads == 0) {
    mbarrier_init(&smem.item_full, 1 + 128);  // the loads and the systems warpgroup, which shares the gates
    for (int buffer = 0; buffer < 2; ++buffer) {
      mbarrier_init(&smem.system_full[buffer], 128);
      mbarrier_init(&smem.system_empty[buffer], 128);
    }
    mbarrier_init_fence();
  }
  for (int i = threadIdx.x % kTeamThreads; i < int(3 * sizeof(PackedTile) / 16); i += kTeamThreads) {
    reinterpret_cast<uint4*>(&smem.inverse)[i] = uint4{};
  }
  fence_async_proxy();
  grid_wait();  // the counters are zero
  grid_launch_dependents();
  __syncthreads();
  if (p.cu_seqlens != nullptr && warpgroup % 2 == 0) clear_unused(p, clear_share);
  if (first >= items) return;

  if (warpgroup % 2 == 0) {
    // ================ Inverse warpgroup
    for (int count = 0;; ++count) {
      const int buffer = count & 1;
      mbarrier_wait(&smem.system_full[buffer], count / 2 & 1);
      const SystemInfo info = smem.infos[buffer];
      if (info.tile < 0) break;
      auto sync = [] { named_barrier_sync(barrier_id(kInverseBarrier), 128); };
      // The systems warpgroup has most to do in its last warp, this one in its first: different schedulers.
      invert<T>(3 - warp, smem.systems[buffer], smem_address(&smem.inverse), sync);
      fence_async_proxy();
      mbarrier_arrive(&smem.system_empty[buffer]);
      sync();
      if (elected) {
        store_bulk(&p.prepared()[info.tile].inverse, &smem.inverse, sizeof(PackedTile));
        store_commit();
        if (p.overlap && info.last_of >= 0) {
          store_wait_all();
          signal(ready + info.last_of);
        }
      }
    }
  } else {
    // ================ Systems warpgroup
    complete_item(warp, p, smem, fetch_item(warp, p, smem, map_k, map_q, smem.items[0]), 0);
    look_up(first + stride, 1);
    int count = 0;  // systems written
    uint32_t parity = 0;
    int place = 0;
    for (int index = first; index < items; index += stride, parity ^= 1) {
      // Wait for the item; with K and Q read, fetch the next.
      mbarrier_wait(&smem.item_full, parity);
      const Item item = smem.items[place];
      const int next_place = place == 2 ? 0 : place + 1;
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
      if (more) next = fetch_item(warp, p, smem, map_k, map_q, smem.items[next_place]);
      look_up(index + 2 * stride, next_place == 2 ? 0 : next_place + 1);
      place = next_place;
      if (item.live > 0) {
        scale_product(warp, qk, smem.norm_q, smem.norm_k, p.scale, item.live, 0);
        scale_product(warp, kk, smem.norm_k, smem.norm_k, 1.f, item.live, 1);
        for (int member = 0; member < item.members; ++member, ++count) {
          // Wait until the inverse warpgroup has released the buffer, fill it, hand it over.
          const int buffer = count & 1;
          mbarrier_wait(&smem.system_empty[buffer], ~(count / 2) & 1);  // at once in the first round
          write_scores_and_system<T>(warp, smem.decay[parity][member], smem.beta[parity][member], qk, kk,
                                     smem_address(&smem.scores[buffer]), smem.systems[buffer]);
          if (threadIdx.x % 128 == 0) {
            smem.infos[buffer] = {item.first_tile + member, member + 1 == item.members ? item.counter : -1};
          }
          fence_async_proxy();
          mbarrier_arrive(&smem.system_full[buffer]);
          if (elected) store_wait_read();  // the other scores tile, written next, is free
          named_barrier_sync(barrier_id(kSystemsBarrier), 128);
          if (elected) {
            store_bulk(&p.prepared()[item.first_tile + member].scores, &smem.scores[buffer], sizeof(PackedTile));
            store_commit();
          }
        }
        if (warp < item.members) {
          store_gates(smem.decay[parity][warp], smem.beta[parity][warp], smem.norm_k, smem.norm_q, p.scale, item.live,
                      &p.prepared()[item.first_tile + warp].gates);
        }
        if (p.overlap) {
          named_barrier_sync(barrier_id(kSystemsBarrier), 128);  // the gates of all warps are stored
          if (elected) {
            store_wait_all();
            signal(ready + item.counter);
          }
        }
      }
      if (more) complete_item(warp, p, smem, next, parity ^ 1);
    }
    const int buffer = count & 1;
    mbarrier_wait(&smem.system_empty[buffer], ~(count / 2) & 1);
    if (threadIdx.x % 128 == 0) smem.infos[buffer].tile = -1;
    mbarrier_arrive(&smem.system_full[buffer]);
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
    launch(atrex_chunk_gdn_reset, {8, kThreads, 0}, /*overlap=*/false, stream, ready, items);
  }
  auto* kernel = fp16 ? atrex_chunk_gdn_prepare_fp16 : atrex_chunk_gdn_prepare_bf16;
  launch(kernel, {blocks, kThreads, kTeams * sizeof(TeamMemory<__half>)}, p.overlap, stream, p, map_k, map_q);
}

}  // namespace atrex::chunk_gdn
