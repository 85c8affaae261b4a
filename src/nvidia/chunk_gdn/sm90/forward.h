// The operator as the binding calls it.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace atrex::chunk_gdn {

// How a problem is cut, from its sizes alone.
struct Plan {
  int slots;                        // chunk slots, see sequence.cuh
  int segments;                     // context parallelism
  int warpgroups;                   // 64-row value slices that a scan block serves
  int prepare_blocks, scan_blocks;  // at most
  bool overlap;                     // the scan runs beside the preparation
  int64_t workspace_bytes;
};
Plan make_plan(int batch, int tokens, int heads, int value_heads, int sequences, bool packed, int multiprocessors);

// Runs on `stream` of `device`; slots, segments, overlap and offsets of `p` come from the plan. Throws
// std::runtime_error.
void forward(Problem p, const Plan& plan, bool fp16, int device, cudaStream_t stream);

}  // namespace atrex::chunk_gdn
