#include "binding.h"

namespace {

using namespace atrex::chunk_gdn;

Plan plan_of(const py::tuple& plan) {
  return {int(item(plan, 0)), int(item(plan, 1)),  int(item(plan, 2)), int(item(plan, 3)),
          int(item(plan, 4)), bool(item(plan, 5)), item(plan, 6)};
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.def("plan", [](int batch, int tokens, int heads, int value_heads, int sequences, bool packed, int multiprocessors) {
    const Plan plan = make_plan(batch, tokens, heads, value_heads, sequences, packed, multiprocessors);
    return py::make_tuple(plan.slots, plan.segments, plan.warpgroups, plan.prepare_blocks, plan.scan_blocks,
                          int(plan.overlap), plan.workspace_bytes);
  });
  m.def("forward", &forward_binding<plan_of>);
  m.def("pack", &pack_binding);
}
