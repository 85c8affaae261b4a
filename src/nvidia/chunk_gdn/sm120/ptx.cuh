// Thin wrappers over the instructions that only this target uses. All of them are in sm_90 as well as in sm_120
// (nothing is family-specific), so that the same sources run on a Hopper card as a stand-in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "instructions.cuh"

namespace atrex::chunk_gdn {

// ---- loads and copies ---------------------------------------------------------------------------------------------

// The pair of words at an address if `on`, else zeros. Without a branch and without a use, so that several of these are
// under way at a time.
__device__ __forceinline__ uint2 load_pair_if(const void* address, bool on) {
  uint2 value;
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0;\n"
      "@p ld.global.nc.v2.b32 {%0, %1}, [%2];}"
      : "=&r"(value.x), "=&r"(value.y)
      : "l"(address), "r"(int(on)));
  return value;
}

__device__ __forceinline__ void store_pair_if(void* address, uint2 value, bool on) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "@p st.global.v2.b32 [%0], {%1, %2};}" ::"l"(address),
      "r"(value.x), "r"(value.y), "r"(int(on))
      : "memory");
}

// Sixteen bytes into shared memory, or zeros if not `on`: then nothing is read.
__device__ __forceinline__ void copy_async_or_clear(uint32_t to, const void* from, bool on) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(on ? 16 : 0) : "memory");
}
// Until the thread's copies have arrived. Other threads see them behind a barrier.
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- matrix moves -------------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrix(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrix_transposed(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}
// An 8x8 matrix that lies across the warp's registers.
__device__ __forceinline__ uint32_t transpose(uint32_t rows) {
  uint32_t columns;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

// ---- warp matrix products -----------------------------------------------------------------------------------------

// d[16 x 8] += a[16 x 16] b[16 x 8]
template <class T>
__device__ __forceinline__ void mma(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace atrex::chunk_gdn
