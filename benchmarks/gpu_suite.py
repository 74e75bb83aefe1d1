"""Everything there is to know about one GPU in eight minutes: one command, one JSON, one picture.

python benchmarks/gpu_suite.py --out results.json [--only conformance,steps]

Sections run in order of worth, each in a process of its own with a time limit; the JSON is written anew
after each. Needs jax, flax, transformers, numpy and matplotlib. On a CPU the same sections run on small
models with interpreted kernels: that checks the suite, not a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="

# name: (seconds at most, XLA flags). What matters most comes first.
SECTIONS = {
    "conformance": (70, ""),
    "throughput": (190, ""),
    "steps": (80, ""),
    "attention": (70, ""),
    "steps_no_command_buffers": (35, NO_COMMAND_BUFFERS),
    "steps_llama": (35, ""),
}
Save = Callable[[dict], None]  # takes what a section has found so far


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_suite.json"), help="the JSON; the PNG lies beside it"
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma-separated")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if args.section:
        args.out.write_text(json.dumps(RUN[args.section](lambda found: replace(args.out, found))))
        return 0
    chosen = args.only.split(",")
    if unknown := set(chosen) - set(SECTIONS):
        parser.error(f"--only {sorted(unknown)} must be among {list(SECTIONS)}")
    report: dict = {"sections": {}}
    for name in chosen:
        started = time.perf_counter()
        report["sections"][name] = run_section(name)
        report["sections"][name]["wall_s"] = round(time.perf_counter() - started, 1)
        args.out.write_text(json.dumps(report, indent=1))
        print(f"{name}: {json.dumps(report['sections'][name])[:600]}", flush=True)
    plot(report, args.out.with_suffix(".png"))
    return int(any("error" in section or section.get("failed") for section in report["sections"].values()))


def replace(path: Path, found: dict) -> None:
    """Writes a JSON whole, or not at all if the process is killed."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found))
    new.replace(path)


