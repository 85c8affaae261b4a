// Tiles of 64 tokens x 128 features in shared memory. The eight 16-byte pieces of a row's half are permuted by the row,
// piece c of row r lies at c ^ (r & 7), so that ldmatrix meets no bank twice.
#pragma once

#include "params.h"
#include "ptx.cuh"

namespace atrex::chunk_gdn {

inline constexpr int kRowBytes = kHeadDim * 2;
inline constexpr int kTileBytes = kChunk * kRowBytes;

// A block of kThreads copies the tokens from `token` on, some rows a pass; rows from `live` on become zero, and nothing
// of theirs is read.
template <int kThreads>
class TileCopy {
  static constexpr int kPieces = kRowBytes / 16;
  static constexpr int kRows = kThreads / kPieces;
  static_assert(kRows % 8 == 0, "a thread's place in a row is the same in all of its rows");

 public:
  static constexpr int kPasses = kChunk / kRows;

  __device__ TileCopy(uint32_t tile, const Activation& x, int64_t batch, int64_t token, int64_t head, int live)
      : live_(live - int(threadIdx.x / kPieces)), step_(kRows * x.stride_t * 2) {
    const int row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
    from_ = static_cast<const char*>(x.data) +
            (batch * x.stride_b + (token + row) * x.stride_t + head * x.stride_h) * 2 + piece * 16;
    to_ = tile + row * kRowBytes + (piece ^ (row & 7)) * 16;
  }
  __device__ void pass() {
    copy_async_or_clear(to_, from_, live_ > 0);
    from_ += step_;
    to_ += kRows * kRowBytes;
    live_ -= kRows;
  }
  __device__ void all() {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) pass();
  }

 private:
  const char* from_;
  uint32_t to_;
  int live_;
  int64_t step_;
};

// The address that a lane gives to ldmatrix for the 16x16 block of rows 16 i .. and features 16 j ..
class BlockAddress {
 public:
  // The four 8x8 parts in the order (0, 0), (0, 1), (1, 0), (1, 1): B fragments of two n-tiles whose columns are rows.
  static __device__ BlockAddress by_rows() { return {threadIdx.x % 32 / 16, threadIdx.x / 8 % 2}; }
  // The order (0, 0), (1, 0), (0, 1), (1, 1): an A fragment; transposed, B fragments of two n-tiles of features.
  static __device__ BlockAddress by_columns() { return {threadIdx.x / 8 % 2, threadIdx.x % 32 / 16}; }

  __device__ uint32_t operator()(uint32_t tile, int i, int j) const {
    return tile + row_ + i * 16 * kRowBytes + ((j * 32) ^ piece_);
  }

 private:
  __device__ BlockAddress(uint32_t row_half, uint32_t column_half)
      : row_((row_half * 8 + threadIdx.x % 8) * kRowBytes), piece_((column_half ^ (threadIdx.x & 7)) * 16) {}

  uint32_t row_, piece_;
};

}  // namespace atrex::chunk_gdn
