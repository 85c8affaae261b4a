// The operators as the binding calls them. Everything throws std::runtime_error.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace atrex::causal_conv1d {

// On `stream` of `device`; these fill in `groups`, `tile` and `tiles`.
void prefill(Problem p, DataType dtype, int device, cudaStream_t stream);
void update(Problem p, DataType dtype, int device, cudaStream_t stream);
void pack(const PackedCopy& x, DataType dtype, int device, cudaStream_t stream);

}  // namespace atrex::causal_conv1d
