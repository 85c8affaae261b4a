"""How fast a captured decode step of a Gated DeltaNet layer is, beside the kernels of other libraries chained."""

import functools

import torch

from . import inputs
from .compare import head_errors
from .gdn_layer import D, Layer
from .throughput import cold_sets, copy_bandwidth, graph_us

HEADS = ((16, 32), (8, 16), (4, 8))
BATCHES = (1, 8, 32, 128, 512)


def step_bytes(layer, B, state):
    """What a step cannot but move: both states read and written, the projections' outputs read, the result written.

    Between the launches x and o go through the L2.
    """
    rule = 2 * layer.HV * D * D * state.itemsize
    return B * (rule + layer.C * 2 * (1 + 3 + 3) + 2 * layer.HV * D * 2)


def pools(layer, B, state, columns):
    """States for so many steps that none finds its own in the L2: of the convolution, of the rule, their slots."""
    steps = cold_sets(B * layer.HV * D * D * state.itemsize, most=256)
    conv_states = layer.conv_states(B * steps, 1, columns)
    states = torch.empty(B * steps, layer.HV, D, D, dtype=state, device=layer.device).normal_(0, 0.1)
    return conv_states, states, torch.randperm(B * steps, device=layer.device, dtype=torch.int32).view(steps, B)


def step_us(layer, B, state):
    """GPU time of a step of `atrex`, captured, with cold states in slots of pools."""
    tokens = layer.tokens(B, 1, 2)
    conv_states, states, slots = pools(layer, B, state, 3)
    return graph_us([functools.partial(layer.step, tokens, conv_states, states, row, row) for row in slots])


def chains():
    """Decode steps of other libraries, for those that can be imported: name -> chain(layer).

    A chain is a function of tokens, conv_states ``[B, C, 4]`` with contiguous columns and states ``[B, HV, K, V]`` that
    returns outputs and new states. FLA returns the states in new float32 memory, also where it reads bfloat16; nothing
    copies them back into a cache here, which a service with FLA has to.
    """
    found = {}
    try:
        from fla.modules import FusedRMSNormGated
        from fla.modules.convolution import causal_conv1d_update
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    except Exception as error:  # whatever its import ends with
        print(f"FLA is left out: {error}")
        return found

    def chain(layer, convolve):
        norm = FusedRMSNormGated(D, eps=1e-6, device=layer.device, dtype=layer.dtype)
        norm.weight.data.copy_(layer.norm)

        def step(tokens, conv_states, states):
            mixed, a, b, z = tokens
            o, final = fused_recurrent_gated_delta_rule(
                *layer.split(convolve(layer, mixed, conv_states)), g=a, beta=b, initial_state=states,
                output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=layer.A_log,
                dt_bias=layer.dt_bias, use_beta_sigmoid_in_kernel=True,
            )  # fmt: skip
            return norm(o, z), final

        return step

    def of_fla(layer, mixed, conv_states):
        return causal_conv1d_update(mixed, conv_states, weight=layer.weight, activation="silu")[0]

    found["FLA"] = lambda layer: chain(layer, of_fla)
    try:
        from causal_conv1d import causal_conv1d_update as update
    except Exception as error:  # whatever its import ends with
        print(f"causal-conv1d is left out: {error}")
        return found

    def of_dao(layer, mixed, conv_states):
        return update(mixed.mT, conv_states, layer.weight, None, "silu").mT

    found["causal-conv1d, FLA"] = lambda layer: chain(layer, of_dao)
    return found


def chain_us(chain, layer, B, state):
    """GPU time of a step of ``chain``, captured, with cold states; gates contiguous, else FLA would copy them too."""
    tokens = [x.contiguous() for x in layer.tokens(B, 1, 2)]
    conv_states, states, _ = pools(layer, B, state, 4)
    parts = zip(conv_states.contiguous().split(B), states.split(B), strict=True)
    with torch.no_grad():
        return graph_us([functools.partial(chain, tokens, *part) for part in parts])


def errors(layer, state, chain=None):
    """Largest relative L2 error of a head after a step, outputs and states, of `atrex` or of ``chain``."""
    tokens, conv_states = layer.tokens(8, 1, 3), layer.conv_states(8, 4, 4).contiguous()
    states = inputs.make_states(8, layer.HV, seed=5, device=layer.device, dtype=state, v_first=True)
    want, want_final = layer.reference(tokens, conv_states[..., 1:], states)
    slots = torch.arange(8, dtype=torch.int32, device=layer.device)
    if chain is None:
        got, final = layer.step(tokens, conv_states, states, slots, slots), states
    else:
        with torch.no_grad():
            got, final = chain(tokens, conv_states, states.mT.contiguous())
        final = final.mT
    return head_errors(got, want, 2).max().item(), head_errors(final, want_final, 1).max().item()


def table(device):
    copy, others = copy_bandwidth(), chains()
    print("a captured decode step of the layer: convolution, recurrence with gates and q/k norms, gated norm")
    print("states H/HV B | us, % of copy | " + ", ".join(["atrex", *(f"{name} (us, times atrex)" for name in others)]))
    lines = []
    for state in (torch.float32, torch.bfloat16):
        for H, HV in HEADS:
            layer = Layer(H, HV, seed=0, device=device)
            steps = {name: make(layer) for name, make in others.items()}
            for B in BATCHES:
                times = {"atrex": step_us(layer, B, state)}
                for name, chain in steps.items():
                    try:
                        times[name] = chain_us(chain, layer, B, state)
                    except Exception as error:  # a peer that refuses a row does not end the table
                        print(f"{name} fails: {str(error).splitlines()[:1]}")
                own = times["atrex"]
                cells = [f"{own:8.2f} {step_bytes(layer, B, state) / (own * 1e-6) / copy:4.0%}"]
                cells += [f"{us:8.2f} {us / own:5.2f}x" for name, us in times.items() if name != "atrex"]
                print(f"{str(state)[6:]:8} {H:2}/{HV:2} {B:4} | " + " | ".join(cells), flush=True)
                lines.append({"state": str(state), "H": H, "HV": HV, "B": B, "us": times})
        layer = Layer(*HEADS[0], seed=0, device=device)
        for name, chain in {"atrex": None, **{name: make(layer) for name, make in others.items()}}.items():
            print(f"error of outputs, states ({str(state)[6:]}): {name} " + "{:.1e} {:.1e}".format(
                *errors(layer, state, chain)), flush=True)  # fmt: skip
    return lines
