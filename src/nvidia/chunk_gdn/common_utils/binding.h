// Python's view of the kernels: pointers, strides and sizes in, nothing of torch.
//
// A tensor crosses as the tuple (data_ptr, *strides), strides in elements; an absent one as None.
#pragma once

#include <pybind11/pybind11.h>

#include "forward.h"  // the target's own
#include "pack.h"

namespace atrex::chunk_gdn {

namespace py = pybind11;

inline int64_t item(const py::tuple& tensor, int i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(tensor.ptr(), i)); }
inline void* pointer(const py::tuple& tensor) { return reinterpret_cast<void*>(item(tensor, 0)); }

inline Activation activation(const py::tuple& x) { return {pointer(x), item(x, 1), item(x, 2), item(x, 3)}; }

inline Gate gate(const py::tuple& x, int dtype) {
  return {pointer(x), item(x, 1), item(x, 2), item(x, 3), DataType(dtype)};
}

inline States states(const py::object& x, int dtype, bool v_first) {
  if (x.is_none()) return {};
  const auto tensor = py::reinterpret_borrow<py::tuple>(x);
  const int k = v_first ? 4 : 3, v = v_first ? 3 : 4;
  return {pointer(tensor), item(tensor, 1), item(tensor, 2), item(tensor, k), item(tensor, v), DataType(dtype)};
}

inline const void* optional_pointer(const py::object& pointer) {
  return pointer.is_none() ? nullptr : PyLong_AsVoidPtr(pointer.ptr());
}

// `plan_of` makes a Plan of what the module's plan() has returned.
template <Plan (*plan_of)(const py::tuple&)>
void forward_binding(const py::tuple& sizes, const py::tuple& plan, bool fp16, float scale, bool l2norm,
                     const py::tuple& q, const py::tuple& k, const py::tuple& v, const py::tuple& g, int g_dtype,
                     const py::tuple& beta, int beta_dtype, uintptr_t out, const py::object& cu_seqlens,
                     bool cu_seqlens_int64, const py::object& initial, const py::object& final, int state_dtype,
                     bool v_first, const py::object& state_indices, bool state_indices_int64, int64_t pool_rows,
                     const py::object& checkpoints, int checkpoint_every, int64_t checkpoint_rows, uintptr_t workspace,
                     int device, uintptr_t stream) {
  Problem p{};
  p.batch = int(item(sizes, 0));
  p.tokens = int(item(sizes, 1));
  p.heads = int(item(sizes, 2));
  p.value_heads = int(item(sizes, 3));
  p.sequences = int(item(sizes, 4));
  p.cu_seqlens = optional_pointer(cu_seqlens);
  p.cu_seqlens_int64 = cu_seqlens_int64;
  p.scale = scale;
  p.l2norm = l2norm;
  p.q = activation(q);
  p.k = activation(k);
  p.v = activation(v);
  p.g = gate(g, g_dtype);
  p.beta = gate(beta, beta_dtype);
  p.out = reinterpret_cast<void*>(out);
  p.initial = states(initial, state_dtype, v_first);
  p.final = states(final, state_dtype, v_first);
  p.state_indices = optional_pointer(state_indices);
  p.state_indices_int64 = state_indices_int64;
  p.pool_rows = pool_rows;
  p.checkpoints = states(checkpoints, state_dtype, v_first);
  p.checkpoint_chunks = checkpoint_every / kChunk;
  p.checkpoint_rows = checkpoint_rows;
  p.workspace = reinterpret_cast<unsigned char*>(workspace);
  forward(p, plan_of(plan), fp16, device, reinterpret_cast<cudaStream_t>(stream));
}

inline void pack_binding(const py::tuple& from, int batch, int tokens, int heads, uintptr_t to, int device,
                         uintptr_t stream) {
  pack({pointer(from), item(from, 1), item(from, 2), item(from, 3), item(from, 4), batch, tokens, heads,
        reinterpret_cast<void*>(to)},
       device, reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace atrex::chunk_gdn
