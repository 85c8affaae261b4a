// The launches that one call makes.
#pragma once

#include "kernel_launch.h"
#include "params.h"

namespace atrex::chunk_gdn {

void launch_prepare(const Problem& p, bool fp16, cudaStream_t stream);

// `warps`: 16-row value slices that one block serves, 4 or 8.
void launch_scan_bf16(const Problem& p, int warps, cudaStream_t stream);
void launch_scan_fp16(const Problem& p, int warps, cudaStream_t stream);

}  // namespace atrex::chunk_gdn
