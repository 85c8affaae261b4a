// Brings q, k or v into a form that 16-byte copies read: contiguous, on the 16-byte grid.
#include "kernel_launch.h"
#include "pack.h"
#include "tensors.h"

namespace atrex::chunk_gdn {
namespace {
constexpr int kThreads = 256;
constexpr int kVector = 8;                                      // elements of a 16-byte store
constexpr int kRowsPerBlock = kThreads / (kHeadDim / kVector);  // rows of 128 features that a block writes at a time
}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) atrex_chunk_gdn_pack(const __grid_constant__ PackedCopy copy) {
  const int64_t rows = int64_t(copy.batch) * copy.tokens * copy.heads;
  const int d = threadIdx.x % (kHeadDim / kVector) * kVector;
  for (int64_t row = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / (kHeadDim / kVector); row < rows;
       row += int64_t(gridDim.x) * kRowsPerBlock) {
    const int64_t h = row % copy.heads, token = row / copy.heads;
    const auto* from = static_cast<const uint16_t*>(copy.from) + token / copy.tokens * copy.stride_b +
                       token % copy.tokens * copy.stride_t + h * copy.stride_h + d * copy.stride_d;
    uint16_t values[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = from[i * copy.stride_d];
    uint4 packed;
    packed.x = values[0] | uint32_t(values[1]) << 16;
    packed.y = values[2] | uint32_t(values[3]) << 16;
    packed.z = values[4] | uint32_t(values[5]) << 16;
    packed.w = values[6] | uint32_t(values[7]) << 16;
    reinterpret_cast<uint4*>(copy.to)[(row * kHeadDim + d) / kVector] = packed;
  }
}

void pack(const PackedCopy& copy, int device, cudaStream_t stream) {
  const DeviceScope scope(device);
  const int64_t rows = int64_t(copy.batch) * copy.tokens * copy.heads;
  const int64_t blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  launch(atrex_chunk_gdn_pack, {int(blocks < 4096 ? blocks : 4096), kThreads, 0}, /*overlap=*/false, stream, copy);
}

}  // namespace atrex::chunk_gdn
