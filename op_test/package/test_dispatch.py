"""Dispatch with faked torch properties: targets, policy, refusals, warnings, and what the host pays for them."""

import dataclasses
import logging
import sys
import timeit
import types
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import atrex
from atrex import _device, _dispatch
from atrex.api import chunk_gdn
from harness import inputs

DEVICES = {
    "gfx942": ({"hip": "6.4", "cuda": None}, {"name": "AMD Instinct MI300X", "gcnArchName": "gfx942:sramecc+:xnack-"}),
    "gfx950": ({"hip": "7.0", "cuda": None}, {"name": "AMD Instinct MI355X", "gcnArchName": "gfx950:sramecc+:xnack-"}),
    "ppu": ({"hip": None, "cuda": "12.9"}, {"name": "ZW-M890P", "major": 8, "minor": 9}),
    "h200": ({"hip": None, "cuda": "13.0"}, {"name": "NVIDIA H200", "major": 9, "minor": 0}),
    "pro6000": (
        {"hip": None, "cuda": "13.0"},
        {"name": "NVIDIA RTX PRO 6000 Blackwell Server Edition", "major": 12, "minor": 0},
    ),
    "rtx5090": ({"hip": None, "cuda": "13.0"}, {"name": "NVIDIA GeForce RTX 5090", "major": 12, "minor": 0}),
    "gb10": ({"hip": None, "cuda": "13.0"}, {"name": "NVIDIA GB10", "major": 12, "minor": 1}),
    "b200": ({"hip": None, "cuda": "13.0"}, {"name": "NVIDIA B200", "major": 10, "minor": 0}),
    "foreign": ({"hip": None, "cuda": "13.0"}, {"name": "Foreign GPU 90", "major": 9, "minor": 0}),
    "not_quite_ppu": ({"hip": None, "cuda": "13.0"}, {"name": "ZW-M890P-2", "major": 8, "minor": 9}),
    "not_quite_nvidia": ({"hip": None, "cuda": "13.0"}, {"name": "My NVIDIA H200", "major": 9, "minor": 0}),
    "no_cuda_build": ({"hip": None, "cuda": None}, {"name": "NVIDIA H200", "major": 9, "minor": 0}),
}
TARGETS = {
    "gfx942": ("amd", "gfx942"),
    "gfx950": ("amd", "gfx950"),
    "ppu": ("ppu", "zwm890p"),
    "h200": ("nvidia", "sm90"),
    "pro6000": ("nvidia", "sm120"),
    "rtx5090": ("nvidia", "sm120"),
    "gb10": ("nvidia", "sm121"),
    "b200": ("nvidia", "sm100"),
    "foreign": ("unknown", "Foreign GPU 90"),
    "not_quite_ppu": ("unknown", "ZW-M890P-2"),
    "not_quite_nvidia": ("unknown", "My NVIDIA H200"),
    "no_cuda_build": ("unknown", "NVIDIA H200"),
}
SERVED_BY = {"h200": "sm90", "pro6000": "sm120", "rtx5090": "sm120", "gb10": "sm120"}  # the folder of the kernels


@pytest.fixture(autouse=True)
def fresh_caches(monkeypatch):
    monkeypatch.setattr(_device, "_targets", {})
    monkeypatch.delenv("ATREX_REQUIRE_KERNEL", raising=False)
    caches = (_dispatch._in_wheel, _dispatch._load, _dispatch._warn_once)
    for cached in caches:
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    """Makes torch describe the device ``name``; the list holds the devices whose properties were asked for."""

    def become(name):
        build, properties = DEVICES[name]
        asked = []
        monkeypatch.setattr(torch.version, "hip", build["hip"])
        monkeypatch.setattr(torch.version, "cuda", build["cuda"])

        def get_device_properties(device):
            asked.append(device)
            return types.SimpleNamespace(**properties)

        monkeypatch.setattr(torch.cuda, "get_device_properties", get_device_properties)
        return asked

    return become


