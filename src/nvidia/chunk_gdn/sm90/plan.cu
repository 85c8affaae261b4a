// Which of its plans the operator follows, from sizes alone.
#include <algorithm>

#include "forward.h"

namespace atrex::chunk_gdn {
namespace {

// Microseconds on an H200 (docs/performance/chunk_gdn_sm90.md). They need not be exact: plans lie far apart.
constexpr float kScanStep[] = {1.f, 1.6f};  // one chunk in a scan block of one, of two slices
constexpr float kScanStart = 6.f;           // first loads, states in and out
constexpr float kTransferStep = 1.3f;
constexpr float kTransferStart = 8.f;
constexpr float kApplyTransfer = 1.5f;
constexpr float kPrepareHead = 1.35f;  // one chunk of one v-head on one multiprocessor
constexpr float kPrepareStart = 8.f;
constexpr float kPrepareLead = 1.2f;  // how much faster than the scan the preparation beside it is
constexpr int kMaxSegments = 32;

int ceil_divide(int64_t a, int64_t b) { return int((a + b - 1) / b); }

}  // namespace

Plan make_plan(int batch, int tokens, int heads, int value_heads, int sequences, bool packed, int multiprocessors) {
  const int total_chunks = batch * ceil_divide(tokens, kChunk);
  const int chunks = ceil_divide(total_chunks, sequences);  // of a sequence, as far as the host can know
  const float prepare = kPrepareStart + kPrepareHead * total_chunks * value_heads / multiprocessors;

  Plan plan{};
  float best = 0.f;
  for (int segments = 1; segments <= std::min(kMaxSegments, std::max(chunks, 1)); ++segments) {
    const int steps = ceil_divide(chunks, segments);
    float transfer = 0.f;
    if (segments > 1) {
      const int64_t blocks = int64_t(sequences) * value_heads * (2 * segments - 3);
      transfer =
          ceil_divide(blocks, multiprocessors) * (kTransferStart + steps * kTransferStep) + segments * kApplyTransfer;
    }
    for (int warpgroups = 1; warpgroups <= 2; ++warpgroups) {
      const int64_t blocks = int64_t(sequences) * value_heads * segments * (kHeadDim / kSliceRows / warpgroups);
      // A scan that leaves half of the card idle lets the preparation keep ahead of it there; beside one of two
      // slices a block both slow down by more than that saves.
      const bool overlap = segments == 1 && warpgroups == 1 && 2 * blocks <= multiprocessors;
      const float scan = ceil_divide(blocks, multiprocessors) * (kScanStart + steps * kScanStep[warpgroups - 1]);
      const float cost = (overlap ? kPrepareStart : prepare) + transfer + scan;
      if (best == 0.f || cost < best) {
        best = cost;
        plan.segments = segments;
        plan.warpgroups = warpgroups;
        plan.overlap = overlap;
        plan.prepare_blocks = multiprocessors;
        if (overlap) {
          // Just fast enough: far ahead of the scan, it takes bandwidth from it, and what it writes leaves L2 unread.
          const float rate = kPrepareLead * kPrepareHead * sequences * value_heads / kScanStep[0];
          plan.prepare_blocks = std::min(multiprocessors - int(blocks), int(rate) + 1);
        }
      }
    }
  }
  plan.scan_blocks = multiprocessors;
  plan.slots = packed ? tokens / kChunk + sequences : total_chunks;
  plan.workspace_bytes = int64_t(workspace_of(plan.slots, heads, value_heads, sequences, plan.segments).bytes);
  return plan;
}

}  // namespace atrex::chunk_gdn
