"""Plans the memory of a model on a GPU, and explains it; loads nothing.

python scripts/plan_memory.py --model llama3-8b --gpu rtx4090 --weights int8 --kv int8 --context 8192

Temporaries come from the compiled steps where the `gpu-compile` extra is installed and the model is a preset
with floating-point weights; elsewhere they are an estimate, and the table says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from jpaged.config import ModelConfig
from jpaged.gpu_compile import TARGETS, check_plugin
from jpaged.memory_plan import KV_FORMATS, WEIGHTS, MemoryPlan, plan_memory
from jpaged.presets import PRESETS, preset
from jpaged.viz import canvas

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "fp8_e4m3"}


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        config = load_config(args.model)
        plan = plan_memory(
            config,
            memory_of(args.gpu),
            weights=SHORT.get(args.weights, args.weights),
            kv=SHORT.get(args.kv, args.kv),
            context=min(8192, config.max_supported_len) if args.context is None else args.context,
            max_num_seqs=args.max_num_seqs,
            temporary_bytes=compiled_temporaries(args),
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(as_record(plan)) if args.json else table(config, plan))
    if args.plot:
        draw(plan, args.plot)
    return 0


def memory_of(gpu: str) -> int:
    """Bytes of a named GPU, or the number that is given."""
    if gpu in TARGETS:
        return TARGETS[gpu].memory
    if not gpu.isdecimal():
        raise ValueError(f"gpu={gpu!r} must be one of {', '.join(TARGETS)}, or a number of bytes")
    return int(gpu)


def load_config(model: str) -> ModelConfig:
    """A preset's name, a directory with `config.json`, or such a file."""
    if model in PRESETS:
        return preset(model)
    path = Path(model)
    config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    if not isinstance(config, dict):
        raise ValueError(f"model={model!r} must hold a JSON object, it holds a {type(config).__name__}")
    config.pop("quantization_config", None)  # --weights says how they are held
    return ModelConfig.from_hf(config)


def compiled_temporaries(args: argparse.Namespace) -> int | None:
    """Temporary bytes of the largest step as compiled for the GPU; `None` where that is not known."""
    default_sizes = args.max_num_seqs == 256
    if (
        not default_sizes
        or SHORT.get(args.weights, args.weights) != "bfloat16"
        or args.gpu not in TARGETS
        or args.model not in PRESETS
    ):
        return None
    try:
        check_plugin()
    except RuntimeError:
        return None
    command = [sys.executable, str(Path(__file__).with_name("compile_check.py")), "--steps-only", "--json"]
    command += ["--target", args.gpu, "--model-config", args.model]
    command += ["--kv-dtype", SHORT.get(args.kv, args.kv)]
    done = subprocess.run(command, capture_output=True, text=True)
    steps = json.loads(done.stdout)["steps"] if done.returncode == 0 else {}
    return max((step["temp_bytes"] for step in steps.values()), default=None)


def as_record(plan: MemoryPlan) -> dict[str, object]:
    return dataclasses.asdict(plan) | {"weight_bytes": plan.weight_bytes, "kv_bytes": plan.kv_bytes}


def table(config: ModelConfig, plan: MemoryPlan) -> str:
    def row(name: str, size: int) -> str:
        return f"{name:<28}{size:>18,}{size / 2**30:>10.2f} GiB"

    source = "estimate" if plan.is_estimate else "compiled"
    lines = [row("device", plan.memory_bytes), row("usable by an engine", plan.usable_bytes)]
    lines += [row(f"  weights: {name}", size) for name, size in plan.weight_parts.items()]
    lines += [row("  row state", plan.row_state_bytes)]
    lines += [row(f"  temporaries ({source})", plan.temporary_bytes), row("  KV cache", plan.kv_bytes), ""]
    lines += [
        f"KV per token {plan.kv_bytes_per_token:,} bytes: {config.num_layers} layers x "
        f"{config.num_kv_heads} KV heads x {config.head_dim} values of K and "
        "of V, and 2 bytes per quantized head's scale",
        f"with {config.num_heads} full heads it would be {plan.full_heads_bytes_per_token:,}: "
        f"grouped queries save all but 1/{config.group_size}",
        f"KV per block {plan.kv_bytes_per_block:,} bytes; "
        f"{plan.kv_blocks:,} blocks, {plan.kv_tokens:,} tokens fit",
        f"{plan.max_sequences:,} sequences of {plan.context:,} tokens fit; "
        f"{plan.contiguous_max_sequences:,} if each reserved the model's {plan.reserved_len:,}",
    ]
    return "\n".join(lines)


def draw(plan: MemoryPlan, path: str) -> None:
    """Draws the account as one stacked bar."""
    _, figure = canvas(width=8, height=2.5)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    parts = plan.weight_parts | {"row state": plan.row_state_bytes, "temporaries": plan.temporary_bytes}
    parts |= {"KV cache": plan.kv_bytes, "left": plan.usable_bytes - plan.weight_bytes}
    parts["left"] -= plan.row_state_bytes + plan.temporary_bytes + plan.kv_bytes
    parts["not used"] = plan.memory_bytes - plan.usable_bytes
    start = 0.0
    for name, size in parts.items():
        axes.barh(0, size / 2**30, left=start, label=name)
        start += size / 2**30
    axes.set(xlabel="GiB", yticks=[])
    axes.legend(ncols=5, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, help=f"directory, config.json, or {', '.join(PRESETS)}")
    parser.add_argument("--gpu", required=True, help=f"bytes, or {', '.join(TARGETS)}")
    parser.add_argument("--weights", default="bf16", choices=[*SHORT, *WEIGHTS])
    parser.add_argument("--kv", default="bf16", choices=[*SHORT, *KV_FORMATS])
    parser.add_argument("--context", type=int, help="tokens of a sequence (8192, or the model's longest)")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--plot", metavar="PNG")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
