// Which of its plans the operator follows, from sizes alone.
#include <algorithm>

#include "forward.h"

namespace atrex::chunk_gdn {
namespace {

// Microseconds on an RTX PRO 6000, by arithmetic (docs/performance/chunk_gdn_sm120.md): nothing here was measured on
// such a card. They need not be exact: plans lie far apart.
constexpr float kScanStep4 = 1.8f;  // one chunk in a scan block of four warps, one to each tensor unit
constexpr float kScanStep8 = 3.2f;  // of eight
constexpr float kScanStart = 4.f;   // first loads, states in and out
constexpr float kTransferStep = 1.3f;
constexpr float kTransferStart = 6.f;  // and the launch
constexpr float kApplyTransfer = 1.2f;
constexpr int kMaxSegments = 32;

int ceil_divide(int64_t a, int64_t b) { return int((a + b - 1) / b); }

}  // namespace

Plan make_plan(int batch, int tokens, int value_heads, int sequences, bool packed, int multiprocessors) {
  const int total_chunks = batch * ceil_divide(tokens, kChunk);
  const int chunks = ceil_divide(total_chunks, sequences);  // of a sequence, as far as the host can know

  Plan plan{};
  float best = 0.f;
  for (int segments = 1; segments <= std::min(kMaxSegments, std::max(chunks, 1)); ++segments) {
    const int steps = ceil_divide(chunks, segments);
    float transfer = 0.f;
    if (segments > 1) {
      // Blocks of four warps; two on a multiprocessor share its tensor units.
      const int64_t blocks = int64_t(sequences) * value_heads * (2 * segments - 3) * 2;
      transfer = kTransferStart + std::max(1.f, float(blocks) / multiprocessors) * steps * kTransferStep +
                 segments * kApplyTransfer;
    }
    for (const int warps : {4, 8}) {
      if (warps == 8 && segments > 1) continue;  // segments fill the card by themselves
      const int64_t blocks = int64_t(sequences) * value_heads * segments * (kSlices / warps);
      const float step = warps == 4 ? kScanStep4 : kScanStep8;
      const float cost = transfer + ceil_divide(blocks, multiprocessors) * (kScanStart + steps * step);
      if (best == 0.f || cost < best) {
        best = cost;
        plan.segments = segments;
        plan.warps = warps;
      }
    }
  }
  plan.slots = packed ? tokens / kChunk + sequences : total_chunks;
  plan.workspace_bytes = int64_t(workspace_of(plan.slots, value_heads, sequences, plan.segments).bytes);
  return plan;
}

}  // namespace atrex::chunk_gdn
