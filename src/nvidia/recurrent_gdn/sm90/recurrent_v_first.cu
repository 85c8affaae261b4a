// States [V, K].
#include "launch.h"
#include "recurrent.cuh"

ATREX_RECURRENT_GDN_KERNEL(atrex_recurrent_gdn_v_first_f32_bf16, float, __nv_bfloat16, true, 6)
ATREX_RECURRENT_GDN_KERNEL(atrex_recurrent_gdn_v_first_f32_fp16, float, __half, true, 6)
ATREX_RECURRENT_GDN_KERNEL(atrex_recurrent_gdn_v_first_bf16_bf16, __nv_bfloat16, __nv_bfloat16, true, 5)
ATREX_RECURRENT_GDN_KERNEL(atrex_recurrent_gdn_v_first_bf16_fp16, __nv_bfloat16, __half, true, 5)

namespace atrex::recurrent_gdn {

void launch_v_first(const Problem& p, const Variant& variant, cudaStream_t stream) {
  if (variant.state_bf16) {
    launch(variant.fp16 ? atrex_recurrent_gdn_v_first_bf16_fp16 : atrex_recurrent_gdn_v_first_bf16_bf16, p,
           Tile<__nv_bfloat16, true>::kBlockV, stream);
  } else {
    launch(variant.fp16 ? atrex_recurrent_gdn_v_first_f32_fp16 : atrex_recurrent_gdn_v_first_f32_bf16, p,
           Tile<float, true>::kBlockV, stream);
  }
}

}  // namespace atrex::recurrent_gdn
