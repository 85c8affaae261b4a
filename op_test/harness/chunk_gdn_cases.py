"""Cases of the chunk_gated_delta_rule contract at K = V = 128: named ones, and a strategy that draws more."""

import torch
from hypothesis import strategies as st

from harness import inputs
from harness.chunk_gdn import Case

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
RAGGED = (70, 0, 129, 1, 64)
# With 16/32 heads more heads and sequences than a card has multiprocessors: a block serves several, of all sorts.
MANY = (1, 400, 0, 70, 640, 64, 129, 257)
FORTY = tuple((0, 1, 65, 17, 0, 33, 2, 0)[i % 8] for i in range(40))


def named_cases():
    for T in (0, 1, 63, 64, 65, 127, 128, 129, 320):
        yield f"length_{T}", Case((T,), packed=False, state=F32, seed=T)
        yield f"packed_{T}", Case((T,), tail=5, state=F32, seed=T)
    yield "all_empty", Case((0, 0, 0), state=F32)
    yield "only_padding", Case((0, 0), tail=70, every=64)
    yield "forty", Case(FORTY, state=F32, every=64)
    yield "forty_int64_pool", Case(FORTY, state=BF16, pool=True, padding=True, index_dtype=torch.int64, seed=2)
    for seed in (0, 3, 7):  # the padding sequence
        yield f"many_{seed}", Case(MANY, 16, 32, state=F32, pool=True, padding=True, every=64, tail=9, seed=seed)
    yield "dense_batch", Case((130,) * 3, packed=False, state=F32, every=64)
    yield "long", Case((4096,), 1, 2, packed=False, state=F32, every=1024)
    yield "long_ragged", Case((1, 3000, 0, 1064), 2, 4, tail=31, state=F32, every=128)
    for H, HV in ((1, 1), (1, 2), (2, 2), (2, 6), (4, 16), (2, 8), (1, 8), (3, 9), (16, 32), (1, 11)):
        yield f"heads_{H}_{HV}", Case(RAGGED, H, HV, state=F32, every=64, seed=H)
    for dtype in (BF16, FP16):
        name = str(dtype).removeprefix("torch.")
        for gates in inputs.GATES:
            for keys in ("random", "correlated"):
                yield f"{name}_{gates}_{keys}", Case((70, 250), dtype=dtype, gates=gates, state=F32,
                                                     correlated=keys == "correlated")  # fmt: skip
        for layout in inputs.LAYOUTS:
            yield f"{name}_{layout}", Case(RAGGED, dtype=dtype, layout=layout, tail=9)
            yield f"{name}_{layout}_dense", Case((77, 77), dtype=dtype, layout=layout, packed=False, l2norm=True)
        yield f"{name}_split_qk_transposed_v", Case(RAGGED, dtype=dtype, layout="split", v_layout="transposed")
        yield f"{name}_l2norm", Case(RAGGED, dtype=dtype, l2norm=True, state=F32, tail=1)
        yield f"{name}_l2norm_correlated", Case(RAGGED, dtype=dtype, l2norm=True, state=F32, correlated=True)
        for state in (None, F32, BF16):
            kind = "none" if state is None else str(state).removeprefix("torch.")
            for v_first in (False, True):
                yield f"{name}_state_{kind}_{'v' if v_first else 'k'}_first", Case(
                    RAGGED, dtype=dtype, state=state, v_first=v_first, every=64, seed=3)  # fmt: skip
    for gate_dtype in (F32, BF16, FP16):
        for layout in ("contiguous", "split", "transposed"):
            name = f"gates_{str(gate_dtype).removeprefix('torch.')}_{layout}"
            yield name, Case(RAGGED, gate_dtype=gate_dtype, gate_layout=layout, gates="resets", tail=2)
            yield f"{name}_dense", Case((90,) * 2, packed=False, gate_dtype=gate_dtype, gate_layout=layout)
    for every in (64, 128, 192):
        yield f"checkpoints_{every}", Case((400, 63, 0, 192, 64), state=F32, every=every, tail=70)
        yield f"checkpoints_{every}_dense", Case((400,) * 2, packed=False, every=every, v_first=True)
    yield "checkpoints_without_final", Case((200, 64), state=BF16, every=64, final=False)
    for gap in (0, 5, 32):
        for state in (F32, BF16):
            options = {"state": state, "gap": gap, "v_first": gap == 5, "seed": gap}
            name = f"{str(state).removeprefix('torch.')}_gap_{gap}"
            yield f"states_{name}", Case(RAGGED, **options)
            yield f"pool_{name}", Case(RAGGED, pool=True, every=64, **options)
    for seed in range(6):  # each kind of index that is no slot
        yield f"padding_{seed}", Case(RAGGED, state=F32, pool=True, padding=True, index_dtype=torch.int64, every=64,
                                      seed=seed)  # fmt: skip
    yield "pool_without_final", Case(RAGGED, state=F32, pool=True, final=False)
    for scale in (0.0, 0.3, -2.0):
        yield f"scale_{scale}", Case(RAGGED, scale=scale, state=F32)
    yield "no_final", Case(RAGGED, final=False)


@st.composite
def drawn_cases(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    length = st.one_of(st.sampled_from([0, 1, 63, 64, 65]), st.integers(0, 140))
    lengths, packed = draw(st.lists(length, min_size=1, max_size=4)), draw(st.booleans())
    H, state = pick(1, 2, 3), pick(None, F32, BF16)
    pool = state is not None and draw(st.booleans())
    return Case(
        tuple(lengths) if packed else (lengths[0],) * draw(st.integers(1, 3)), H, H * pick(1, 2, 3, 4, 5, 8), packed,
        tail=pick(0, 0, 1, 70) if packed else 0, dtype=pick(BF16, FP16), gates=pick(*inputs.GATES),
        gate_dtype=pick(F32, BF16, FP16), gate_layout=pick("contiguous", "split", "transposed"),
        layout=pick(*inputs.LAYOUTS), v_layout=pick(None, *inputs.LAYOUTS), correlated=draw(st.booleans()),
        index_dtype=pick(torch.int32, torch.int64), state=state, gap=pick(0, 5, 64), pool=pool,
        padding=pool and draw(st.booleans()), v_first=draw(st.booleans()), every=pick(0, 0, 64, 128),
        l2norm=draw(st.booleans()), scale=pick(None, 0.0, 0.3), final=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 16)),
    )  # fmt: skip
