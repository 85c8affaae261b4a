#include "forward.h"
#include "launch.h"

namespace atrex::chunk_gdn {

void forward(Problem p, const Plan& plan, bool fp16, int device, cudaStream_t stream) {
  const DeviceScope scope(device);
  p.slots = plan.slots;
  p.segments = plan.segments;
  p.offsets = workspace_of(plan.slots, p.value_heads, p.sequences, plan.segments);
  if (p.tokens > 0) launch_prepare(p, fp16, stream);
  (fp16 ? launch_scan_fp16 : launch_scan_bf16)(p, plan.warps, stream);
}

}  // namespace atrex::chunk_gdn
