// Prefill: one block for one tile of tokens and 128 vectors of channels; each thread walks along the tokens of its own
// vector, which it copies ahead into a ring in shared memory. A tile may hold the ends and the beginnings of many
// sequences.
//
// The tile in which a sequence begins owns the sequence's states: the thread that reads an initial state writes the
// final one, so a pool can be written in place. It also computes the sequence's first three tokens, which need the
// initial state, where they lie beyond the tile; the next tile leaves those out.
#include <atomic>

#include "launch.h"
#include "sequence.cuh"

namespace atrex::causal_conv1d {
namespace {

// What a sequence starts from and leaves behind; -1: nothing.
struct Rows {
  int64_t read, write;
  bool live;
};

__device__ __forceinline__ Rows rows_of(const Problem& p, int n) {
  const bool reads =
      p.initial.data != nullptr && (p.has_initial == nullptr || p.has_initial[n * p.stride_has_initial] != 0);
  Rows rows;
  rows.write = p.final.data != nullptr ? row_of(p, p.write, p.final, n) : -1;
  rows.read = reads ? row_of(p, p.read, p.initial, n) : -1;
  rows.live = reads ? rows.read >= 0 : rows.write >= 0 || p.write.data == nullptr;
  return rows;
}

// The three tokens before token `at` of a sequence; those before its start come from row `read` of `initial`.
template <class T>
__device__ __forceinline__ void load_before(const Problem& p, const Span& span, int64_t read, int at, int channel,
                                            Words* before) {
  const int missing = span.start - (at - kBefore);
  Words columns[kBefore] = {};  // of the initial state, from column at - start on
  if (missing > 0 && read >= 0) {
    const T* state = state_of<const T>(p.initial, read);
    const int past = at - span.start;
    if (p.initial.stride_c == 1) {
#pragma unroll
      for (int i = 0; i < kBefore; ++i) {
        if (i < missing) columns[i] = load(state + (past + i) * p.initial.stride_column + channel);
      }
    } else {
      load_columns<T, kBefore>(state, channel, columns);
#pragma unroll
      for (int moved = 0; moved < kBefore - 1; ++moved) {
        if (moved < past) {
#pragma unroll
          for (int i = 0; i < kBefore - 1; ++i) columns[i] = columns[i + 1];
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kBefore; ++i) {
    before[i] = i < missing ? columns[i] : load(token_of<T>(p, span.batch, at - kBefore + i, channel));
  }
}

template <class T>
__device__ __forceinline__ void store_final(const Problem& p, const Span& span, const Rows& rows, int channel) {
  if (rows.write < 0 || (p.pool && span.start == span.end)) return;
  Words last[kBefore];
  load_before<T>(p, span, rows.read, span.end, channel, last);
  T* state = state_of<T>(p.final, rows.write);
  if (p.final.stride_c == 1) {
#pragma unroll
    for (int i = 0; i < kBefore; ++i) store(state + i * p.final.stride_column + channel, last[i]);
  } else {
    store_columns<T, kBefore>(state, channel, last);
  }
}

// A thread's vectors of the tokens to come, in groups of as many as the registers of kPrefillBlocks blocks hold. A
// thread copies and reads its own alone, and so waits for no other.
template <class T>
struct Ring {
  static constexpr int kGroup = sizeof(T) == 2 ? 3 : 4;
  static constexpr int kSlots = 5;

  uint4 vectors[kSlots][kGroup][kThreads];

  // Starts the copies of a group into `slot`, of `tokens` tokens at most, and moves on behind it. A group without a
  // token counts too, so that waiting needs no count.
  __device__ __forceinline__ void copy(int slot, const T*& from, int64_t stride, int& tokens) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i < tokens) {
        const auto to = unsigned(__cvta_generic_to_shared(&vectors[slot][i][threadIdx.x]));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
      }
      from += stride;
    }
    tokens -= kGroup;
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  __device__ __forceinline__ void wait_for_oldest() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kSlots - 1) : "memory");
  }
  __device__ __forceinline__ void wait_for_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
  __device__ __forceinline__ Words get(int slot, int i) const { return load(&vectors[slot][i][threadIdx.x]); }
};

// The outputs of tokens [first, end) of sequence n, and if this tile owns them its states.
template <class T>
__device__ __forceinline__ void run(const Problem& p, const Weights<T>& weights, Ring<T>& ring, const Span& span, int n,
                                    bool owns, int first, int end, int channel) {
  constexpr int kGroup = Ring<T>::kGroup;
  // Before anything waits for an index or a state. No copy outlives this function: the next run fills the ring anew.
  const T* from = token_of<T>(p, span.batch, first, channel);
  int coming = end - first;
#pragma unroll
  for (int slot = 0; slot < Ring<T>::kSlots; ++slot) ring.copy(slot, from, p.x.stride_t, coming);
  Words in[kBefore + kGroup];
  {
    const Rows rows = rows_of(p, n);
    if (!rows.live) {
      clear_output<T>(p, span.batch, first, end, channel);
      ring.wait_for_all();
      return;
    }
    load_before<T>(p, span, rows.read, first, channel, in);
    if (owns) store_final<T>(p, span, rows, channel);
  }
  T* to = output_of<T>(p, span.batch, first, channel);
  int left = end - first, slot = 0;
#pragma unroll 1
  for (; left >= kGroup; left -= kGroup) {
    Words out[kGroup];
    ring.wait_for_oldest();
#pragma unroll
    for (int i = 0; i < kGroup; ++i) in[kBefore + i] = ring.get(slot, i);
    convolve<T, kGroup>(weights, p.silu, in, out);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      store(to, out[i]);
      to += p.channels;
    }
#pragma unroll
    for (int i = 0; i < kBefore; ++i) in[i] = in[kGroup + i];
    ring.copy(slot, from, p.x.stride_t, coming);
    slot = slot + 1 == Ring<T>::kSlots ? 0 : slot + 1;
  }
  ring.wait_for_all();
