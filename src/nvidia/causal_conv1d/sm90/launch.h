// Host side of a launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "params.h"

namespace atrex::causal_conv1d {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// The blocks may be placed while the kernel before drains; they wait for it before they touch memory
// (griddepcontrol.wait).
template <class Parameters>
void launch(void (*kernel)(Parameters), const Parameters& p, int64_t blocks, cudaStream_t stream) {
  if (blocks > INT32_MAX) throw std::runtime_error("causal_conv1d: more than 2^31 - 1 blocks");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, p), "kernel launch");
}

// A kernel for each data type.
void launch_prefill(const Problem& p, DataType dtype, cudaStream_t stream);
void launch_update(const Problem& p, DataType dtype, cudaStream_t stream);
void launch_pack(const PackedCopy& x, DataType dtype, cudaStream_t stream);

}  // namespace atrex::causal_conv1d
