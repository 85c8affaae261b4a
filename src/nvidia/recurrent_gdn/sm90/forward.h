// The operator as the binding calls it. Everything throws std::runtime_error.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace atrex::recurrent_gdn {

// The type of kernel that a problem needs.
struct Variant {
  bool v_first;     // states [V, K], not [K, V]
  bool state_bf16;  // not float32
  bool fp16;        // q, k, v and outputs; not bfloat16
};

// On `stream` of `device`; fills in `group` and its reciprocal.
void forward(Problem p, const Variant& variant, int device, cudaStream_t stream);
void pack(const PackedCopy& x, int device, cudaStream_t stream);

}  // namespace atrex::recurrent_gdn
