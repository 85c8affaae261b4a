// Where a state's elements lie in the registers of the warpgroup that owns the slice.
#pragma once

#include "params.h"

namespace atrex::chunk_gdn {

// Element i of a thread's S^T fragment: value row and key column inside the slice.
__device__ __forceinline__ int fragment_row(int i) {
  return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
}
__device__ __forceinline__ int fragment_column(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }
// The value that its row stands for.
__device__ __forceinline__ int fragment_value(int i) { return fragment_row(i); }

}  // namespace atrex::chunk_gdn
