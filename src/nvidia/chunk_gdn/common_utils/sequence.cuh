// Which tokens a sequence owns, and which chunk slots of the workspace.
//
// Sequence i starts at the largest of cu_seqlens[0..i], each clamped to [0, T]: for well-formed offsets that is
// cu_seqlens[i], and malformed ones still give ordered, disjoint ranges inside the tensors. Its chunks take the slots
// from floor(start / 64) + i on; ceil(length / 64) <= floor(end / 64) - floor(start / 64) + 1, so slots never collide
// and no prefix sum over chunk counts is needed.
#pragma once

#include "params.h"  // the target's own

namespace atrex::chunk_gdn {

struct Sequence {
  int batch;   // batch entry that holds the tokens
  int start;   // first token
  int length;  // tokens
  int slot;    // first chunk slot

  __device__ int chunks() const { return (length + kChunk - 1) / kChunk; }
};

// The value, which is the same in all lanes, in a way that tells the compiler so: what follows from it stays in uniform
// registers, where wgmma wants its descriptors.
__device__ __forceinline__ int uniform(int value) { return __reduce_max_sync(0xffffffffu, value); }

__device__ __forceinline__ int64_t load_index(const void* data, bool is_int64, int64_t i) {
  return is_int64 ? __ldg(static_cast<const long long*>(data) + i) : __ldg(static_cast<const int*>(data) + i);
}

__device__ __forceinline__ int load_offset(const Problem& p, int i) {
  const int64_t offset = load_index(p.cu_seqlens, p.cu_seqlens_int64, i);
  return static_cast<int>(offset < 0 ? 0 : offset > p.tokens ? p.tokens : offset);
}

// Largest of the clamped offsets 0..last; called by a full warp.
__device__ __forceinline__ int monotone_offset(const Problem& p, int last) {
  int largest = 0;
  for (int i = threadIdx.x % 32; i <= last; i += 32) largest = max(largest, load_offset(p, i));
  return __reduce_max_sync(0xffffffffu, largest);
}

// Called by a full warp.
__device__ __forceinline__ Sequence sequence_at(const Problem& p, int i) {
  if (p.cu_seqlens == nullptr) return {i, 0, p.tokens, i * ((p.tokens + kChunk - 1) / kChunk)};
  const int start = monotone_offset(p, i);
  const int end = uniform(max(start, load_offset(p, i + 1)));
  return {0, start, end - start, start / kChunk + i};
}

// Starts of the sequences base + lane (at most N), made monotone; `carried` is the largest offset before them.
__device__ __forceinline__ int monotone_starts(const Problem& p, int base, int carried) {
  const int lane = threadIdx.x % 32;
  int start = load_offset(p, min(base + lane, p.sequences));
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(0xffffffffu, start, step);
    if (lane >= step) start = max(start, left);
  }
  return max(start, carried);
}

// The last sequence whose slots begin at or before `slot` (which can lie past that sequence's last chunk); if there is
// none, an empty one. Called by a full warp.
__device__ __forceinline__ Sequence sequence_of_slot(const Problem& p, int slot) {
  if (p.cu_seqlens == nullptr) {
    const int per_batch = (p.tokens + kChunk - 1) / kChunk;
    return {slot / per_batch, 0, p.tokens, slot / per_batch * per_batch};
  }
  Sequence found{};
  int carried = 0;
  for (int base = 0; base < p.sequences; base += 31) {  // 32 starts give 31 sequences
    const int i = base + threadIdx.x % 32;
    const int start = monotone_starts(p, base, carried);
    const uint32_t before = __ballot_sync(0xffffffffu, i < p.sequences && start / kChunk + i <= slot);
    const int last = min(__popc(before), 31) - 1;
    if (last < 0) break;
    const int first_token = __shfl_sync(0xffffffffu, start, last);
    found = {0, first_token, __shfl_sync(0xffffffffu, start, last + 1) - first_token,
             first_token / kChunk + base + last};
    if (last < 30) break;
    carried = first_token;
  }
  return found;
}

// Checkpoints of the sequences before `end`: sum of len / (64 checkpoint_chunks). Called by a full warp.
__device__ __forceinline__ int checkpoints_before(const Problem& p, int end) {
  const int stride = p.checkpoint_chunks * kChunk;
  if (p.cu_seqlens == nullptr) return end * (p.tokens / stride);
  int count = 0;
  int carried = 0;
  for (int base = 0; base < end; base += 31) {  // 32 starts give 31 lengths
    const int lane = threadIdx.x % 32;
    const int start = monotone_starts(p, base, carried);
    const int next = __shfl_down_sync(0xffffffffu, start, 1);
    if (lane < 31 && base + lane < end) count += (next - start) / stride;
    carried = __shfl_sync(0xffffffffu, start, 31);
  }
  return __reduce_add_sync(0xffffffffu, count);
}

}  // namespace atrex::chunk_gdn
