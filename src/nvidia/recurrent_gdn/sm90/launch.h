// Host side of a launch.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "forward.h"
#include "tile.cuh"

namespace atrex::recurrent_gdn {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// `columns`: value columns that a block serves. The blocks may be placed while the kernel before drains; they wait for
// it before they touch memory (griddepcontrol.wait).
inline void launch(void (*kernel)(Problem), const Problem& p, int columns, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  // Neighbours in launch order are neighbours in memory: the slices of a head, the heads of a sequence.
  config.gridDim = dim3(p.value_heads * (kHeadDim / columns), p.sequences < kGridY ? p.sequences : kGridY,
                        (p.sequences + kGridY - 1) / kGridY);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, p), "kernel launch");
}

// The four kernels of a layout each.
void launch_v_first(const Problem& p, const Variant& variant, cudaStream_t stream);
void launch_k_first(const Problem& p, const Variant& variant, cudaStream_t stream);

void launch_pack(const PackedCopy& x, cudaStream_t stream);

}  // namespace atrex::recurrent_gdn
