// The scan's kernels for bf16; a file of its own so that both types compile side by side.
#include "scan.cuh"

namespace atrex::chunk_gdn {
namespace {
using T = __nv_bfloat16;
}

#define ATREX_SCAN_KERNEL(NAME, WARPGROUPS, PASS)                                                 \
  extern "C" __global__ void __launch_bounds__(ScanThreads<WARPGROUPS>::kBlock, 1)                \
      NAME(const __grid_constant__ Problem p, const __grid_constant__ ScanMaps maps, int works) { \
    scan<T, WARPGROUPS, PASS>(p, maps, works);                                                    \
  }
ATREX_SCAN_KERNEL(atrex_chunk_gdn_transfer_bf16, 2, Pass::kTransfer)
ATREX_SCAN_KERNEL(atrex_chunk_gdn_scan_1x64_bf16, 1, Pass::kOutputs)
ATREX_SCAN_KERNEL(atrex_chunk_gdn_scan_2x64_bf16, 2, Pass::kOutputs)
ATREX_SCAN_KERNEL(atrex_chunk_gdn_scan_checkpoints_1x64_bf16, 1, Pass::kOutputsAndCheckpoints)
ATREX_SCAN_KERNEL(atrex_chunk_gdn_scan_checkpoints_2x64_bf16, 2, Pass::kOutputsAndCheckpoints)
#undef ATREX_SCAN_KERNEL

void launch_scan_bf16(const Problem& p, int warpgroups, int blocks, const ScanMaps& maps, cudaStream_t stream) {
  const ScanKernels kernels = {atrex_chunk_gdn_transfer_bf16, atrex_chunk_gdn_scan_1x64_bf16,
                               atrex_chunk_gdn_scan_2x64_bf16, atrex_chunk_gdn_scan_checkpoints_1x64_bf16,
                               atrex_chunk_gdn_scan_checkpoints_2x64_bf16};
  launch_scan<T>(p, warpgroups, blocks, maps, stream, kernels);
}

}  // namespace atrex::chunk_gdn