@pytest.fixture
def kernels(monkeypatch):
    """Implementations in the wheel that record their calls, by architecture."""
    calls = {arch: [] for arch in SERVED_BY.values()}
    monkeypatch.setattr(_dispatch, "_in_wheel", lambda entry: True)
    for parent in ("atrex.kernels.nvidia.chunk_gdn", "atrex.kernels.nvidia", "atrex.kernels"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    for arch, of_arch in calls.items():
        module = types.ModuleType(f"atrex.kernels.nvidia.chunk_gdn.{arch}.runtime")
        parent = module.__name__.rpartition(".")[0]

        def entry(call, of_arch=of_arch):
            of_arch.append(call)
            return call.v, call.initial_state, None

        module.chunk_gated_delta_rule = entry
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    return calls


@pytest.fixture
def kernel(kernels):
    """The calls of the sm90 implementation."""
    return kernels["sm90"]


def fake_call(device="cuda", dtype=torch.bfloat16, K=128, V=128, **options):
    """Arguments on a device that this machine need not have."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(1, 64, 2, K, dtype=dtype, device=device)
        gate = torch.empty(1, 64, 4, device=device)
        v = torch.empty(1, 64, 4, V, dtype=dtype, device=device)
        return {"q": x, "k": x, "v": v, "g": gate, "beta": gate} | options


@pytest.mark.parametrize("name", DEVICES)
def test_target_of_a_device(machine, name):
    asked = machine(name)
    target = _device.device_target(torch.device("cuda", 0))
    assert (target.vendor, target.arch) == TARGETS[name]
    assert str(target) == "/".join(TARGETS[name])
    assert _device.device_target(torch.device("cuda", 0)) is target and len(asked) == 1
    _device.device_target(torch.device("cuda", 1))
    assert [device.index for device in asked] == [0, 1]


def test_target_of_a_cpu_asks_no_gpu(machine):
    asked = machine("h200")
    assert _device.device_target(torch.device("cpu")) == _device.DeviceTarget("unknown", "cpu")
    tensors = inputs.make_inputs(1, 5, 1, 1, 4, 4, seed=1, device="cpu")
    atrex.chunk_gated_delta_rule(*tensors)
    assert not asked and not torch.cuda.is_initialized()


@pytest.mark.parametrize("name", DEVICES)
def test_each_device_picks_its_own_kernel(machine, kernels, name):
    machine(name)
    answer = atrex.can_use_chunk_gated_delta_rule(**fake_call())
    assert answer.target == "/".join(TARGETS[name])
    assert bool(answer) == (name in SERVED_BY)
    if answer:
        assert answer.reason == ""
        atrex.chunk_gated_delta_rule(**fake_call())
        assert {arch: len(calls) for arch, calls in kernels.items() if calls} == {SERVED_BY[name]: 1}
    else:
        known = "nvidia/sm90, nvidia/sm120, nvidia/sm121"
        assert answer.reason == f"no implementation for {answer.target} (q is on cuda:0), there is one for {known}"
        assert not any(kernels.values())


def test_the_kernel_gets_the_checked_call(machine, kernel):
    machine("h200")
    arguments = fake_call(dtype=torch.float16)
    o, final = atrex.chunk_gated_delta_rule(**arguments)
    (call,) = kernel
    assert o is arguments["v"] and final is None
    assert all(getattr(call, name) is x for name, x in arguments.items())
    assert call.scale == 128**-0.5 and call.state_dtype is torch.float32 and not call.needs_grad
    assert (call.B, call.T, call.H, call.HV, call.K, call.V, call.N) == (1, 64, 2, 4, 128, 128, 1)


def test_zero_scale_is_not_the_default(machine, kernel):
    machine("h200")
    atrex.chunk_gated_delta_rule(**fake_call(scale=0.0))
    assert kernel[0].scale == 0.0


def with_grad():
    arguments = fake_call()
    arguments["beta"].requires_grad_()
    return arguments


def transposed_state():
    with FakeTensorMode():
        return fake_call(initial_state=torch.empty(1, 4, 128, 128, device="cuda").mT)


REFUSED = {
    "float32": (
        lambda: fake_call(dtype=torch.float32),
        "q, k and v must be all bfloat16 or all float16, got float32, float32, float32",
    ),
    "K": (lambda: fake_call(K=64), "q, k and v must have head sizes K=V=128, got K=64, V=128"),
    "V": (lambda: fake_call(V=256), "q, k and v must have head sizes K=V=128, got K=128, V=256"),
    "grad": (with_grad, "no input may require grad in grad mode: the kernels have no backward"),
    "state": (
        transposed_state,
        "initial_state must be contiguous within a sequence or slot, got strides (65536, 16384, 1, 128)",
    ),
}


@pytest.mark.parametrize("device", SERVED_BY)
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_refuse(machine, kernel, name, device):
    machine(device)
    make, reason = REFUSED[name]
    answer = atrex.can_use_chunk_gated_delta_rule(**make())
    assert not answer and answer.reason == reason and answer.target == "/".join(TARGETS[device])


@pytest.mark.parametrize("device", SERVED_BY)
def test_what_the_kernels_serve(machine, kernel, device):
    machine(device)
    with torch.no_grad():
        assert atrex.can_use_chunk_gated_delta_rule(**with_grad())
    with FakeTensorMode():
        page = 4 * 128 * 128 + 64
        pool = torch.empty_strided((7, 4, 128, 128), (page, 128 * 128, 128, 1), device="cuda", dtype=torch.bfloat16)
        slots = torch.empty(1, dtype=torch.int32, device="cuda")
        strided = fake_call(v=torch.empty(1, 128, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 3))
    assert atrex.can_use_chunk_gated_delta_rule(
        **fake_call(initial_state=pool, state_indices=slots, checkpoint_every=64)
    )
    assert strided["v"].stride(-1) != 1 and atrex.can_use_chunk_gated_delta_rule(**strided)


def test_a_wheel_without_the_target(machine, monkeypatch):
    machine("h200")
    missing = dataclasses.replace(chunk_gdn._POLICY[0], entry="atrex.kernels.nvidia.gone.sm90.runtime:run")
    monkeypatch.setattr(chunk_gdn, "_POLICY", (missing,))
    answer = atrex.can_use_chunk_gated_delta_rule(**fake_call())
    assert not answer and answer.reason == "the nvidia/sm90 implementation is not in this wheel"


@pytest.mark.parametrize("device", SERVED_BY)
def test_asking_imports_no_kernel(machine, device):
    machine(device)
    answer = atrex.can_use_chunk_gated_delta_rule(**fake_call())
    assert bool(answer) == (Path(atrex.__file__).parent / f"kernels/nvidia/chunk_gdn/{SERVED_BY[device]}").is_dir()
    assert f"atrex.kernels.nvidia.chunk_gdn.{SERVED_BY[device]}" not in sys.modules


def test_the_first_eligible_implementation_wins(machine, monkeypatch):
    machine("h200")
    monkeypatch.setattr(_dispatch, "_in_wheel", lambda entry: True)
    monkeypatch.setattr(_dispatch, "_load", lambda entry: lambda call: (entry, None, None))
    no = lambda call: _dispatch.Eligibility(False, "nvidia/sm90", "not this one")  # noqa: E731
    yes = lambda call: _dispatch.Eligibility(True, "nvidia/sm90", "")  # noqa: E731
    policy = [
        ("amd", "gfx942", yes, "other"),
        ("nvidia", "sm90", no, "no"),
        ("nvidia", "sm90", yes, "first"),
        ("nvidia", "sm90", yes, "second"),
    ]
    monkeypatch.setattr(chunk_gdn, "_POLICY", tuple(_dispatch.Implementation(*line) for line in policy))
    assert atrex.chunk_gated_delta_rule(**fake_call())[0] == "first"


@pytest.fixture
def fallback(monkeypatch):
    """The fallback replaced by a function that counts: what it computes is tested elsewhere, on a CPU."""
    calls = []
    monkeypatch.setattr(chunk_gdn, "_fallback", lambda call: calls.append(call) or (call.v, None, None))
    return calls


def test_fallback_on_a_gpu_warns_once_a_reason(machine, kernel, fallback, caplog):
    machine("h200")
    with caplog.at_level(logging.WARNING, "atrex"):
        for _ in range(3):
            atrex.chunk_gated_delta_rule(**fake_call(K=64))
        atrex.chunk_gated_delta_rule(**fake_call(K=32))
    assert len(fallback) == 4
    assert [record.getMessage() for record in caplog.records] == [
        "chunk_gated_delta_rule runs on the slower PyTorch fallback: "
        f"q, k and v must have head sizes K=V=128, got K={K}, V=128"
        for K in (64, 32)
    ]


def test_a_required_kernel_makes_the_fallback_an_error(machine, kernel, fallback, monkeypatch, caplog):
    machine("foreign")
    monkeypatch.setenv("ATREX_REQUIRE_KERNEL", "1")
    with pytest.raises(RuntimeError, match=r"no implementation for unknown/Foreign GPU 90 .*ATREX_REQUIRE_KERNEL=1"):
        atrex.chunk_gated_delta_rule(**fake_call())
    assert not fallback and not caplog.records
    monkeypatch.setenv("ATREX_REQUIRE_KERNEL", "0")
    atrex.chunk_gated_delta_rule(**fake_call())
    assert len(fallback) == 1


def test_fallback_on_a_cpu_is_silent(monkeypatch, caplog):
    monkeypatch.setenv("ATREX_REQUIRE_KERNEL", "1")
    tensors = inputs.make_inputs(1, 5, 1, 1, 4, 4, seed=2, device="cpu")
    assert atrex.chunk_gated_delta_rule(*tensors)[0].isfinite().all()
    assert not caplog.records


def test_host_cost_of_checks_and_dispatch(kernel, monkeypatch):
    """About 7 us on a 2.45 GHz EPYC; the bound leaves room for a slower or busy machine, not for a copy."""
    monkeypatch.setitem(_device._targets, torch.device("cpu"), _device.DeviceTarget("nvidia", "sm90"))
    tensors = inputs.make_inputs(1, 64, 2, 4, seed=3, device="cpu")
    pool, slots, offsets = inputs.make_states(2, 4, seed=4, device="cpu"), torch.tensor([1]), torch.tensor([0, 64])
    call = lambda: atrex.chunk_gated_delta_rule(  # noqa: E731
        *tensors, None, pool, True, use_qk_l2norm_in_kernel=True, cu_seqlens=offsets, state_indices=slots
    )
    best = min(timeit.repeat(call, number=1000, repeat=20)) / 1000
    print(f"checks and dispatch: {best * 1e6:.1f} us")
    assert len(kernel) == 20_000
    assert best < 25e-6
