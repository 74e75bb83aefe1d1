"""The device half of the engine: parameters, pools, row state, and the compiled steps' dispatch.

`Runner` is all that the engine sees of it, so scheduler and engine run with a fake one in tests.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jpaged.batch import NO_CANDIDATE, NON_FINITE, Logprobs, RaggedBatch, StepOutput, init_row_state
from jpaged.config import ModelConfig
from jpaged.engine import steps
from jpaged.engine.packing import Buckets, PackedStep, Packer, RowSetup, declare_buckets
from jpaged.engine.sizing import Sizes
from jpaged.kv_cache import KVCache, KVLayout, init_kv_cache
from jpaged.models.transformer import Params, packed
from jpaged.ops.attention import Backend
from jpaged.ops.quantized import QuantizedMatrix
from jpaged.ops.sampling import Variant
from jpaged.scheduling.kv_manager import BlockCopy
from jpaged.scheduling.scheduler import ScheduledSequence, ScheduledStep

logger = logging.getLogger(__name__)

COPIES_AT_ONCE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one token and of the most probable ones, best first."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave, by request id."""

    tokens: dict[str, int]
    failures: dict[str, str]  # why there is no token
    logprobs: dict[str, TokenLogprobs]
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]]  # of the prompt from that position on


class StepHandle(Protocol):
    """A step that was dispatched."""

    def result(self) -> StepResult:
        """Waits for the step and returns what it gave."""
        ...

    def ready(self) -> bool:
        """Whether the step has finished. Does not wait."""
        ...


