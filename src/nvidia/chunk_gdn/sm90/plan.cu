#include "forward.h"

namespace atrex::chunk_gdn {

Plan make_plan(int batch, int tokens, int value_heads, int sequences, bool packed, int multiprocessors) {
  Plan plan{};
  plan.slots = packed ? tokens / kChunk + sequences : batch * ((tokens + kChunk - 1) / kChunk);
  plan.segments = 1;
  // One slice a block while the card has a multiprocessor for each; two share K, Q and the prepared tiles.
  plan.warpgroups = sequences * value_heads * (kHeadDim / kSliceRows) <= multiprocessors ? 1 : 2;
  plan.workspace_bytes = int64_t(workspace_of(plan.slots, value_heads, sequences, plan.segments).bytes);
  return plan;
}

}  // namespace atrex::chunk_gdn
