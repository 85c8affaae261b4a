"""How fast decode steps of fused_recurrent_gated_delta_rule are, beside those of other libraries."""

import functools

import torch

import atrex

from . import inputs, reference
from .compare import head_errors
from .throughput import cold_sets, copy_bandwidth, graph_us

DEVICE = "cuda:0"
BF16, FP32 = torch.bfloat16, torch.float32
recurrent = atrex.fused_recurrent_gated_delta_rule
make_inputs = functools.partial(inputs.make_inputs, device=DEVICE)
make_states = functools.partial(inputs.make_states, device=DEVICE)


def decode_tensors(B, H, HV, state, seed=40):
    """Inputs of a decode step, and a pool with slots for so many steps that no step finds its states in the L2."""
    steps = cold_sets(B * HV * 128 * 128 * state.itemsize, most=256)
    tokens = make_inputs(B, 1, H, HV, seed=seed, unit_keys=False)
    pool = torch.empty(B * steps, HV, 128, 128, dtype=state, device=DEVICE).normal_(0, 0.1)
    slots = torch.randperm(B * steps, device=DEVICE, dtype=torch.int32).view(steps, B)
    return tokens, pool, slots


def decode_us(B, H, HV, state, v_first):
    tokens, pool, slots = decode_tensors(B, H, HV, state)
    return graph_us([
        functools.partial(
            recurrent, *tokens, None, pool, state_indices=row, state_v_first=v_first, use_qk_l2norm_in_kernel=True
        )
        for row in slots
    ])  # fmt: skip


def state_bytes(B, HV, state):
    return 2 * B * HV * 128 * 128 * state.itemsize


def peers():
    """Decode steps of other libraries, for those that can be imported: name -> bind(tokens) -> call(states)."""
    found = {}
    try:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as fla

        def of_fla(q, k, v, g, beta):
            options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
            return lambda states: fla(q, k, v, g=g, beta=beta, initial_state=states, **options)

        found["FLA"] = of_fla
    except Exception as error:  # whatever its import ends with
        print(f"FLA is left out: {error}")
    try:
        from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose as flashinfer

        def of_flashinfer(q, k, v, g, beta):  # it takes the projections' outputs, which are not timed
            zeros, g, beta = torch.zeros(v.shape[2], device=DEVICE), g.to(q.dtype), beta.to(q.dtype)
            return lambda states: flashinfer(
                q, k, v, states, zeros, g, zeros, beta, 128**-0.5, use_qk_l2norm=True
            )  # fmt: skip

        found["FlashInfer"] = of_flashinfer
    except Exception as error:  # whatever its import ends with
        print(f"FlashInfer is left out: {error}")
    return found


def peer_us(bind, B, H, HV, state):
    tokens, pool, _ = decode_tensors(B, H, HV, state)
    call = bind(*tokens)
    return graph_us([functools.partial(call, part) for part in pool.split(B)])


def error_of(call, final_of, v_first):
    """Largest relative L2 error of a head: outputs and states after one step."""
    tokens, states = make_inputs(8, 1, 16, 32, seed=43, unit_keys=False), make_states(8, 32, seed=44, v_first=v_first)
    want_o, want_final, _ = reference.gated_delta_rule(
        *tokens, 128**-0.5, states.mT if v_first else states, l2norm=True
    )
    o, final = final_of(call, tokens, states)
    return head_errors(o, want_o, 2).max().item(), head_errors(
        final.mT if v_first else final, want_final, 1
    ).max().item()


def table():
    copy = copy_bandwidth()
    others = peers()
    print(f"copy: {copy / 1e12:.2f} TB/s read and written, {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    names = [f"atrex {layout} first" for layout in "VK"] + list(others)
    print("states H/HV B | us, % of copy | " + ", ".join(names))
    lines = []
    for state in (FP32, BF16):
        for H, HV in ((16, 32), (8, 16), (4, 8)):
            for B in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
                times = {names[0]: decode_us(B, H, HV, state, True), names[1]: decode_us(B, H, HV, state, False)}
                for name, bind in others.items():
                    try:
                        times[name] = peer_us(bind, B, H, HV, state)
                    except Exception as error:  # a peer that refuses a row does not end the table
                        print(f"{name} fails: {str(error).splitlines()[:1]}")
                cells = [
                    f"{us:8.2f} {state_bytes(B, HV, state) / (us * 1e-6) / copy:4.0%}" for us in times.values()
                ]  # fmt: skip
                print(f"{str(state)[6:]:8} {H:2}/{HV:2} {B:4} | " + " | ".join(cells), flush=True)
                lines.append({"state": str(state), "H": H, "HV": HV, "B": B, "us": times})
    for v_first in (True, False):
        own = lambda _, t, s: recurrent(*t, None, s, True, use_qk_l2norm_in_kernel=True, state_v_first=v_first)  # noqa: B023, E731
        print(
            f"error of outputs, states: atrex v_first={v_first}", "{:.1e} {:.1e}".format(*error_of(None, own, v_first))
        )
    if "FLA" in others:
        print("error of outputs, states: FLA {:.1e} {:.1e}".format(*error_of(
            others["FLA"], lambda bind, t, s: bind(*t)(s), False
        )))  # fmt: skip
    return {"copy_bytes_per_second": copy, "rows": lines}