def run_section(name: str) -> dict:
    """Runs one section in a process of its own: what it found, and why that is not all."""
    limit, flags = SECTIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "section.json", Path(folder) / "stderr"
        environment = os.environ | {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        command = [sys.executable, __file__, "--section", name, "--out", str(out)]
        error = {}
        with said.open("w") as stderr:
            try:
                subprocess.run(command, env=environment, timeout=limit, check=True, stderr=stderr)
            except subprocess.TimeoutExpired:
                error = {"error": f"not done within {limit} s"}
            except subprocess.CalledProcessError as failure:
                error = {"error": f"exit code {failure.returncode}"}
        if error:
            error["stderr"] = said.read_text()[-1500:]
        return (json.loads(out.read_text()) if out.exists() else {}) | error


def on_gpu() -> bool:
    import jax

    return jax.devices()[0].platform == "gpu"


def kernels():
    """The backend under test: the kernels, interpreted where there is no GPU."""
    import jax

    from jpaged.ops.attention import Backend, capability_of

    capability = capability_of(jax.devices()[0])
    return Backend("pallas", capability) if capability else Backend("pallas_interpret")


# -- sections -------------------------------------------------------------------------------------


def conformance(save: Save) -> dict:
    """The kernels against dense attention in float64, on the device; twice, to see that bits repeat."""
    import jax
    import numpy as np
    from attention_cases import decode_of, make_case, prefill_of

    backend = kernels()
    decode, prefill = decode_of(backend), prefill_of(backend)
    decode_lens = [(n, min(n, 1)) for n in (0, 1, 15, 16, 17, 127, 129, 600, 4092)]
    prefill_lens = [(1, 1), (17, 17), (0, 0), (600, 45), (130, 130), (129, 1), (4092, 33), (257, 130)]
    cases = [
        dict(group=group, head_dim=head_dim, dtype=dtype, **mask)
        for group, head_dim, dtype, mask in (
            (4, 128, "bfloat16", {}),
            (7, 128, "bfloat16", {}),
            (4, 128, "float32", {}),
            (3, 64, "bfloat16", {}),
            (1, 80, "bfloat16", {}),
            (2, 96, "float32", dict(window=40)),
            (8, 256, "bfloat16", {}),
            (4, 128, "bfloat16", dict(window=40, soft_cap=4.0)),
            (2, 64, "float16", {}),
        )
    ]
    results = []
    for options_of_case in cases if on_gpu() else cases[3:4]:
        for kind, lens in (("decode", decode_lens), ("prefill", prefill_lens)):
            case = make_case(lens, platform="gpu", **options_of_case)
            result = dict(kernel=kind, **options_of_case)
            try:
                runs = []
                for _ in range(2):
                    if kind == "decode":
                        rows = case.run_decode(decode)
                        runs.append([r[None][:n] for r, (_, n) in zip(rows, lens, strict=True)])
                    else:
                        runs.append(case.run_prefill(prefill, padding=7)[0])
                errors = [
                    np.abs(g - e).max() for g, e in zip(runs[0], case.expected(), strict=True) if e.size
                ]
                result["error"] = float(np.max(errors))
                case.check(runs[0])
                result["repeats"] = all(np.array_equal(a, b) for a, b in zip(*runs, strict=True))
                result["ok"] = result["repeats"]
            except Exception as failure:
                result |= dict(ok=False, why=f"{type(failure).__name__}: {failure}"[:600])
            results.append(result)
            save(dict(cases=results, failed=sum(not result["ok"] for result in results)))
    failed = sum(not result["ok"] for result in results)
    device = jax.devices()[0].device_kind
    return dict(device=device, jax=jax.__version__, backend=backend.name, failed=failed, cases=results)


def random_model(preset: str):
    """(config, params): random bfloat16 weights in the preset's shapes; small ones without a GPU."""
    import jax

    from jpaged.models.transformer import init_params
    from jpaged.presets import preset as preset_config

    config = preset_config(preset)
    if not on_gpu():
        config = dataclasses.replace(
            config, num_layers=1, hidden_size=256, intermediate_size=256, num_heads=4, num_kv_heads=2,
            head_dim=64, vocab_size=1000, eos_token_ids=(2,), layer_windows=(None,),
        )  # fmt: skip
    return config, init_params(config, jax.random.key(0), "bfloat16" if on_gpu() else "float32")


def throughput(save: Save) -> dict:
    """256 requests, prompts and outputs of 100 to 1,024 tokens, on Qwen2.5-7B's shapes.

    The first pass compiles the shapes that the work needs; the second is the one to quote.
    """
    import jax
    from workloads import random_requests

    from jpaged import Engine

    config, params = random_model("qwen2.5-7b")
    count, lengths = (256, (100, 1024)) if on_gpu() else (4, (10, 20))
    sizes = dict(max_num_seqs=256, max_num_batched_tokens=4096) if on_gpu() else dict(max_num_seqs=4)
    blocks = (256 if on_gpu() else 4) * 2048 // 16
    engine = Engine(
        config,
        params,
        max_model_len=2048 if on_gpu() else 64,
        num_kv_blocks=blocks,
        prefix_cache="off",
        **sizes,
    )
    requests = random_requests(count, lengths, lengths, seed=0, vocab_size=config.vocab_size)
    result: dict = dict(device=jax.devices()[0].device_kind, requests=count)
    for name in ("first_pass", "second_pass"):
        result[name] = one_pass(engine, requests)
        result["memory_peak_bytes"] = memory_peak()
        save(result)
    return result


def one_pass(engine, requests) -> dict:
    """Figures of a run, and the seconds that compiling took meanwhile."""
    from serving import serve, summarize

    from jpaged.engine.metrics import compilations

    compile_s = compilations.seconds
    figures = summarize(serve(engine, requests))
    return figures | {"compile_s": compilations.seconds - compile_s}


def memory_peak() -> int | None:
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def steps(save: Save, preset: str = "qwen2.5-7b", compare: bool = True) -> dict:
    """Whole decode and prefill steps: milliseconds, and those of the floor (weights and KV, once).

    Args:
      compare: with XLA's attention, too.
    """
    import jax
    import numpy as np
    from attention import copy_bandwidth

    from jpaged.batch import init_row_state
    from jpaged.engine.packing import Buckets, Packer
    from jpaged.engine.steps import decode_step, prefill_step
    from jpaged.kv_cache import KVLayout, bytes_per_token, init_kv_cache
    from jpaged.ops.attention import Backend
    from jpaged.ops.sampling import Variant

    config, params = random_model(preset)
    layout = KVLayout.of(config, str(params.embed.dtype))
    platform = jax.devices()[0].platform
    num_seqs, context, num_tokens = (64, 1024, 2048) if on_gpu() else (4, 40, 32)
    blocks = -(-context // 16)
    table = (np.random.default_rng(0).permutation(num_seqs * blocks) + 1).astype(np.int32)
    table = table.reshape(num_seqs, blocks)
    width = 2 * blocks
    weights = sum(x.nbytes for x in jax.tree.leaves(params)) - (
        0 if config.tie_word_embeddings else params.embed.nbytes
    )
    kv = num_seqs * context * bytes_per_token(config, layout)
    bandwidth = copy_bandwidth(1 << 30 if on_gpu() else 1 << 24)
    result: dict = dict(
        preset=preset, weights_bytes=weights, kv_bytes=kv, copy_gb_per_s=round(bandwidth / 1e9, 1)
    )

    def packer(buckets: Buckets) -> Packer:
        return Packer(
            buckets, max_num_seqs=num_seqs, table_width=width, block_size=16, vocab_size=config.vocab_size
        )

    for backend in (kernels(), Backend("xla"))[: 1 + compare]:
        cache = init_kv_cache(config, num_seqs * blocks + 1, 16, layout, platform)
        state = init_row_state(num_seqs, config.vocab_size)
        tables = np.zeros((num_seqs, width), np.int32)
        tables[:, :blocks] = table
        last = table[:, (context - 1) // 16] * 16 + (context - 1) % 16
        batch = dataclasses.replace(
            packer(Buckets((num_seqs,), ())).padding_batch(),
            rows=np.arange(num_seqs, dtype=np.int32),
            slots=last.astype(np.int32),
            context_lens=np.full(num_seqs, context, np.int32),
            tables=tables,
        )
        options = dict(config=config, backend=backend, variant=Variant.GREEDY)
        milliseconds, cache, state = time_step(
            decode_step, params, cache, state, jax.device_put(batch), options
        )
        floor_ms = (weights + kv) / bandwidth * 1e3
        result[f"decode_{backend.name}"] = dict(ms=milliseconds, floor_ms=round(floor_ms, 3))
        save(result)
        ragged = packer(Buckets((), ((num_tokens, num_seqs),))).padding_batch()
        chunk = min(num_tokens, context)
        start = np.minimum(np.arange(num_seqs + 1) * chunk, num_tokens).astype(np.int32)
        owner = np.minimum(np.arange(num_tokens) // chunk, num_seqs - 1)
        position = (np.arange(num_tokens) % chunk).astype(np.int32)
        ragged = dataclasses.replace(
            ragged,
            token_ids=np.full(num_tokens, 5, np.int32),
            positions=position,
            slots=(table[owner, position // 16] * 16 + position % 16).astype(np.int32),
            query_start=start,
            context_lens=np.diff(start).astype(np.int32),
            tables=tables[: len(ragged.tables)],
        )
        options |= dict(deterministic=False)
        milliseconds, cache, state = time_step(
            prefill_step, params, cache, state, jax.device_put(ragged), options
        )
        layers = sum(x.size for x in jax.tree.leaves(params.layers))
        flops = 2 * (layers * num_tokens + params.embed.size * len(ragged.rows))
        result[f"prefill_{backend.name}"] = dict(
            ms=milliseconds,
            tokens_per_s=round(num_tokens / milliseconds * 1e3, 1),
            tflops=round(flops / milliseconds / 1e9, 1),
        )
        save(result)
        del cache, state
    result["memory_peak_bytes"] = memory_peak()
    return result


def time_step(step, params, cache, state, batch, options) -> tuple[float, object, object]:
    """Milliseconds of a step, the best of three runs of ten; and the donated arrays, handed on."""
    import jax

    cache, state, out = step(params, cache, state, batch, **options)
    jax.block_until_ready(out)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(10):
            cache, state, out = step(params, cache, state, batch, **options)
        jax.block_until_ready((cache, out))
        best = min(best, (time.perf_counter() - started) / 10)
    return round(best * 1e3, 3), cache, state


def attention_table(save: Save) -> dict:
    """Bandwidth of the attention kernels: `benchmarks/attention.py`."""
    import attention

    return attention.measure(save)


RUN = {
    "conformance": conformance,
    "throughput": throughput,
    "steps": steps,
    "attention": attention_table,
    "steps_no_command_buffers": lambda save: steps(save, compare=False),
    "steps_llama": lambda save: steps(save, "llama3-8b", compare=False),
}


def plot(report: dict, path: Path) -> None:
    """Bandwidth by kernel and milliseconds by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(14, 5), layout="constrained")
    rows = [r for r in report["sections"].get("attention", {}).get("kernels", []) if "of_copy" in r]
    left.barh(
        [f"{r['kernel']} {r['shape']} {r['implementation']}" for r in rows], [r["of_copy"] for r in rows]
    )
    left.set_xlabel("bandwidth, as a share of a copy's")
    left.tick_params(labelsize=6)
    bars = {
        f"{section} {key}": value["ms"]
        for section, values in report["sections"].items()
        for key, value in values.items()
        if isinstance(value, dict) and "ms" in value
    }
    right.barh(list(bars), list(bars.values()))
    right.set_xlabel("milliseconds per step")
    right.tick_params(labelsize=6)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
