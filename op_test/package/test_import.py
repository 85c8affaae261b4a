"""What ``import atrex`` costs and what the public names look like before and after their first use."""

import importlib
import importlib.metadata
import importlib.resources
import inspect
import json
import os
import pydoc
import subprocess
import sys
import textwrap

import pytest

import atrex

# The API module of each public function.
PUBLIC = {
    "can_use_causal_conv1d_fn": "causal_conv1d",
    "can_use_causal_conv1d_update": "causal_conv1d",
    "can_use_chunk_gated_delta_rule": "chunk_gdn",
    "can_use_fused_recurrent_gated_delta_rule": "recurrent_gdn",
    "can_use_gated_rms_norm": "gated_rms_norm",
    "can_use_gdn_prepare": "gdn_prepare",
    "causal_conv1d_fn": "causal_conv1d",
    "causal_conv1d_update": "causal_conv1d",
    "chunk_gated_delta_rule": "chunk_gdn",
    "fused_recurrent_gated_delta_rule": "recurrent_gdn",
    "gated_rms_norm": "gated_rms_norm",
    "gdn_prepare": "gdn_prepare",
}


def child(code):
    """What ``code`` prints as JSON in a fresh process with the same paths."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return json.loads(subprocess.run(command, check=True, env=env, stdout=subprocess.PIPE).stdout)


def test_import_takes_less_than_50_ms():
    seconds = child("""
        import json, time, torch
        start = time.perf_counter()
        import atrex
        print(json.dumps(time.perf_counter() - start))
    """)
    assert seconds < 0.05


def test_import_loads_neither_torch_nor_a_contract_nor_a_kernel():
    modules = child("import json, sys, atrex; print(json.dumps([*sys.modules]))")
    assert "torch" not in modules
    assert sorted(name for name in modules if name.split(".")[0] == "atrex") == ["atrex", "atrex._version"]


def test_import_and_cpu_calls_compile_nothing_and_touch_no_gpu():
    """Watched by an audit hook: no process is started, no library loaded by hand, no device file or driver opened."""
    seen = child("""
        import json, sys, torch
        seen = []
        def watch(event, arguments):
            if event.startswith(("subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system")):
                seen.append(event)
            elif event == "open" and any(word in str(arguments[0]) for word in ("/dev/", "libcuda", "_native")):
                seen.append(str(arguments[0]))
            elif event == "import" and str(arguments[0]).startswith(("atrex.kernels", "triton", "torch._inductor")):
                seen.append(str(arguments[0]))
        def no_gpu():
            raise AssertionError("a GPU was touched")
        torch.cuda._lazy_init = no_gpu
        sys.addaudithook(watch)
        import atrex
        x, gate = torch.ones(1, 70, 2, 16), torch.zeros(1, 70, 2)
        asked = bool(atrex.can_use_chunk_gated_delta_rule(x, x, x, gate, gate))
        atrex.chunk_gated_delta_rule(x, x, x, gate, gate)
        print(json.dumps([seen, asked, torch.cuda.is_initialized()]))
    """)
    assert seen == [[], False, False]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_proxy_looks_like_its_function(name):
    module = importlib.import_module(f"atrex.api.{PUBLIC[name]}")
    function, proxy = getattr(module, name), atrex._lazy_import_and_call(name, lambda: module)
    assert inspect.signature(proxy) == inspect.signature(function)
    assert inspect.getdoc(proxy) == inspect.getdoc(function) and len(proxy.__doc__) > 300
    assert inspect.isroutine(proxy) and inspect.unwrap(proxy) is function
    assert pydoc.render_doc(proxy).split("\n", 1)[1] == pydoc.render_doc(function).split("\n", 1)[1]
    assert repr(proxy) == f"<function atrex.{name}>"


def test_a_proxy_steps_aside_for_its_function_alone(monkeypatch):
    from atrex.api import chunk_gdn

    name, function = "chunk_gated_delta_rule", chunk_gdn.chunk_gated_delta_rule
    for standing in (None, object()):  # the proxy itself, then a mock in its place
        proxy = atrex._lazy_import_and_call(name, lambda: chunk_gdn)
        monkeypatch.setattr(atrex, name, standing or proxy)
        assert inspect.unwrap(proxy) is function
        assert getattr(atrex, name) is (standing or function)


DELTA_RULE = {"scale": None, "initial_state": None, "output_final_state": False}
# Of each function: names of the positional arguments without a default, and the defaults of the others.
POSITIONAL = {
    "causal_conv1d_fn": (["x", "weight"], {"bias": None}),
    "causal_conv1d_update": (["x", "conv_state", "weight"], {"bias": None, "activation": None}),
    "chunk_gated_delta_rule": (["q", "k", "v", "g", "beta"], DELTA_RULE),
    "gated_rms_norm": (["x", "weight", "z"], {"eps": 1e-6}),
    "gdn_prepare": (
        ["conv_output", "a", "b", "A_log", "dt_bias", "num_k_heads", "head_k_dim", "head_v_dim"],
        {"apply_l2norm": True},
    ),
    "fused_recurrent_gated_delta_rule": (["q", "k", "v"], {"g": None, "beta": None} | DELTA_RULE),
}
KEYWORDS = {
    "causal_conv1d_fn": {
        "activation": None,
        "initial_states": None,
        "return_final_states": False,
        "query_start_loc": None,
        "conv_states": None,
        "cache_indices": None,
        "has_initial_state": None,
        "initial_state_indices": None,
        "pad_slot_id": -1,
    },
    "causal_conv1d_update": {
        "conv_state_indices": None,
        "query_start_loc": None,
        "num_accepted_tokens": None,
        "initial_state_indices": None,
        "pad_slot_id": -1,
    },
    "chunk_gated_delta_rule": {
        "use_qk_l2norm_in_kernel": False,
        "cu_seqlens": None,
        "state_v_first": False,
        "state_indices": None,
        "checkpoint_every": 0,
        "head_first": False,
    },
    "gated_rms_norm": {"activation": "silu", "cast_before_weight": False},
    "gdn_prepare": {},
    "fused_recurrent_gated_delta_rule": {
        "A_log": None,
        "a": None,
        "b": None,
        "dt_bias": None,
        "use_qk_l2norm_in_kernel": False,
        "cu_seqlens": None,
        "state_v_first": False,
        "state_indices": None,
        "initial_state_indices": None,
        "num_accepted_tokens": None,
        "padding_index": -1,
        "intermediate_states_buffer": None,
        "intermediate_state_indices": None,
    },
}


@pytest.mark.parametrize("name", PUBLIC)
def test_signature_is_that_of_the_field(name):
    function = name.removeprefix("can_use_")
    required, defaults = POSITIONAL[function]
    parameters = inspect.signature(getattr(atrex, name)).parameters.values()
    positional = {x.name: x.default for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD}
    assert list(positional.items()) == [*((x, inspect.Parameter.empty) for x in required), *defaults.items()]
    assert {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY} == KEYWORDS[function]


def test_first_use_replaces_the_proxy():
    before, after, same = child("""
        import json, atrex, torch
        held = atrex.chunk_gated_delta_rule
        x, gate = torch.ones(1, 3, 1, 4), torch.zeros(1, 3, 1)
        first = held(x, x, x, gate, gate)[0]
        second = held(x, x, x, gate, gate)[0]
        third = atrex.chunk_gated_delta_rule(x, x, x, gate, gate)[0]
        same = torch.equal(first, second) and torch.equal(first, third)
        print(json.dumps([type(held).__name__, type(atrex.chunk_gated_delta_rule).__name__, same]))
    """)
    assert (before, after, same) == ("_LazyFunction", "function", True)


def test_names_version_and_typing_marker():
    assert sorted(atrex.__all__) == sorted(PUBLIC)
    assert all(callable(getattr(atrex, name)) for name in atrex.__all__)
    assert atrex.__version__ == importlib.metadata.version("atrex")
    assert importlib.resources.files("atrex").joinpath("py.typed").is_file()


def test_type_checkers_see_the_functions(tmp_path, monkeypatch):
    from mypy import api

    (tmp_path / "caller.py").write_text(
        "import atrex\nreveal_type(atrex.can_use_chunk_gated_delta_rule)\natrex.chunk_gated_delta_rule(quantity=1)\n"
    )
    # torch is left out of the analysis: it takes a minute, and is not what is asked.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    monkeypatch.setenv("MYPYPATH", os.path.dirname(os.path.dirname(atrex.__file__)))
    output, errors, _ = api.run(
        [str(tmp_path / "caller.py"), "--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "c")]
    )
    assert "-> atrex._dispatch.Eligibility" in output, output + errors
    assert 'Unexpected keyword argument "quantity" for "chunk_gated_delta_rule"' in output, output + errors
