// Thin wrappers over the Hopper instructions that only this target uses: mbarriers, bulk copies, wgmma, matrix moves.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "instructions.cuh"
#include "params.h"

namespace atrex::chunk_gdn {

// ---- mbarriers ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals));
}
// Makes the initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}
// Predicated inside the asm: a C++ branch would end the basic block while wgmmas are in flight, and ptxas then
// serialises all of them.
__device__ __forceinline__ void mbarrier_arrive_if(uint64_t* barrier, bool on) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(smem_address(barrier)),
      "r"(int(on))
      : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "LOOP: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra LOOP;\n"
      "DONE:}" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
}
// One lane of a full warp. Behind a comparison of the lane instead, ptxas wraps each copy instruction in a loop over
// the lanes that might be there.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected;
}
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_sync_if(int id, int threads, bool on) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p bar.sync %0, %1;}" ::"r"(id), "r"(threads), "r"(int(on))
               : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- clusters -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}
__device__ __forceinline__ int cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return int(size);
}
// All blocks of the cluster have come here. Orders no memory: of barriers, mbarrier_init_fence does.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Arrives at another block's barrier. Relaxed, since a release would wait for all memory: it publishes nothing.
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [remote];}" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}

// ---- copies -------------------------------------------------------------------------------------------------------

// Panels of 64 features of a chunk's tokens.
__device__ __forceinline__ void load_panels(void* to, const CUtensorMap* map, int panel, int head, int token, int batch,
                                            uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(smem_address(to)),
      "l"(map), "r"(0), "r"(token), "r"(panel), "r"(head), "r"(batch), "r"(smem_address(barrier))
      : "memory");
}
// The same for every block of a cluster of two, each at the same place and at its own barrier.
__device__ __forceinline__ void load_panels_for_both(void* to, const CUtensorMap* map, int panel, int head, int token,
                                                     int batch, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(smem_address(to)),
      "l"(map), "r"(0), "r"(token), "r"(panel), "r"(head), "r"(batch), "r"(smem_address(barrier)), "h"(uint16_t{3})
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void load_bulk(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_address(to)),
      "l"(from), "r"(bytes), "r"(smem_address(barrier))
      : "memory");
}
__device__ __forceinline__ void store_panel(const CUtensorMap* map, const void* from, int panel, int head, int token,
                                            int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(map), "r"(0),
      "r"(token), "r"(panel), "r"(head), "r"(batch), "r"(smem_address(from))
      : "memory");
}
__device__ __forceinline__ void store_bulk(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(smem_address(from)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the committed stores have read shared memory.
__device__ __forceinline__ void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void store_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders shared-memory stores, of this thread or made visible to it by a barrier, before later reads by wgmma and the
// copy engine.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- counters between kernels that run side by side ----------------------------------------------------------------

// Publishes this thread's stores, completed bulk stores, and what a barrier has ordered before them.
__device__ __forceinline__ void signal(uint32_t* counter) {
  asm volatile("fence.proxy.async;\nfence.acq_rel.gpu;\nred.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter)
               : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
// Orders what an acquire has made visible before later bulk loads.
__device__ __forceinline__ void fence_async_proxy_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---- matrix moves -------------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrix_transposed(uint32_t* fragment, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_matrix_transposed(uint32_t address, const uint32_t* fragment) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}
__device__ __forceinline__ void store_matrix(uint32_t address, const uint32_t* fragment) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(fragment[0]),
               "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}
__device__ __forceinline__ float4 load_shared4(const float* pointer) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(smem_address(pointer)));
  return value;
}

// ---- warpgroup matrix products ------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// ptxas moves no load from shared memory across it, and so nothing that needs what is loaded. Takes no time.
__device__ __forceinline__ void hold_loads() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }
// Ties registers to this place, so that the compiler moves no access across a fence or a wait.
template <int kCount>
__device__ __forceinline__ void tie(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void tie(uint32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// Descriptor of an operand in unswizzled 8x8 blocks of 128 bytes; byte offsets between blocks along the reduction
// (`lead`) and across it (`stride`).
__device__ __forceinline__ uint64_t block_descriptor(uint32_t address, uint32_t lead, uint32_t stride) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(lead >> 4) << 16 | uint64_t(stride >> 4) << 32;
}

// Descriptor of a 128-byte-swizzled operand; byte offsets between 8-row groups (`stride`) and, for an operand whose
// reduction runs over rows, between 64-column panels (`lead`).
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address, uint32_t lead, uint32_t stride) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(lead >> 4) << 16 | uint64_t(stride >> 4) << 32 | 1ull << 62;
}

