"""The engine: requests in, tokens out, one step at a time.

Owns the loop and the order of its parts; each part's state is its own. A step that raises leaves
the engine usable: what ran is computed again from its known tokens.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from jpaged.batch import MAX_STOP_IDS, init_row_state
from jpaged.config import EngineConfig, ModelConfig, check_int
from jpaged.engine.metrics import StepTimes
from jpaged.engine.outputs import RequestGroup, SequenceOutput, logprob_dict, new_metrics, tokenizer_decoder
from jpaged.engine.runner import (
    ModelRunner,
    Runner,
    StepHandle,
    StepResult,
    cast_params,
    temporary_bytes,
)
from jpaged.engine.sizing import Sizes, device_pool_bytes, resolve_sizes
from jpaged.kv_cache import KVLayout
from jpaged.models.transformer import Params
from jpaged.ops.attention import Backend, resolve_backend
from jpaged.ops.sampling import Variant
from jpaged.request import FinishReason, Request, RequestOutput, RequestStatus
from jpaged.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from jpaged.scheduling.kv_manager import KVManager, KVStats
from jpaged.scheduling.scheduler import ScheduledStep, Scheduler, SchedulerStats

logger = logging.getLogger(__name__)


class Engine:
    """Runs many requests through one model with a paged KV cache and continuous batching.

    Example:
      engine = Engine(config, params, max_num_seqs=8)
      engine.add_request([1, 2, 3], SamplingParams(max_tokens=5))
      while engine.has_unfinished():
          for output in engine.step():
              ...
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params | None,
        *,
        tokenizer: Any = None,
        runner: Runner | None = None,
        **options: Any,
    ):
        """Sizes the engine and allocates its KV pool; compiles nothing but what it must.

        Args:
          config, params: the model; `params` may be cast to `dtype`.
          tokenizer: gives outputs their text; without one there are ids only.
          runner: replaces the model (tests and replays); `params` is not used then.
          options: fields of `EngineConfig`.

        Raises:
          ValueError: options that contradict each other, the model or the device.
          TypeError: an unknown option.
        """
        self.config = config
        self.options = EngineConfig(**options)
        self.tokenizer = tokenizer
        self._decoder = tokenizer_decoder(tokenizer)
        if runner is None:
            if params is None:
                raise ValueError("params=None needs a runner")
            params = params if self.options.dtype == "auto" else cast_params(params, self.options.dtype)
            layout = self._kv_layout(str(params.embed.dtype))
            backend = resolve_backend(
                self.options.attention_backend, config, block_size=self.options.block_size, layout=layout
            )
            logger.info("attention backend: %s", backend)
            runner = ModelRunner(
                config,
                params,
                _sizes_on_device(config, self.options, params, layout, backend),
                layout=layout,
                backend=backend,
                deterministic=self.options.deterministic,
            )
            self.sizes = runner.sizes
        else:
            self.sizes = resolve_sizes(
                config,
                self.options,
                layout=self._kv_layout(config.dtype),
                platform="cpu",
                pool_bytes=None,
            )
        self.runner = runner
        self.scheduler = self._new_scheduler()
        self.times = StepTimes()
        self._in_flight: deque[tuple[ScheduledStep, StepHandle]] = deque()
        self._groups: dict[str, RequestGroup] = {}
        self._sequences: dict[str, tuple[RequestGroup, SequenceOutput]] = {}
        self._unreported: list[SequenceOutput] = []  # of what happened outside of a step that completed
        self._outbox: list[RequestOutput] = []
        self._num_added = 0

    def _kv_layout(self, dtype: str) -> KVLayout:
        options = self.options
        return KVLayout.of(self.config, dtype, options.kv_cache_dtype, options.kv_cache_skip_layers)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            KVManager(
                self.sizes.num_kv_blocks,
                self.sizes.block_size,
                prefix_cache=self.options.prefix_cache,
                eviction_policy=self.options.eviction_policy,
            ),
            max_num_seqs=self.sizes.max_num_seqs,
            max_num_batched_tokens=self.sizes.max_num_batched_tokens,
            policy=self.options.schedule_policy,
        )

    # -- requests -----------------------------------------------------------------------------

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        stream: bool = True,
        cache_salt: str | None = None,
    ) -> str:
        """Queues a request.

        Args:
          request_id: must not be in use; made up if `None`.
          prompt: text to hand back with the output.
          cache_salt: requests with different salts share no cached prefix.
          stream: `False` reports the request once, when it has finished.

        Returns:
          the request's id.

        Raises:
          ValueError: the request can never run; the message names field, value and limit. Nothing
            has been queued then.
        """
        params = params or SamplingParams()
        ids = self._check_prompt(prompt_token_ids, params)
        params.validate_vocab(self.config.vocab_size)
        bad_words = self._bad_words(params)
        request_id = request_id if request_id is not None else f"request-{self._num_added}"
        if request_id in self._groups:
            raise ValueError(f"request_id={request_id!r} is already in use")
        group = RequestGroup(request_id, prompt, ids, [], stream, new_metrics())
        requests = [self._new_request(group, params, index, cache_salt) for index in range(params.n)]
        for request in requests:
            self._add_sequence(group, request, bad_words)
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None]
        self._groups[request_id] = group
        self._num_added += 1
        return request_id

    def _add_sequence(self, group: RequestGroup, request: Request, bad_words: list[list[int]]) -> None:
        self.scheduler.add(request)
        self.runner.register(request.request_id, bad_words)
        group.sequences.append(SequenceOutput(request, self._decoder, stream=group.stream))
        self._sequences[request.request_id] = group, group.sequences[-1]

    def _new_request(
        self, group: RequestGroup, params: SamplingParams, index: int, cache_salt: str | None
    ) -> Request:
        eos = () if params.ignore_eos else self.config.eos_token_ids
        stop_ids = frozenset(eos) | frozenset(params.stop_token_ids)
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"stop_token_ids and the model's own are {len(stop_ids)}, at most {MAX_STOP_IDS}"
            )
        seed = params.seed if params.seed is not None else _derived_seed(self.options.seed, self._num_added)
        longest = self.sizes.max_model_len
        if params.max_tokens is not None:
            # max_tokens=0 computes the prompt all the same, and samples a token that nobody gets.
            longest = min(longest, len(group.prompt_token_ids) + max(params.max_tokens, 1))
        return Request(
            f"{group.request_id}/{index}/{self._num_added}",
            group.prompt_token_ids,
            params,
            arrival=self._num_added * 2**20 + index,
            parent_id=group.request_id,
            index=index,
            seed=seed,
            stop_ids=stop_ids,
            max_total_tokens=max(longest, len(group.prompt_token_ids) + 1),
            cache_salt=cache_salt,
        )

    def _check_prompt(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        ids = [_as_token_id(token, self.config.vocab_size) for token in prompt_token_ids]
        if not ids:
            raise ValueError("the prompt has no tokens; at least 1 is needed")
        longest = self.sizes.max_model_len - (params.max_tokens != 0)
        if len(ids) > longest:
            capacity = self.scheduler.kv.capacity
            raise ValueError(
                f"the prompt has {len(ids)} tokens, at most {longest} fit: prompt and output share "
                f"max_model_len={self.sizes.max_model_len} (the KV cache holds {capacity} tokens)"
            )
        return ids

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Token ids of the bad words, as a word of its own and as the start of a text."""
        if not params.bad_words:
            return []
        if self.tokenizer is None:
            raise ValueError(f"bad_words={params.bad_words!r} needs a tokenizer")
        found = []
        for word in params.bad_words:
            for text in dict.fromkeys((word, f" {word.lstrip()}")):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if len(ids) > MAX_BAD_WORD_TOKENS:
                    raise ValueError(
                        f"bad_words: {word!r} is {len(ids)} tokens, at most {MAX_BAD_WORD_TOKENS}"
                    )
                if ids and ids not in found:
                    found.append(ids)
        if len(found) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words are {len(found)} token sequences, at most {MAX_BAD_WORDS}")
        return found

    def abort(self, request_id: str) -> None:
        """Ends a request at its last known token, at any moment; an unknown or finished id is ignored.

        The next step reports it, with the finish reason `abort`.
        """
        group = self._groups.get(request_id)
        if group is None:
            return
        self._abort_unfinished(group)
        self._unreported += group.sequences

    def fork(self, request_id: str, count: int = 1) -> list[str]:
        """Branches a running request at its last known token.

        Full blocks are shared, the last one is copied before anything is appended to it. A branch
        has the request's parameters and output so far; with a seed it draws differently.

        Returns:
          the ids of `count` new requests.

        Raises:
          ValueError: the request is unknown, has ended, or is one of several completions (`n > 1`).
        """
        check_int("count", count, low=1)
        self._single(request_id)
        return [self._fork(self._groups[request_id]) for _ in range(count)]

    def _fork(self, group: RequestGroup) -> str:
        source = group.sequences[0]
        parent = source.request
        request_id = f"{group.request_id}-fork-{self._num_added}"
        branch = RequestGroup(
            request_id,
            group.prompt,
            group.prompt_token_ids,
            [],
            group.stream,
            new_metrics(),
            group.prompt_logprobs,
        )
        request = self._new_request(branch, parent.params, 0, parent.cache_salt)
        request.seed = _derived_seed(parent.seed, self._num_added)
        request.token_ids = list(parent.token_ids)
        request.max_total_tokens, request.pause_at = parent.max_total_tokens, parent.pause_at
        request.fork_parent = parent
        self._add_sequence(branch, request, self._bad_words(parent.params))
        branch.sequences[0].continue_from(source)
        self._groups[request_id] = branch
        self._num_added += 1
        return request_id

    def pause(self, request_id: str, output_tokens: int) -> None:
        """Lets a request wait, keeping its blocks, once it has that many output tokens.

        Raises:
          ValueError: the request is unknown, or may have that many already.
        """
        request = self._single(request_id)
        pause_at = request.num_prompt_tokens + output_tokens
        if pause_at <= request.num_tokens + request.num_pending:
            raise ValueError(f"{output_tokens=} must be more than {request_id!r} has")
        request.pause_at = pause_at

    def resume(self, request_id: str, token: int) -> None:
        """Goes on by one token from a pause, with `token` in place of the last one sampled.

        Raises:
          ValueError: the request is unknown or not paused.
        """
        request = self._single(request_id)
        if request.pause_at != request.num_tokens:
            raise ValueError(f"request_id={request_id!r} must be paused")
        request.pause_at += 1
        if request.status is RequestStatus.RUNNING:
            self.scheduler.replace_last_token(request, token)
        else:
            request.token_ids[-1] = token

    def _single(self, request_id: str) -> Request:
        group = self._groups.get(request_id)
        if group is None or group.finished or len(group.sequences) != 1:
            raise ValueError(f"request_id={request_id!r} must be of an unfinished request with n=1")
        return group.sequences[0].request

    def update_params(self, params: Params) -> None:
        """Replaces the model's weights, for those who train and generate in turn; empties the prefix cache.

        Raises:
          ValueError: requests are unfinished, or the new weights differ in shape or dtype.
        """
        if self.has_unfinished():
            raise ValueError(
                f"update_params with {self.num_unfinished} unfinished requests: finish or abort them"
            )
        if not isinstance(self.runner, ModelRunner):
            raise ValueError("update_params needs a model")
        self._settle()
        self.runner.update_params(params)
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running requests keep their blocks."""
        self.scheduler.kv.clear_cache()

    def _settle(self) -> None:
        """Waits for steps whose tokens nobody wants any more."""
        while self._in_flight:
            step, handle = self._in_flight.popleft()
            self._update(step, handle.result())

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do or to report."""
        return bool(self._groups or self._outbox)

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and not yet reported as finished."""
        return len(self._groups)

    # -- the loop -----------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns the outputs that grew or ended.

        With overlap, the tokens are those of the step before: this one's are still being computed.

        Raises:
          Exception: whatever the device raised. Requests stay queued with their known tokens; the
            next call computes them again.
        """
        times, clock = self.times, time.perf_counter
        with self._recovering():
            started = clock()
            step = self.scheduler.schedule()
            times.schedule += clock() - started
            results = self._run(step)
            ran = clock()
            progressed = [self._update(*result) for result in results]
            updated = clock()
            self._collect([sequence for sequences in progressed for sequence in sequences])
            outputs, self._outbox = self._outbox, []
            times.update += updated - ran
            times.outputs += clock() - updated
            return outputs

    def _run(self, step: ScheduledStep | None) -> list[tuple[ScheduledStep, StepResult]]:
        """Dispatches a step; waits for those before it, and for itself without overlap."""
        times, clock = self.times, time.perf_counter
        if step is not None:
            started = clock()
            handle = self.runner.run(step)
            now = clock()
            times.dispatch += now - started
            times.dispatched(now, busy=bool(self._in_flight) and not self._in_flight[-1][1].ready())
            self._in_flight.append((step, handle))
        results = []
        keep = 1 if self.options.overlap and step is not None else 0
        while len(self._in_flight) > keep:
            oldest, handle = self._in_flight[0]
            started, was_ready = clock(), handle.ready()
            results.append((oldest, handle.result()))
            now = clock()
            times.wait += now - started
            if not was_ready:
                times.waited(now)
            self._in_flight.popleft()
        return results

    def _update(self, step: ScheduledStep, result: StepResult) -> list[SequenceOutput]:
        now = time.monotonic()
        for admitted in step.admitted:
            entry = self._sequences.get(admitted.request_id)
            if entry is not None and entry[0].metrics.first_scheduled_time is None:
                entry[0].metrics.first_scheduled_time = now
        self._take_prompt_logprobs(result)
        for request_id, values in result.logprobs.items():
            if request_id in self._sequences:
                self._sequences[request_id][1].note_logprobs(values)
        progressed = []
        for request in self.scheduler.update(step, result.tokens, result.failures):
            group, sequence = self._sequences[request.request_id]
            if request.finish_reason is FinishReason.ERROR:
                self._abort_unfinished(group)
            else:
                group.metrics.first_token_time = group.metrics.first_token_time or now
                self.times.first_token = self.times.first_token or now
            progressed.append(sequence)
        return progressed

    def _abort_unfinished(self, group: RequestGroup) -> None:
        for sequence in group.sequences:
            if not sequence.request.finished:
                self.scheduler.finish(sequence.request, FinishReason.ABORT)

    def _take_prompt_logprobs(self, result: StepResult) -> None:
        for request_id, (position, rows) in result.prompt_logprobs.items():
            entry = self._sequences.get(request_id)
            if entry is None or entry[1].request.index != 0:
                continue
            group, sequence = entry
            assert group.prompt_logprobs is not None
            count = sequence.request.params.prompt_logprobs or 0
            for token, values in zip(group.prompt_token_ids[position:], rows, strict=False):
                if position == len(group.prompt_logprobs):  # not one that is computed again
                    group.prompt_logprobs.append(logprob_dict(token, values, count, self._decoder))
                position += 1

    def _collect(self, progressed: list[SequenceOutput]) -> None:
        """Detokenizes, applies stop strings, and reports into the outbox."""
        groups: dict[str, RequestGroup] = {}
        for sequence in [*self._unreported, *progressed]:
            if not sequence.due:
                continue
            request = sequence.request
            if request.request_id not in self._sequences:
                continue  # reported as finished already
            stop = sequence.take_tokens()
            if stop is not None:
                if request.finished:
                    request.finish_reason, request.stop_reason = FinishReason.STOP, stop
                else:
                    self.scheduler.finish(request, FinishReason.STOP, stop)
            group = self._sequences[request.request_id][0]
            groups[group.request_id] = group
        for group in groups.values():
            if group.finished:
                group.metrics.finished_time = time.monotonic()
        # What is noted here leaves with the next step that completes, whatever happens in between.
        self._outbox += [group.snapshot() for group in groups.values() if group.stream or group.finished]
        self._unreported = []
        for group in groups.values():
            if group.finished:
                self._forget(group)

    def _forget(self, group: RequestGroup) -> None:
        del self._groups[group.request_id]
        for sequence in group.sequences:
            del self._sequences[sequence.request.request_id]
            self.runner.forget(sequence.request.request_id)

    @contextmanager
    def _recovering(self) -> Iterator[None]:
        """Leaves a usable engine behind any exception, Ctrl-C included."""
        try:
            yield
        except BaseException:
            logger.warning("a step failed: running requests will be computed again from their known tokens")
            self._restart()
            raise

    def _restart(self) -> None:
        self._in_flight.clear()
        self.runner.reset()
        stats = self.scheduler.stats
        self.scheduler = self._new_scheduler()
        self.scheduler.stats = stats
        for group in self._groups.values():
            for sequence in group.sequences:
                if not sequence.request.finished:
                    sequence.request.reset()
                    self.scheduler.add(sequence.request)
        self._unreported = [sequence for _, sequence in self._sequences.values()]

    # -- sight --------------------------------------------------------------------------------

    def warmup(self, variants: tuple[Variant, ...] = tuple(Variant), *, use_tqdm: bool = False) -> None:
        """Compiles all that later traffic can need, so that nothing compiles while requests run.

        Args:
          variants: fewer, where it is known what will be asked for: `Variant.GREEDY` alone serves
            greedy requests without penalties, masks or log-probabilities.
        """
        if isinstance(self.runner, ModelRunner):
            self.runner.warmup(variants, use_tqdm=use_tqdm)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and what is in use now.

        Where vLLM's metrics have a name for it, the name is theirs; `prefix_cache_queries` and
        `prefix_cache_hits` are in tokens. `kv_blocks_free`, `_cached` (unused, evictable) and `_active`
        add up to `_total`. `kv_waste` is the share of allocated slots that held no token, over all steps.
        `host_seconds` are those of `step` by part, `device_wait_seconds` those in which it waited, and the
        device was busy for `device_busy_seconds` at least; see `StepTimes`. `first_token_time` is a moment of
        `time.monotonic()`.
        """
        scheduler, kv = self.scheduler, self.scheduler.kv
        stats, total = scheduler.stats, kv.pool.num_blocks
        return {
            "attention_backend": self.runner.backend.name if isinstance(self.runner, ModelRunner) else "none",
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "num_requests_running_peak": stats.peak_running,
            "num_preemptions": stats.preemptions,
            "num_steps": stats.steps,
            "num_scheduled_tokens": stats.scheduled_tokens,
            "kv_cache_usage_perc": kv.num_active / total,
            "kv_blocks_total": total,
            "kv_blocks_free": kv.pool.num_free,
            "kv_blocks_cached": kv.num_evictable,
            "kv_blocks_active": kv.num_active,
            "kv_blocks_peak": stats.peak_blocks,
            "kv_block_bytes": self.sizes.kv_block_bytes,
            "kv_waste": stats.kv_waste,
            "prefix_cache_queries": kv.stats.queried_tokens,
            "prefix_cache_hits": kv.stats.hit_tokens,
            "prefix_cache_evictions": kv.cache.num_evicted if kv.cache else 0,
            "prefix_cache_copies": kv.stats.copies,
            "host_seconds": self.times.host,
            "device_wait_seconds": self.times.wait,
            "device_busy_seconds": self.times.device_busy,
            "first_token_time": self.times.first_token,
        }

    def snapshot(self) -> dict[str, Any]:
        """Who owns which block now, and the tree of cached prefixes, as plain data.

        Keys: `step`; `block_size`; `blocks`, for every block from 1 on the ids of the requests that use it,
        `None` if it is free and `[]` if it is merely cached; `fill`, tokens in the last block of each
        running request's table; `tree`, the prefix cache's own snapshot.
        """
        kv = self.scheduler.kv
        owners: dict[int, list[str]] = {}
        fill = {}
        for request in self.scheduler.running:
            for block in request.block_ids:
                owners.setdefault(block, []).append(request.parent_id)
            fill[request.request_id] = request.num_scheduled - (len(request.block_ids) - 1) * kv.block_size
        free = set(kv.pool.free_blocks())
        return {
            "step": self.scheduler.stats.steps,
            "block_size": kv.block_size,
            "blocks": [None if b in free else owners.get(b, []) for b in range(1, kv.pool.num_blocks + 1)],
            "fill": fill,
            "tree": kv.cache.snapshot() if kv.cache else [],
        }

    def reset_stats(self) -> None:
        """Starts counting afresh."""
        self.scheduler.stats = SchedulerStats()
        self.scheduler.kv.stats = KVStats()
        self.times = StepTimes()


def _sizes_on_device(
    config: ModelConfig, options: EngineConfig, params: Params, layout: KVLayout, backend: Backend
) -> Sizes:
    device = jax.devices()[0]
    # On a GPU sizes are those of a pool without a limit until its temporaries are known.
    unlimited = None if device.platform == "cpu" else sys.maxsize
    sizes = resolve_sizes(config, options, layout=layout, platform=device.platform, pool_bytes=unlimited)
    if device.platform == "cpu" or options.num_kv_blocks or options.kv_cache_memory_bytes:
        return sizes
    state = jax.eval_shape(lambda: init_row_state(sizes.max_num_seqs, config.vocab_size))
    fixed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state)))
    temporaries = temporary_bytes(
        config, params, sizes, layout=layout, platform=device.platform, backend=backend
    )
    left = device_pool_bytes(device, options.gpu_memory_utilization, fixed, temporaries)
    return resolve_sizes(config, options, layout=layout, platform=device.platform, pool_bytes=left)


def _as_token_id(token: Any, vocab_size: int) -> int:
    try:
        value = -1 if isinstance(token, bool) else operator.index(token)  # takes numpy integers
    except TypeError:
        value = -1
    if not 0 <= value < vocab_size:
        raise ValueError(f"prompt_token_ids has {token!r}; ids must be ints in [0, {vocab_size})")
    return value


def _derived_seed(engine_seed: int, arrival: int) -> int:
    digest = hashlib.blake2b(f"{engine_seed}/{arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