class Runner(Protocol):
    """What the engine needs of a device."""

    def run(self, step: ScheduledStep) -> StepHandle:
        """Dispatches a step and returns at once."""
        ...

    def register(self, request_id: str, bad_words: list[list[int]]) -> None:
        """Tells what else there is to know of a request, before it is first scheduled."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        ...

    def reset(self) -> None:
        """Makes the runner usable after a step raised; what the pools held is lost."""
        ...


class ModelRunner:
    """Runs a model on the default device."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        sizes: Sizes,
        *,
        layout: KVLayout,
        backend: Backend,
        deterministic: bool,
    ):
        self.config = config
        self.sizes = sizes
        self.layout = layout
        self.backend = backend
        self.deterministic = deterministic
        self.platform = jax.default_backend()
        self._given = _shapes(params)
        self.params = self._laid_out(params)
        self._restore()
        slow_single = self.platform == "cpu" and layout.dtype != "float32"  # XLA's CPU matrix-vector products
        self.buckets = declare_buckets(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            min_decode=8 if slow_single else 1,
            deterministic=deterministic,
        )
        if deterministic:
            self.buckets = self._proved_buckets()
            self.sizes = self._sizes_within(self.buckets.ragged[-1][0])
        self.packer = self._new_packer(self.buckets)

    def _restore(self) -> None:
        cache = init_kv_cache(
            self.config, self.sizes.num_kv_blocks + 1, self.sizes.block_size, self.layout, self.platform
        )
        self.cache: KVCache = _committed(cache)
        self.state = _committed(init_row_state(self.sizes.max_num_seqs, self.config.vocab_size))

    def _new_packer(self, buckets: Buckets) -> Packer:
        return Packer(
            buckets,
            max_num_seqs=self.sizes.max_num_seqs,
            table_width=self.sizes.table_width,
            block_size=self.sizes.block_size,
            vocab_size=self.config.vocab_size,
        )

    # -- the Runner protocol ------------------------------------------------------------------

    def run(self, step: ScheduledStep) -> DeviceHandle:
        packed = self.packer.pack(step)
        for setup in packed.setups:
            self._set_row(setup)
        for start in range(0, len(step.copies), COPIES_AT_ONCE):
            self._copy(step.copies[start : start + COPIES_AT_ONCE])
        return DeviceHandle(self._dispatch(packed.batch, packed.variant), packed)

    def register(self, request_id: str, bad_words: list[list[int]]) -> None:
        if bad_words:
            self.packer.set_bad_words(request_id, bad_words)

    def forget(self, request_id: str) -> None:
        self.packer.forget(request_id)

    def reset(self) -> None:
        del self.cache, self.state  # before new ones are made: two pools may not fit
        self._restore()

    def _copy(self, copies: tuple[BlockCopy, ...]) -> None:
        """Copies blocks; one compiled shape, filled up with copies of the null block to itself."""
        pairs = np.zeros((2, COPIES_AT_ONCE), np.int32)
        pairs[:, : len(copies)] = np.array([(c.source, c.target) for c in copies], np.int32).reshape(-1, 2).T
        self.cache = steps.copy_blocks(self.cache, pairs[0], pairs[1])

    def _set_row(self, setup: RowSetup) -> None:
        values = {field.name: getattr(setup, field.name) for field in dataclasses.fields(setup)}
        self.state = steps.set_row(self.state, np.int32(values.pop("row")), values)

    def update_params(self, params: Params) -> None:
        """Takes other weights of the same shapes and dtypes."""
        if _shapes(params) != self._given:
            raise ValueError("the new params differ from the old ones in structure, shape or dtype")
        self.params = self._laid_out(params)

    def _laid_out(self, params: Params) -> Params:
        """On the device, in the order in which this backend's products read them."""
        is_packed = self.platform == "cpu" and os.name == "posix" and not self.backend.uses_kernels
        if is_packed and params.embed.dtype == jnp.float32:
            params = packed(params)
        return _committed(params)

    def _dispatch(self, batch: Any, variant: Variant) -> StepOutput:
        arguments = (self.params, self.cache, self.state, batch)
        static = dict(config=self.config, backend=self.backend, variant=variant)
        if isinstance(batch, RaggedBatch):
            done = steps.prefill_step(*arguments, **static, deterministic=self.deterministic)
        else:
            done = steps.decode_step(*arguments, **static)
        self.cache, self.state, output = done
        return output

    # -- warm-up ------------------------------------------------------------------------------

    def warmup(self, variants: tuple[Variant, ...] = tuple(Variant), *, use_tqdm: bool = False) -> None:
        """Compiles every declared bucket in the given variants, by running padding through it."""
        work: list[tuple[Any, Variant]] = []
        for variant in variants:
            if variant < Variant.PROMPT:
                work += [(self._empty(size, None), variant) for size in self.buckets.decode]
            work += [(self._empty(*bucket), variant) for bucket in self.buckets.ragged]
        for batch, variant in tqdm(work, desc="warm-up", disable=not use_tqdm):
            jax.block_until_ready(self._dispatch(batch, variant))
        self._set_row(self.packer.padding_setup())
        self._copy(())

    def _empty(self, first: int, num_seqs: int | None) -> Any:
        """A batch of padding alone: `first` sequences to decode, or (tokens, sequences) ragged."""
        buckets = Buckets((first,), ()) if num_seqs is None else Buckets((), ((first, num_seqs),))
        return self._new_packer(buckets).padding_batch()

    # -- deterministic mode -------------------------------------------------------------------

    def _proved_buckets(self) -> Buckets:
        """The declared buckets whose rows agree, bit by bit, with those of the first one.

        A probe runs the same sequences through every bucket and compares the stored K and V of
        every layer and the logits. On a GPU products are chosen by shape, and there is one shape.
        """
        first, *others = self.buckets.ragged
        if self.platform != "cpu":
            return Buckets((), self.buckets.ragged[-1:])
        reference = self._probe(first)
        kept = Buckets(
            (), (first, *(bucket for bucket in others if self._same(reference, self._probe(bucket))))
        )
        logger.info("deterministic: of the buckets %s, %s agree bitwise", self.buckets.ragged, kept.ragged)
        return kept

    def _sizes_within(self, num_tokens: int) -> Sizes:
        """The sizes, with no step larger than `num_tokens`."""
        sizes = self.sizes
        if sizes.max_num_seqs > num_tokens:
            logger.warning("deterministic: max_num_seqs is %d instead of %d", num_tokens, sizes.max_num_seqs)
        return dataclasses.replace(
            sizes,
            max_num_seqs=min(sizes.max_num_seqs, num_tokens),
            max_num_batched_tokens=min(sizes.max_num_batched_tokens, num_tokens),
        )

    @staticmethod
    def _same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
        return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(a, b, strict=True))

    def _probe(self, bucket: tuple[int, int]) -> list[np.ndarray]:
        num_tokens, num_seqs = bucket
        block = self.sizes.block_size
        length = min(37, self.sizes.max_model_len, self.sizes.num_kv_blocks * block // 2)
        blocks = -(-length // block)
        count = max(1, min(2, num_seqs, self.sizes.num_kv_blocks // blocks))
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, self.config.vocab_size, (count, length)).tolist()
        packer = self._new_packer(Buckets((), (bucket,)))
        cache = init_kv_cache(self.config, count * blocks + 1, block, self.layout, self.platform)
        chunk = max(1, min(length, num_tokens // count))
        logits = []
        for start in range(0, length, chunk):
            sequences = tuple(
                ScheduledSequence(
                    request_id=str(row),
                    row=row,
                    start=start,
                    num_tokens=len(prompt[start : start + chunk]),
                    token_ids=tuple(prompt[start : start + chunk]),
                    samples=False,
                    prompt_targets=None,
                    table_start=0,
                    table_blocks=tuple(range(1 + row * blocks, 1 + (row + 1) * blocks)),
                )
                for row, prompt in enumerate(prompts)
            )
            packed = packer.pack(ScheduledStep(0, sequences, ()))
            cache, raw = steps.probe_step(
                self.params, cache, self.state, packed.batch, config=self.config, backend=self.backend
            )
            logits = [np.asarray(raw)[:count]]
        return logits + [np.asarray(array)[1:] for array in jax.tree.leaves(cache)]


@dataclasses.dataclass(frozen=True)
class DeviceHandle:
    """A dispatched step whose output may still be on its way."""

    output: StepOutput
    packed: PackedStep

    def __post_init__(self) -> None:
        for leaf in jax.tree.leaves(self.output):
            leaf.copy_to_host_async()

    def ready(self) -> bool:
        return self.output.tokens.is_ready()

    def result(self) -> StepResult:
        tokens, failures = {}, {}
        sampled = np.asarray(self.output.tokens).tolist()
        for index, owner in self.packed.owners:
            token = sampled[index]
            if token >= 0:
                tokens[owner] = token
            else:
                failures[owner] = _FAILURES[token]
        logprobs = {}
        if self.output.logprobs is not None:
            rows = _to_host(self.output.logprobs)
            logprobs = {owner: rows[index] for index, owner in self.packed.owners}
        prompt_logprobs = {}
        if self.output.prompt_logprobs is not None:
            rows = _to_host(self.output.prompt_logprobs)
            for span in self.packed.prompt_spans:
                values = rows[span.first : span.first + span.count]
                prompt_logprobs[span.owner] = (span.position, values)
        return StepResult(tokens, failures, logprobs, prompt_logprobs)


_FAILURES = {
    NON_FINITE: "the logits were not finite (NaN or infinity): the weights or the dtype's range are at fault",
    NO_CANDIDATE: "no token could be sampled: allowed_token_ids, bad_words and min_tokens mask all of them",
}


def _to_host(logprobs: Logprobs) -> list[TokenLogprobs]:
    columns = (logprobs.logprob, logprobs.rank, logprobs.top_ids, logprobs.top_logprobs)
    return [TokenLogprobs(*row) for row in zip(*(np.asarray(c).tolist() for c in columns), strict=True)]


def temporary_bytes(
    config: ModelConfig, params: Params, sizes: Sizes, *, layout: KVLayout, platform: str, backend: Backend
) -> int:
    """Bytes of temporaries of the largest prefill bucket, from its compiled program; nothing runs.

    Of `params` only shapes and dtypes count.
    """
    tokens, seqs = sizes.max_num_batched_tokens, min(sizes.max_num_batched_tokens, sizes.max_num_seqs)
    packer = Packer(
        Buckets((), ((tokens, seqs),)),
        max_num_seqs=sizes.max_num_seqs,
        table_width=sizes.table_width,
        block_size=sizes.block_size,
        vocab_size=config.vocab_size,
    )
    cache = jax.eval_shape(lambda: init_kv_cache(config, 2, sizes.block_size, layout, platform))
    state = jax.eval_shape(lambda: init_row_state(sizes.max_num_seqs, config.vocab_size))
    compiled = steps.prefill_step.lower(
        params,
        cache,
        state,
        packer.padding_batch(),
        config=config,
        backend=backend,
        variant=Variant.PROMPT,  # the one with the largest temporaries
        deterministic=False,
    ).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None, "the compiler does not tell the program's memory"
    return analysis.temp_size_in_bytes


def _shapes(params: Params) -> Any:
    return jax.tree.map(lambda x: (x.shape, str(x.dtype)), params)


def _committed(tree: Any) -> Any:
    """The same arrays, bound to the default device.

    What a step returns is bound as soon as one of its arguments is, and a program that was compiled for
    arrays that are not is compiled again for those that are: so all are, from the beginning.
    """
    return jax.device_put(tree, jax.devices()[0])


def cast_params(params: Params, dtype: str) -> Params:
    """Parameters in `dtype`; those that already are stay the same arrays.

    Of a quantized matrix only the dtype of its products' operands changes.
    """

    def cast(x: Any) -> Any:
        return (
            dataclasses.replace(x, dtype=dtype) if isinstance(x, QuantizedMatrix) else jnp.asarray(x, dtype)
        )

    return jax.tree.map(cast, params, is_leaf=lambda x: isinstance(x, QuantizedMatrix))
