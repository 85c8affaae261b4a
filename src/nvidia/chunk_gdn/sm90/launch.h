// The launches that one call makes.
#pragma once

#include <cuda.h>

#include "kernel_launch.h"
#include "params.h"

namespace atrex::chunk_gdn {

void launch_prepare(const Problem& p, bool fp16, int blocks, const CUtensorMap& map_k, const CUtensorMap& map_q,
                    cudaStream_t stream);

struct ScanMaps {
  CUtensorMap k, q, v, out;
};
// `warpgroups`: 64-row value slices that one block serves, 1 or 2.
void launch_scan_bf16(const Problem& p, int warpgroups, int blocks, const ScanMaps& maps, cudaStream_t stream);
void launch_scan_fp16(const Problem& p, int warpgroups, int blocks, const ScanMaps& maps, cudaStream_t stream);

}  // namespace atrex::chunk_gdn