#pragma unroll 1
  for (int i = 0; i < left; ++i) {
    Words few[kBefore + 1] = {in[0], in[1], in[2], ring.get(slot, i)}, out[1];
    convolve<T, 1>(weights, p.silu, few, out);
    store(to, out[0]);
#pragma unroll
    for (int j = 0; j < kBefore; ++j) in[j] = few[j + 1];
    to += p.channels;
  }
}

// The first sequence that begins at `token` or later; p.sequences if none does.
__device__ __forceinline__ int first_sequence_from(const Problem& p, int token) {
  int low = 0, high = p.sequences;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (offset(p, middle) < token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class T>
__device__ __forceinline__ void prefill_tile(const Problem& p) {
  const int channel = (blockIdx.x % p.groups * kThreads + threadIdx.x) * kVector<T>;
  const int tile = blockIdx.x / p.groups;
  if (channel >= p.channels) return;
  __shared__ Ring<T> ring;
  wait_for_kernel_before();
  Weights<T> weights;
  weights.load(p, channel);
  const int begin = tile % p.tiles * p.tile;
  const bool last_tile = tile % p.tiles == p.tiles - 1;
  const int end = last_tile ? p.tokens : begin + p.tile;

  // Dense sequences are the same with one sequence to walk over.
  const bool packed = p.offsets.data != nullptr;
  int n = packed ? max(first_sequence_from(p, begin) - 1, 0) : tile / p.tiles;
  const int sequences = packed ? p.sequences : n + 1;
  int done = begin;  // the tokens up to here have their outputs
#pragma unroll 1
  for (; n < sequences; ++n) {
    const Span span = span_of(p, n);
    // A sequence of no token that begins behind the last token has a state, too.
    if (span.start >= end && !last_tile) break;
    const bool owns = span.start >= begin;
    const int first = owns ? span.start : min(span.start + kBefore, span.end);
    const int until = owns ? min(span.end, max(end, span.start + kBefore)) : min(span.end, end);
    clear_output<T>(p, span.batch, done, min(span.start, end), channel);
    if (owns || done < until) {
      run<T>(p, weights, ring, span, n, owns, max(done, first), until, channel);
    }
    done = max(done, until);
  }
  clear_output<T>(p, packed ? 0 : tile / p.tiles, done, end, channel);
}

}  // namespace
}  // namespace atrex::causal_conv1d

using atrex::causal_conv1d::kPrefillBlocks;
using atrex::causal_conv1d::kThreads;
using atrex::causal_conv1d::Problem;

extern "C" __global__ void __launch_bounds__(kThreads, kPrefillBlocks)
    atrex_causal_conv1d_prefill_bf16(const __grid_constant__ Problem p) {
  atrex::causal_conv1d::prefill_tile<__nv_bfloat16>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads, kPrefillBlocks)
    atrex_causal_conv1d_prefill_fp16(const __grid_constant__ Problem p) {
  atrex::causal_conv1d::prefill_tile<__half>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads, kPrefillBlocks)
    atrex_causal_conv1d_prefill_fp32(const __grid_constant__ Problem p) {
  atrex::causal_conv1d::prefill_tile<float>(p);
}

namespace atrex::causal_conv1d {
namespace {

// The rings of kPrefillBlocks blocks are most of what a multiprocessor has, shared with its L1 cache. Said once for a
// kernel and device: it takes host time.
void prefer_shared_memory(void (*kernel)(Problem), DataType dtype) {
  static std::atomic<uint64_t> said[3];
  int device;
  check(cudaGetDevice(&device), "cudaGetDevice");
  std::atomic<uint64_t>& devices = said[int(dtype)];
  const uint64_t bit = uint64_t{1} << device % 64;
  if (devices.load(std::memory_order_relaxed) & bit) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "cudaFuncSetAttribute");
  devices.fetch_or(bit, std::memory_order_relaxed);
}

}  // namespace

void launch_prefill(const Problem& p, DataType dtype, cudaStream_t stream) {
  const auto kernel = dtype == DataType::kBFloat16  ? atrex_causal_conv1d_prefill_bf16
                      : dtype == DataType::kFloat16 ? atrex_causal_conv1d_prefill_fp16
                                                    : atrex_causal_conv1d_prefill_fp32;
  prefer_shared_memory(kernel, dtype);
  launch(kernel, p, int64_t(p.batch) * p.tiles * p.groups, stream);
}

}  // namespace atrex::causal_conv1d
