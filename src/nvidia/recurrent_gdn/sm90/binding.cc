// Python's view of the kernels: pointers, strides and sizes in, nothing of torch.
//
// A tensor crosses as the tuple (data_ptr, *strides), strides in elements, with its data type where it can vary; an
// absent one as None.
#include <pybind11/pybind11.h>

#include "forward.h"

namespace py = pybind11;
using namespace atrex::recurrent_gdn;

namespace {

int64_t item(const py::tuple& tensor, int i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(tensor.ptr(), i)); }
void* pointer(const py::tuple& tensor) { return reinterpret_cast<void*>(item(tensor, 0)); }

Activation activation(const py::tuple& x) { return {pointer(x), item(x, 1), item(x, 2), item(x, 3)}; }

// (data_ptr, stride_b, stride_t, stride_h, dtype)
Gate gate(const py::tuple& x) { return {pointer(x), item(x, 1), item(x, 2), item(x, 3), DataType(item(x, 4))}; }

// (data_ptr, dtype, stride): [HV]
Gate head_parameter(const py::object& x) {
  if (x.is_none()) return {};
  const auto tensor = py::reinterpret_borrow<py::tuple>(x);
  return {pointer(tensor), 0, 0, item(tensor, 2), DataType(item(tensor, 1))};
}

// (data_ptr, is int64, stride_n) or (data_ptr, is int64, stride_n, stride_s)
Indices indices(const py::object& x) {
  if (x.is_none()) return {};
  const auto tensor = py::reinterpret_borrow<py::tuple>(x);
  return {pointer(tensor), item(tensor, 2), tensor.size() > 3 ? item(tensor, 3) : 0, item(tensor, 1) != 0};
}

// (data_ptr, rows, stride_row, stride_step, stride_h)
States states(const py::object& x) {
  if (x.is_none()) return {};
  const auto tensor = py::reinterpret_borrow<py::tuple>(x);
  return {pointer(tensor), item(tensor, 1), item(tensor, 2), item(tensor, 3), item(tensor, 4)};
}

void forward_binding(const py::tuple& sizes, const py::tuple& variant, float scale, bool l2norm, const py::tuple& q,
                     const py::tuple& k, const py::tuple& v, const py::tuple& g, const py::tuple& beta,
                     const py::object& a_log, const py::object& dt_bias, uintptr_t out, const py::object& cu_seqlens,
                     const py::object& initial, const py::object& read, const py::object& accepted,
                     int64_t read_columns, int64_t padding_index, int store, const py::object& stored,
                     const py::object& write, int64_t write_padding, int64_t steps, int device, uintptr_t stream) {
  Problem p{};
  p.tokens = int(item(sizes, 0));
  p.heads = int(item(sizes, 1));
  p.value_heads = int(item(sizes, 2));
  p.sequences = int(item(sizes, 3));
  const Indices offsets = indices(cu_seqlens);
  p.cu_seqlens = offsets.data;
  p.cu_seqlens_int64 = offsets.is_int64;
  p.scale = scale;
  p.l2norm = l2norm;
  p.q = activation(q);
  p.k = activation(k);
  p.v = activation(v);
  p.g = gate(g);
  p.beta = gate(beta);
  p.a_log = head_parameter(a_log);
  p.dt_bias = head_parameter(dt_bias);
  p.out = reinterpret_cast<void*>(out);
  p.initial = states(initial);
  p.read = indices(read);
  p.accepted = indices(accepted);
  p.read_columns = read_columns;
  p.padding_index = padding_index;
  p.store = Store(store);
  p.stored = states(stored);
  p.write = indices(write);
  p.write_padding = write_padding;
  p.steps = steps;
  if (PyErr_Occurred()) throw py::error_already_set();
  forward(p, {item(variant, 0) != 0, item(variant, 1) != 0, item(variant, 2) != 0}, device,
          reinterpret_cast<cudaStream_t>(stream));
}

void pack_binding(const py::tuple& from, int batch, int tokens, int heads, uintptr_t to, int device, uintptr_t stream) {
  pack({pointer(from), item(from, 1), item(from, 2), item(from, 3), item(from, 4), batch, tokens, heads,
        reinterpret_cast<void*>(to)},
       device, reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.def("forward", &forward_binding);
  m.def("pack", &pack_binding);
}
