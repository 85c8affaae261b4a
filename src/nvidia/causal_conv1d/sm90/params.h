// What crosses the line between the host launcher and the kernels: plain data, no torch, no pybind11.
#pragma once

#include <cstdint>

namespace atrex::causal_conv1d {

inline constexpr int kWidth = 4;            // taps
inline constexpr int kBefore = kWidth - 1;  // tokens before a token that it needs
inline constexpr int kThreads = 128;
inline constexpr int kPrefillBlocks = 5;  // of a multiprocessor: what the registers allow

enum class DataType : int { kFloat32, kBFloat16, kFloat16 };

// [B, T, C], channels contiguous, everything on the 16-byte grid. Strides in elements.
struct Tokens {
  const void* data;
  int64_t stride_b, stride_t;
};

// [N], int32 or int64.
struct Indices {
  const void* data;  // null: absent
  int64_t stride;
  bool is_int64;
};

// [rows, C, columns]. Either the channels are contiguous and on the 16-byte grid (stride_c == 1), or the columns are
// and a channel is as long as its columns (stride_column == 1). Strides in elements.
struct States {
  void* data;  // null: absent
  int64_t rows, stride_row, stride_c, stride_column;
};

struct Problem {
  int batch, tokens, channels, sequences;
  int groups;  // blocks that cover the channels
  int tile;    // prefill: tokens of a block
  int tiles;   // prefill: tiles of a batch entry
  bool silu;

  Tokens x;
  const void* weight;  // [C, 4], contiguous
  const void* bias;    // [C], contiguous; null: absent
  void* out;           // [B, T, C], contiguous
  Indices offsets;     // of packed sequences; absent: one sequence a batch entry

  States initial;              // absent: zeros
  Indices read;                // row of `initial`; absent: row n belongs to sequence n
  const uint8_t* has_initial;  // null: all sequences that have an `initial` read it
  int64_t stride_has_initial;
  States final;     // absent: not wanted
  Indices write;    // row of `final`; absent: row n belongs to sequence n
  bool pool;        // prefill: `final` is a pool, whose slots stay as they are without a token
  int64_t padding;  // an index that is no row, as all outside of [0, rows)

  // Update only.
  Indices accepted;  // absent: the last columns are the tokens before
  int columns;       // of a state
};

// A copy of [B, T, C] with any strides into contiguous memory.
struct PackedCopy {
  const void* from;
  int64_t stride_b, stride_t, stride_c;
  int batch, tokens, channels;
  void* to;
};

}  // namespace atrex::causal_conv1d