#define ATREX_F8(d, o)                                                                                        \
  "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), "+f"(d[o + 6]), \
      "+f"(d[o + 7])
#define ATREX_F32(d, o) ATREX_F8(d, o), ATREX_F8(d, o + 8), ATREX_F8(d, o + 16), ATREX_F8(d, o + 24)
#define ATREX_D32                                                                                                   \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31}"
#define ATREX_D64                                                                                                    \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
  "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
  "%58,%59,%60,%61,%62,%63}"
#define ATREX_WGMMA_RS64(TYPE)                                                                                    \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE \
               " " ATREX_D32 ", {%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}\n"                                         \
               : ATREX_F32(d, 0)                                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)))
#define ATREX_WGMMA_RS128(TYPE)                                                                                  \
  asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE \
               " " ATREX_D64 ", {%64,%65,%66,%67}, %68, p, 1, 1, 1;\n}\n"                                        \
               : ATREX_F32(d, 0), ATREX_F32(d, 32)                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define ATREX_WGMMA_SS64(TYPE)                                                                                    \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE \
               " " ATREX_D32 ", %32, %33, p, 1, 1, 0, 0;\n}\n"                                                    \
               : ATREX_F32(d, 0)                                                                                  \
               : "l"(a), "l"(b), "r"(int(accumulate)))

// d[64 x 64] (+)= a[64 x 16] b[16 x 64]; a in registers, b's rows are the 64 columns (K-major).
template <class T>
__device__ __forceinline__ void wgmma_64x64(float (&d)[32], const uint32_t* a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    ATREX_WGMMA_RS64("bf16");
  } else {
    ATREX_WGMMA_RS64("f16");
  }
}
// d[64 x 64] += a[64 x 64] b[64 x 64]^T with b a triangular tile in shared memory (params.h).
template <class T>
__device__ __forceinline__ void wgmma_triangular(float (&d)[32], const uint32_t (&a)[16], const TriangularTile& b) {
  const uint64_t whole = block_descriptor(smem_address(b.packed.whole), 128, kGroupBytes);
  const uint64_t lower = block_descriptor(smem_address(b.zeros), 128, 2 * kGroupBytes);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint64_t column =
        step < 2 ? whole + step * (sizeof(b.packed.whole[0]) / 16) : lower + (step - 2) * (kGroupBytes / 16);
    wgmma_64x64<T>(d, a + 4 * step, column, true);
  }
}
// d[64 x 128] += a[64 x 16] b[16 x 128]; a in registers, b's rows are the reduction (MN-major).
template <class T>
__device__ __forceinline__ void wgmma_64x128(float (&d)[64], const uint32_t* a, uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    ATREX_WGMMA_RS128("bf16");
  } else {
    ATREX_WGMMA_RS128("f16");
  }
}
// d[64 x 64] (+)= a[64 x 16] b[16 x 64]; both in shared memory, K-major.
template <class T>
__device__ __forceinline__ void wgmma_64x64(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    ATREX_WGMMA_SS64("bf16");
  } else {
    ATREX_WGMMA_SS64("f16");
  }
}

#undef ATREX_F8
#undef ATREX_F32
#undef ATREX_D32
#undef ATREX_D64
#undef ATREX_WGMMA_RS64
#undef ATREX_WGMMA_RS128
#undef ATREX_WGMMA_SS64

}  // namespace atrex::chunk_gdn
