"""The command line that compiles for a GPU; the compiler itself needs packages that tests do not have."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import pytest

from jpaged.gpu_compile import TARGETS
from jpaged.models.transformer import MATRICES, abstract_params
from jpaged.pallas.common import MAX_POOL_ENTRIES
from jpaged.presets import preset

ROOT = Path(__file__).parents[1]
GIB = 1 << 30

KERNEL = {
    "name": "paged_decode d128 g4 bfloat16",
    "registers": 99,
    "spill_bytes": 0,
    "shared_bytes": 38928,
    "loads": {16: 24},
    "least_load_bytes": 16,
    "mma": ["mma m16n8k16 bf16"],
    "tf32": False,
}
STEP = {
    "argument_bytes": 100,
    "alias_bytes": 60,
    "temp_bytes": 2 * GIB,
    "launches": 500,
    "copies": [],
    "weight_bytes": 16 * GIB,
    "state_bytes": GIB,
}
TRAFFIC = {"layer": [("dot.1", 3_000_000), ("add_norm", 500)], "traffic_bytes": 108, "floor_bytes": 100}


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("compile_check", ROOT / "scripts" / "compile_check.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    module.results = {}

    def in_process(name, args):
        if name in module.results:
            return module.results[name]
        if name == module.TRAFFIC:
            return TRAFFIC, None
        return (STEP, None) if name in module.STEPS else ([KERNEL | {"name": name}], None)

    monkeypatch.setattr(module, "in_process", in_process)
    monkeypatch.setattr(module, "check_plugin", lambda: None)
    monkeypatch.setattr(module.os, "environ", {})
    return module


def run(script, capsys, *arguments):
    code = script.main(["--target", "h200", "--quick", *arguments])
    out, err = capsys.readouterr()
    return code, out, err.splitlines()


def test_every_dtype_meets_every_head_dim_and_every_group_in_decode_and_prefill(script):
    cases = script.select_cases(quick=False)
    for operation in ("decode", "prefill"):
        attention = [case for case in cases if case.operation == operation]
        for dtype in ("bfloat16", "float32", "int8", "fp8_e4m3", "int4"):
            assert {c.head_dim for c in attention if c.pool == dtype} == {64, 80, 96, 128, 256}
            assert {c.group for c in attention if c.pool == dtype} == {1, 3, 4, 7, 8}
        assert {c.block_size for c in attention} == {16, 32}
        assert any(c.window for c in attention) and any(c.soft_cap for c in attention)
    writes = {(c.head_dim, c.pool) for c in cases if c.operation == "write"}
    assert len(writes) == 26 and (80, "fp8_e4m3") in writes and (256, "int4") in writes
    assert len({case.name for case in cases}) == len(cases)
    assert set(script.select_cases(quick=True)) <= set(cases)


def test_products_with_int4_and_int8_weights_meet_every_width_of_the_presets(script):
    cases = [case for case in script.select_cases(quick=False) if case.operation == "matmul"]
    widths = {576, 896, 1536, 3584, 4096, 14336, 18944}
    for bits in (4, 8):
        assert {case.rows for case in cases if case.bits == bits} == widths
    assert {(c.bits, c.group) for c in cases} >= {(b, g) for b in (4, 8) for g in (32, 64, 128)} | {(8, 3584)}
    assert {case.num_tokens for case in cases} == {1, 32, 64}
    assert {case.dtype for case in cases} == {"bfloat16", "float16", "float32"}
    quick = [case.name for case in script.select_cases(quick=True) if case.operation == "matmul"]
    assert quick == [
        "matmul int4 g128 18944x3584 t32 bfloat16",
        "matmul int8 18944x3584 t32 bfloat16",
    ]


def test_the_report_is_one_json_object_and_the_pool_is_what_weights_and_temporaries_leave(script, capsys):
    code, out, err = run(script, capsys, "--json")
    report = json.loads(out)
    assert (code, err) == (0, []) and set(report) == {"target", "jax", "kernels", "steps", "kv_tokens_fit"}
    assert len(report["kernels"]) == len(script.select_cases(quick=True))
    assert report["kernels"][0] == {
        "name": "decode d128 g4 bfloat16",
        "registers": 99,
        "spill_bytes": 0,
        "shared_bytes": 38928,
        "global_load_bytes": 16,
        "mma": ["mma m16n8k16 bf16"],
        "tf32": False,
    }
    numbers = dict(argument_bytes=100, alias_bytes=60, temp_bytes=2 * GIB, launches=500, copied_bytes=0)
    traffic = dict(launches_per_layer=2, traffic_bytes=108, floor_bytes=100)
    assert report["steps"] == {"decode_step": numbers | traffic, "prefill_step": numbers}
    block = 16 * 2 * 32 * 8 * 128 * 2  # 16 tokens, K and V, 32 layers, 8 heads of 128 values of 2 bytes
    left = int(TARGETS["h200"].memory * 0.9) - 19 * GIB
    assert report["kv_tokens_fit"] == (left // block - 1) * 16


def test_no_more_tokens_fit_than_kernels_can_address(script, capsys):
    for name in ("decode_step", "prefill_step"):
        script.results[name] = (STEP | {"temp_bytes": GIB}, None)
    fit = json.loads(run(script, capsys, "--json", "--kv-dtype", "int4")[1])["kv_tokens_fit"]
    assert fit == (MAX_POOL_ENTRIES // (8 * 16 * 128) - 1) * 16


def test_a_model_that_does_not_fit_leaves_no_token(script, capsys):
    script.results["prefill_step"] = (STEP | {"temp_bytes": 200 * GIB}, None)
    assert json.loads(run(script, capsys, "--json")[1])["kv_tokens_fit"] == 0


def test_what_must_not_be_is_listed_by_name_and_makes_the_exit_code_1(script, capsys):
    decode, prefill, write = "decode d64 g3 bfloat16", "prefill d64 g3 bfloat16", "write d128 g4 bfloat16"
    script.results = {
        decode: ([KERNEL | {"name": decode, "spill_bytes": 24}], None),
        prefill: ([KERNEL | {"name": prefill, "loads": {4: 2, 8: 1, 16: 24}}], None),
        write: (None, "does not compile: ValueError: no"),
        "prefill_step": (
            STEP | {"copies": [("params.wo in copy.1", 64), ("cache.k[0] in copy.2", 32)]},
            None,
        ),
    }
    code, out, err = run(script, capsys, "--json")
    assert code == 1 and err == [
        f"problem: {write}: does not compile: ValueError: no",
        f"problem: {decode}: spills 24 bytes",
        f"problem: {prefill}: of 27 loads of K, V or a matrix 2 of 4 bytes, 1 of 8 bytes",
        "problem: prefill_step: copies params.wo in copy.1 (64 bytes)",
        "problem: prefill_step: copies cache.k[0] in copy.2 (32 bytes)",
    ]
    report = json.loads(out)
    assert report["steps"]["prefill_step"]["copied_bytes"] == 96
    assert [k["global_load_bytes"] for k in report["kernels"] if k["name"] == prefill] == [4]


def test_kernels_or_steps_alone(script, capsys):
    code, out, _ = run(script, capsys, "--kernels-only", "--json")
    assert code == 0 and json.loads(out)["steps"] == {} and json.loads(out)["kv_tokens_fit"] is None
    script.results["decode_step"] = (None, "does not compile within 900 s")
    code, out, err = run(script, capsys, "--steps-only", "--json")
    assert code == 1 and json.loads(out)["kernels"] == [] and json.loads(out)["kv_tokens_fit"] is None
    assert err == ["problem: decode_step: does not compile within 900 s"]


def test_the_table_has_a_row_for_each_kernel_and_step(script, capsys):
    script.results["write d128 g4 bfloat16"] = ([KERNEL | {"loads": {}, "mma": []}], None)
    _, out, _ = run(script, capsys)
    assert out.splitlines()[3].split() == "decode d128 g4 bfloat16 99 0 38928 16 mma m16n8k16 bf16".split()
    assert "paged_decode d128 g4 bfloat16 99 0 38928 - -" in " ".join(out.split())
    assert f"decode_step 100 60 {2 * GIB} 500 0" in " ".join(out.split())
    assert "108 bytes, 1.0800 of the floor of 100\na layer is 2 launches:\n" in out
    assert "dot.1 3.000 MB add_norm 0.001 MB" in " ".join(out.split())
    assert re.search(r"tokens of KV cache that fit beside the weights: [1-9]\d+\n$", out)


def test_kernels_of_attention_move_the_queries_the_context_and_the_ranges_that_are_used(script):
    config = preset("qwen2.5-7b")
    layout = script.kv_layout(config, "bfloat16")
    seqs, context, width, num_blocks = script.TRAFFIC_SEQS, script.TRAFFIC_CONTEXT, 2048, 16384
    sizes = types.SimpleNamespace(block_size=16, num_kv_blocks=num_blocks - 1, table_width=width)
    step = script.Step(None, config, layout, None, sizes)
    move = script.kernel_bytes(step, TARGETS["h200"])
    K, G, D = config.num_kv_heads, config.group_size, config.head_dim
    qkv, pool = seqs * K * (G + 2) * D * 4, num_blocks * K * 16 * D * 2
    lengths, table = 4 * seqs, 4 * seqs * width
    # 16 ranges have a place, 2,048 tokens have 4 of 512.
    partials = [16 * seqs * K * G * D * 4, 16 * seqs * K * G * 4]
    queries, kv = seqs * K * G * D * 4, seqs * context * K * D * 2 * 2
    used_table, used_partials = table // width * (context // 16), sum(partials) // 4
    assert move["paged_decode"]([qkv, pool, pool, table, lengths], partials) == (
        queries + kv + used_table + lengths + used_partials
    )
    assert move["paged_decode_merge"]([lengths, *partials], [777]) == lengths + used_partials + 777
    written = seqs * K * D * 2 * (4 + 2)  # read as float32, written as bfloat16
    assert move["write_kv"]([qkv, lengths, pool, pool], [pool, pool]) == written + lengths


def test_steps_have_the_weights_and_the_sequences_that_are_asked_for(script):
    def parsed(*arguments):
        args = script.parse_arguments(["--target", "h200", *arguments])
        return args.weights, args.max_num_seqs

    assert parsed() == ("bf16", None)
    assert parsed("--weights", "int4", "--max-num-seqs", "32") == ("int4", 32)
    with pytest.raises(SystemExit):
        parsed("--weights", "int3")


def test_whole_quantized_matrices_are_found_by_their_size_unless_activations_have_it(script):
    config = preset("qwen2.5-7b").replace(num_layers=1, layer_windows=())
    E, F = config.hidden_size, config.intermediate_size
    written = [
        ("dequantized", "bf16", E * E, 2 * E * E),
        ("repacked", "u8", E * F // 2, E * F // 2),
        ("unpacked", "s8", E * F, E * F),
        ("chunk", "bf16", 512 * 2 * F, 1024 * 2 * F),
        ("gate_up", "f32", E * 2 * F, 4 * E * 2 * F),
    ]
    program = types.SimpleNamespace(written=lambda: written)
    prefixes, found = script.whole_matrices(
        program, abstract_params(config, "bfloat16", "int4"), num_tokens=E
    )
    assert prefixes == tuple(f"params.layers[0].{name}." for name in MATRICES)
    # With E tokens, outputs of products have the sizes of `gate_up` and `dequantized`.
    assert found == [
        ("a quantized matrix in repacked", E * F // 2),
        ("a quantized matrix in unpacked", E * F),
    ]
    found = script.whole_matrices(program, abstract_params(config, "bfloat16", "int4"), num_tokens=32)[1]
    assert [what.split()[-1] for what, _ in found] == ["dequantized", "repacked", "unpacked", "gate_up"]
    assert script.whole_matrices(program, abstract_params(config), num_tokens=32) == ((), [])


def test_a_missing_plugin_is_an_error_before_anything_starts(script, capsys, monkeypatch):
    def fail():
        raise RuntimeError("no plugin")

    monkeypatch.setattr(script, "check_plugin", fail)
    assert run(script, capsys) == (1, "", ["error: no plugin"])
