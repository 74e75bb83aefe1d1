"""What quantization costs in quality: compares a model with itself, unquantized, on a text.

python scripts/quant_report.py --model smollm2-135m-instruct --kv-cache-dtype int8

Both runs read keys and values from real pools. The text is cut into windows that are scored one by one:
perplexity, the divergence of the next-token distributions (KL, nats a token) and how often both put the same
token first. Then greedy continuations of its beginnings are compared, and the attention of each layer and KV
head on equal inputs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged import Engine, SamplingParams
from jpaged.config import AS_STORED, DTYPES, LARGEST, QUANTIZATIONS, ModelConfig, check_int
from jpaged.kv_cache import KVLayout, bytes_per_token, init_kv_cache
from jpaged.models.transformer import Params, forward, logits
from jpaged.ops import attention
from jpaged.ops.attention import Backend
from jpaged.weights import open_checkpoint

TEXT = Path(__file__).parent / "texts" / "alice.txt"
BLOCK_SIZE = 16
CHUNK = 64  # rows of logits at a time
NUM_PROMPTS, PROMPT_LEN, CONTINUATION_LEN = 8, 64, 64


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        report = _report(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report))
        return 0
    for key, value in report.items():
        print(f"{key:26s} {value}")
    return 0


def _report(args: argparse.Namespace) -> dict[str, Any]:
    if args.max_tokens is not None:
        check_int("max_tokens", args.max_tokens, low=1)
    checkpoint = open_checkpoint(args.model)
    tokenizer = checkpoint.load_tokenizer()
    if tokenizer is None:
        raise ValueError(f"model={args.model!r} has no tokenizer")
    ids = tokenizer.encode(args.text.read_text(), add_special_tokens=False)[: args.max_tokens]
    reference = checkpoint.load_params(args.dtype)
    quantized = reference
    if args.quantization:
        quantized = checkpoint.load_params(args.dtype, args.quantization)
    report: dict[str, Any] = {
        "model": args.model,
        "dtype": args.dtype,
        "kv_cache_dtype": args.kv_cache_dtype,
        "quantization": args.quantization,
    }
    notes = []
    if args.quantization == "int4" and args.model.startswith("smollm2"):
        notes.append(
            "this checkpoint's weights were 4-bit in groups of 32 before: its groups of 32 prove nothing"
        )
    if args.kv_cache_dtype == "fp8_e4m3":
        notes.append(
            "float8 has three bits of mantissa whatever the scale; int8 takes the same memory and is closer"
        )
    if notes:
        report["note"] = "; ".join(notes)
    return report | compare(
        checkpoint.config, reference, quantized, ids, args.kv_cache_dtype, window=args.window
    )


def compare(
    config: ModelConfig,
    reference: Params,
    quantized: Params,
    ids: list[int],
    kv_cache_dtype: str,
    *,
    window: int,
) -> dict[str, Any]:
    """The report's figures.

    Args:
      ids: the text, at least `window` tokens; what does not fill a window is left out.

    Raises:
      ValueError: a window is longer than the model's limit, or the text is shorter than a window.
    """
    check_int("window", window, low=2, high=config.max_supported_len)
    if len(ids) < window:
        raise ValueError(f"the text has {len(ids)} tokens, at least window={window} are needed")
    dtype = str(reference.embed.dtype)
    plain, layout = KVLayout.of(config, dtype), KVLayout.of(config, dtype, kv_cache_dtype)
    windows = np.array(ids[: len(ids) // window * window], np.int32).reshape(-1, window)
    hidden = [_hidden_states(config, own, window) for own in (plain, layout)]
    rows = [
        _scores(reference, quantized, hidden[0](reference, row), hidden[1](quantized, row), row[1:])
        for row in windows
    ]
    nll, reference_nll, kl, agrees = (np.concatenate(column) for column in zip(*rows, strict=True))
    errors = np.asarray(_attention_errors(config, plain, layout, window)(reference, windows[0]))
    layer, head = np.unravel_index(errors.argmax(), errors.shape)
    divergence = _divergence(config, reference, quantized, ids, kv_cache_dtype)
    kv_bytes, weight_bytes = (
        [bytes_per_token(config, own) for own in (layout, plain)],
        [sum(leaf.nbytes for leaf in jax.tree.leaves(own)) for own in (quantized, reference)],
    )
    return {
        "tokens": int(nll.size),
        "perplexity": float(np.exp(nll.mean())),
        "reference_perplexity": float(np.exp(reference_nll.mean())),
        "perplexity_change_percent": float(100 * np.expm1(nll.mean() - reference_nll.mean())),
        "kl": float(kl.mean()),
        "top1_agreement": float(100 * agrees.mean()),
        "greedy_divergence": divergence,
        "worst_layer": int(layer),
        "worst_kv_head": int(head),
        "worst_attention_error": float(errors.max()),
        "kv_bytes_per_token": kv_bytes[0],
        "kv_bytes_saved_percent": 100 * (1 - kv_bytes[0] / kv_bytes[1]),
        "weight_bytes": weight_bytes[0],
        "weight_bytes_saved_percent": 100 * (1 - weight_bytes[0] / weight_bytes[1]),
    }


def _paged(config: ModelConfig, layout: KVLayout, length: int) -> Callable[..., jax.Array]:
    """Attention of one sequence that writes its K and V into pools and reads them back: an `attend`."""
    blocks = -(-length // BLOCK_SIZE)
    tables = jnp.arange(1, blocks + 1, dtype=jnp.int32)[None]
    slots = BLOCK_SIZE + jnp.arange(length, dtype=jnp.int32)
    start, lens = jnp.array([0, length], jnp.int32), jnp.array([length], jnp.int32)
    cache = init_kv_cache(config, blocks + 1, BLOCK_SIZE, layout, jax.default_backend())
    backend = Backend("xla")
    over = attention.paged_prefill(backend, tables, start, lens, length)

    def attend(layer: int, qkv: jax.Array) -> jax.Array:
        pools = attention.write_kv(backend, cache.k[layer], cache.v[layer], qkv, slots)
        return over(qkv, *pools, window=config.layer_windows[layer])

    return attend


def _hidden_states(config: ModelConfig, layout: KVLayout, window: int) -> Callable[..., jax.Array]:
    attend = _paged(config, layout, window)
    positions = np.arange(window, dtype=np.int32)
    return jax.jit(lambda params, ids: forward(params, config, ids, positions, attend))


@jax.jit
def _scores(
    reference: Params, quantized: Params, reference_hidden: jax.Array, hidden: jax.Array, targets: jax.Array
) -> tuple[jax.Array, ...]:
    """Per token: negative log-likelihoods of both, KL divergence, whether the first choices agree."""

    def chunk(rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        wanted, got, ids = rows
        p = jax.nn.log_softmax(logits(reference, wanted))
        q = jax.nn.log_softmax(logits(quantized, got))
        nll = [-jnp.take_along_axis(x, ids[:, None], axis=1)[:, 0] for x in (q, p)]
        kl = jnp.sum(jnp.exp(p) * (p - q), axis=1)
        return nll[0], nll[1], kl, jnp.argmax(p, axis=1) == jnp.argmax(q, axis=1)

    count = targets.shape[0]

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x[:count], ((0, -count % CHUNK),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(-1, CHUNK, *x.shape[1:])

    found = lax.map(chunk, (cut(reference_hidden), cut(hidden), cut(targets)))
    return tuple(x.reshape(-1)[:count] for x in found)


def _attention_errors(
    config: ModelConfig, plain: KVLayout, layout: KVLayout, window: int
) -> Callable[..., jax.Array]:
    """Relative error (root of summed squares) of attention by layer and KV head, on equal inputs."""
    exact, approximate = _paged(config, plain, window), _paged(config, layout, window)

    @jax.jit
    def errors(params: Params, ids: jax.Array) -> jax.Array:
        found = []

        def attend(layer: int, qkv: jax.Array) -> jax.Array:
            out = exact(layer, qkv)
            by_head = (window, config.num_kv_heads, -1)
            wanted, got = out.reshape(by_head), approximate(layer, qkv).reshape(by_head)
            found.append(jnp.sqrt(jnp.sum((got - wanted) ** 2, (0, 2)) / jnp.sum(wanted**2, (0, 2))))
            return out

        forward(params, config, ids, jnp.arange(window), attend)
        return jnp.stack(found)

    return errors


def _divergence(
    config: ModelConfig, reference: Params, quantized: Params, ids: list[int], kv_cache_dtype: str
) -> list[int]:
    """Of greedy continuations, the first token in which both differ, or their length."""
    step = max(1, len(ids) // NUM_PROMPTS)
    prompts = [ids[i * step : i * step + PROMPT_LEN] for i in range(NUM_PROMPTS)]
    greedy = SamplingParams(temperature=0, max_tokens=CONTINUATION_LEN, ignore_eos=True)
    sizes = dict(max_model_len=PROMPT_LEN + CONTINUATION_LEN, max_num_seqs=NUM_PROMPTS)
    found = []
    for params, own in ((reference, "auto"), (quantized, kv_cache_dtype)):
        engine = Engine(config, params, kv_cache_dtype=own, attention_backend="xla", **sizes)
        for index, prompt in enumerate(prompts):
            engine.add_request(prompt, greedy, request_id=str(index), stream=False)
        done = {}
        while engine.has_unfinished():
            done |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        found.append([done[str(index)] for index in range(NUM_PROMPTS)])
    return [
        next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), CONTINUATION_LEN)
        for pair in zip(*found, strict=True)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", *DTYPES, *LARGEST))
    parser.add_argument("--quantization", choices=(*QUANTIZATIONS, AS_STORED), help="of the weights")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the unquantized run")
    parser.add_argument("--text", type=Path, default=TEXT, help="default: the bundled one")
    parser.add_argument("--max-tokens", type=int, help="of the text (default: all)")
    parser.add_argument("--window", type=int, default=1024, help="tokens that are scored together")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
