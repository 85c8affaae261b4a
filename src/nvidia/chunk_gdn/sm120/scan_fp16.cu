// The scan's kernels for fp16; a file of its own so that both types compile side by side.
#include "scan.cuh"

namespace atrex::chunk_gdn {

#define ATREX_SCAN_KERNEL(NAME, WARPS, PASS)                                                            \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) NAME(const __grid_constant__ Problem p) { \
    scan<__half, WARPS, PASS>(p);                                                                       \
  }
ATREX_SCAN_KERNEL(atrex_chunk_gdn_transfer_fp16, 4, Pass::kTransfer)
ATREX_SCAN_KERNEL(atrex_chunk_gdn_scan_64_fp16, 4, Pass::kOutputs)
ATREX_SCAN_KERNEL(atrex_chunk_gdn_scan_128_fp16, 8, Pass::kOutputs)
#undef ATREX_SCAN_KERNEL

void launch_scan_fp16(const Problem& p, int warps, cudaStream_t stream) {
  launch_scan(p, warps, stream,
              {atrex_chunk_gdn_transfer_fp16, atrex_chunk_gdn_scan_64_fp16, atrex_chunk_gdn_scan_128_fp16});
}

}  // namespace atrex::chunk_gdn
