"""LLM: a tokenizer and an engine behind the calls that people make.

Owns the way from prompts and messages to ids, and from outputs back to their callers. All work on
requests is the engine's.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jpaged.beam_search import BeamSearch, BeamSearchOutput, check_width
from jpaged.config import EngineConfig, ModelConfig, check_int
from jpaged.engine.engine import Engine
from jpaged.models.transformer import Params
from jpaged.ops.sampling import Variant
from jpaged.request import RequestOutput, StreamDelta
from jpaged.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]

_CPU_BFLOAT16 = ("avx512_bf16", "amx_bf16")  # instructions without which bfloat16 is no faster


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as ids, and as text where there was one."""

    text: str | None
    token_ids: list[int]


class LLM:
    """A language model that answers many prompts at once.

    Example:
      llm = LLM("smollm2-135m-instruct")
      outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0))
      print(outputs[0].outputs[0].text)
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config: ModelConfig | None = None,
        params: Params | None = None,
        tokenizer: Any = None,
        dtype: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        kv_cache_skip_layers: Sequence[int] = (),
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        attention_backend: str = "auto",
        prefix_cache: str = "radix",
        eviction_policy: str = "lru",
        schedule_policy: str = "fcfs",
        deterministic: bool = False,
        overlap: bool = True,
        seed: int = 0,
    ):
        """Loads a model, or takes one that lives in memory, and makes an engine for it.

        Args:
          model: see `jpaged.weights.open_checkpoint`.
          config, params: instead of `model`.
          tokenizer: a transformers tokenizer, or the path of one; by default the model's own.
          dtype: `auto` is the checkpoint's on a GPU, on a CPU bfloat16 if it has instructions for it
            and else float32, and for `params` in memory their own.
          quantization: `int8` or `int4` rounds the layers' matrices while `model` is loaded, `gguf` keeps
            those of a GGUF file as they are stored; see `docs/quantization.md`. Not for `params` in memory.

        The other arguments are fields of `EngineConfig`.

        Raises:
          ValueError: an argument or the model is not supported; the message names it.
        """
        options: dict[str, Any] = dict(
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_skip_layers=kv_cache_skip_layers,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            attention_backend=attention_backend,
            prefix_cache=prefix_cache,
            eviction_policy=eviction_policy,
            schedule_policy=schedule_policy,
            deterministic=deterministic,
            overlap=overlap,
            seed=seed,
        )
        EngineConfig(**options)  # wrong options are told before weights are read
        _use_compilation_cache()
        if (model is None) == (params is None) or (params is None) != (config is None):
            raise ValueError("give either model, or both config and params")
        if model is None and quantization is not None:
            raise ValueError(f"{quantization=} needs model: params in memory are taken as they are")
        if isinstance(tokenizer, (str, os.PathLike)):
            tokenizer = _load_tokenizer(tokenizer)
        if model is not None:
            config, params, tokenizer = _load(model, dtype, quantization, tokenizer)
        assert config is not None
        self.model_name = os.fspath(model) if model is not None else config.architecture
        self.tokenizer = tokenizer
        self.engine = Engine(config, params, tokenizer=tokenizer, **options)
        self._mail: dict[str, deque[RequestOutput]] = {}
        self._depth = 0  # of calls into the engine
        self._forgotten: deque[str] = deque()  # streams that were forgotten meanwhile

    @property
    def config(self) -> ModelConfig:
        return self.engine.config

    @property
    def max_num_seqs(self) -> int:
        return self.engine.sizes.max_num_seqs

    # -- prompts ------------------------------------------------------------------------------

    def encode_prompt(self, prompt: Prompt) -> EncodedPrompt:
        """Ids of a prompt: a string, ids, or a mapping with `prompt`, `prompt_token_ids` or `messages`.

        A string is tokenized as the tokenizer does by default, with a beginning-of-sequence id if
        it adds one; there is a warning where the string begins with that token already. Ids are taken
        as they are.

        Raises:
          ValueError: the prompt is not one of these, or needs a tokenizer that is not there.
        """
        if isinstance(prompt, str):
            return self._encode_text(prompt)
        if isinstance(prompt, Mapping):
            keys = [key for key in ("prompt", "prompt_token_ids", "messages") if prompt.get(key) is not None]
            if len(keys) != 1:
                raise ValueError(
                    f"a prompt needs one of prompt, prompt_token_ids and messages; it has {keys or 'none'}"
                )
            value = prompt[keys[0]]
            if keys[0] == "messages":
                return self.encode_chat(value)
            if isinstance(value, str) != (keys[0] == "prompt") or isinstance(value, Mapping):
                raise ValueError(
                    f"{keys[0]}={value!r} must be {'a string' if keys[0] == 'prompt' else 'token ids'}"
                )
            return self.encode_prompt(value)
        is_array = getattr(prompt, "ndim", 0) > 0
        if is_array or (isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray))):
            return EncodedPrompt(None, list(prompt))  # type: ignore[arg-type]  # checked by the engine
        raise ValueError(f"prompt={prompt!r} must be a string, token ids, or a mapping that holds them")

    def _encode_text(self, text: str) -> EncodedPrompt:
        tokenizer = self._need_tokenizer()
        token_ids = list(tokenizer.encode(text))
        begin = getattr(tokenizer, "bos_token_id", None)
        if begin is not None and token_ids[:2] == [begin, begin]:
            logger.warning(
                "a prompt begins with the beginning-of-sequence token %r, and the tokenizer adds another; "
                "pass a conversation to chat, or token ids",
                tokenizer.bos_token,
            )
        return EncodedPrompt(text, token_ids)

    def encode_chat(self, messages: Sequence[Message]) -> EncodedPrompt:
        """Renders a conversation with the model's chat template, up to where the assistant speaks.

        The template alone decides about special tokens; none are added to what it renders.

        Raises:
          ValueError: no template, no messages, a malformed message, or the template refused them.
        """
        tokenizer = self._need_tokenizer()
        if not messages or not isinstance(messages, Sequence) or isinstance(messages, str):
            raise ValueError(f"messages={messages!r} must be a list of at least 1 message")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f"messages[{index}]={message!r} must be a mapping with a role")
            if not isinstance(message.get("content"), str):
                raise ValueError(f"messages[{index}]: content={message.get('content')!r} must be a string")
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the model's tokenizer has no chat template: pass a rendered prompt instead")
        try:
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the template is the model's own program: anything may come out
            raise ValueError(f"the chat template refused the messages: {error}") from error
        return EncodedPrompt(text, list(tokenizer.encode(text, add_special_tokens=False)))

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("text needs a tokenizer, and the model came without one: pass tokenizer=")
        return self.tokenizer

    # -- calls --------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, all at once.

        Args:
          prompts: one prompt or a list of them; a list of ints is one prompt.
          sampling_params: one for all, or one for each.

        Returns:
          one output per prompt, in their order. A prompt that cannot run has `error` set and no
          `outputs`; the others are not affected.

        Raises:
          ValueError: the number of `sampling_params` is not the number of prompts, or something else
            is among them.
        """
        items = _as_list(prompts)
        if isinstance(sampling_params, SamplingParams) or sampling_params is None:
            params = [sampling_params or SamplingParams()] * len(items)
        else:
            params = [SamplingParams() if item is None else item for item in sampling_params]
            if not all(isinstance(item, SamplingParams) for item in params):
                raise ValueError(
                    f"sampling_params={sampling_params!r} must be SamplingParams, or a list of them"
                )
            if len(params) != len(items):
                raise ValueError(
                    f"{len(params)} sampling_params for {len(items)} prompts; give one, or one for each"
                )
        return self._run(items, params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them. Like `generate` otherwise."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = list(messages) if several else [messages]
        prompts = [{"messages": conversation} for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Stream:
        """Runs one prompt and iterates over what each step adds to its completions.

        Raises:
          ValueError: the prompt cannot run.
        """
        encoded = self.encode_prompt(prompt)
        return Stream(self, self._submit(encoded, sampling_params, stream=True))

    def fork(self, stream: Stream, count: int = 1) -> list[Stream]:
        """Branches a running stream at its last known token; see `Engine.fork`.

        The branches' deltas begin with what the stream has produced so far.
        """
        with self._working():
            request_ids = self.engine.fork(stream.request_id, count)
        self._mail.update((request_id, deque()) for request_id in request_ids)
        return [Stream(self, request_id) for request_id in request_ids]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        beam_width: int = 4,
        max_tokens: int = 16,
        length_penalty: float = 1.0,
    ) -> list[BeamSearchOutput]:
        """Finds the most probable completions of each prompt.

        Args:
          beam_width: hypotheses kept at each token, and returned; at most 10.
          length_penalty: a hypothesis' score is its log-probability divided by its length to this power.

        Returns:
          one output per prompt, in their order; one that cannot run has `error` set.

        Raises:
          ValueError: `beam_width` or `max_tokens` is out of range.
        """
        check_width(beam_width)
        check_int("max_tokens", max_tokens, low=1)
        outputs: dict[int, BeamSearchOutput] = {}
        searches: dict[int, tuple[EncodedPrompt, BeamSearch]] = {}
        items = _as_list(prompts)
        for index, item in enumerate(items):
            try:
                encoded = self.encode_prompt(item)
                searches[index] = encoded, BeamSearch(self, encoded.token_ids, beam_width, max_tokens)
            except ValueError as error:
                outputs[index] = BeamSearchOutput(_text_of(item), [], [], str(error))
        try:
            while active := [search for _, search in searches.values() if not search.done]:
                self._advance(active)
        finally:
            self._withdraw([beam.request_id for _, search in searches.values() for beam in search.live])
        for index, (encoded, search) in searches.items():
            beams = search.results(length_penalty, self._decode)
            outputs[index] = BeamSearchOutput(encoded.text, encoded.token_ids, beams)
        return [outputs[index] for index in range(len(items))]

    def _advance(self, searches: list[BeamSearch]) -> None:
        """One token of every live beam of every search, all in the same steps."""
        live = [beam.request_id for search in searches for beam in search.live]
        self._mail.update((request_id, deque()) for request_id in live)
        outputs = {request_id: self._receive(request_id) for request_id in live}
        for request_id, output in outputs.items():
            del self._mail[request_id]
            if output.error is not None:
                raise RuntimeError(output.error)
        for search in searches:
            latest = [outputs[beam.request_id].outputs[0].logprobs or [{}] for beam in search.live]
            search.advance([logprobs[-1] for logprobs in latest])

    def _decode(self, token_ids: list[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def warmup(self, variants: tuple[Variant, ...] = tuple(Variant), *, use_tqdm: bool = True) -> None:
        """See `Engine.warmup`."""
        self.engine.warmup(variants, use_tqdm=use_tqdm)

    # -- sharing the engine -------------------------------------------------------------------

    def _run(
        self, items: list[Prompt], params: list[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput | None] = [None] * len(items)
        ids: dict[str, int] = {}
        try:
            for index, (item, item_params) in enumerate(zip(items, params, strict=True)):
                try:
                    ids[self._submit(self.encode_prompt(item), item_params, stream=False)] = index
                except ValueError as error:
                    outputs[index] = _refused(item, str(error))
            with tqdm(total=len(items), desc="requests", disable=not use_tqdm) as bar:
                bar.update(len(items) - len(ids))
                started, produced = time.monotonic(), 0
                while any(output is None for output in outputs) and self.engine.has_unfinished():
                    self._step()
                    for request_id in [key for key in ids if self._mail[key]]:
                        output = self._mail[request_id].popleft()
                        outputs[ids.pop(request_id)] = output
                        del self._mail[request_id]
                        produced += sum(len(completion.token_ids) for completion in output.outputs)
                        seconds = max(time.monotonic() - started, 1e-9)
                        bar.set_postfix_str(f"{produced / seconds:.1f} output tokens/s", refresh=False)
                        bar.update()
        finally:
            self._withdraw(list(ids))
        assert all(output is not None for output in outputs)
        return outputs  # type: ignore[return-value]

    def _submit(self, encoded: EncodedPrompt, params: SamplingParams | None, *, stream: bool) -> str:
        with self._working():
            request_id = self.engine.add_request(
                encoded.token_ids, params, prompt=encoded.text, stream=stream
            )
        self._mail[request_id] = deque()
        return request_id

    def _step(self) -> None:
        """One engine step; each output goes to whoever waits for it."""
        with self._working():
            outputs = self.engine.step()
        for output in outputs:
            if output.request_id in self._mail:
                self._mail[output.request_id].append(output)

    def _receive(self, request_id: str) -> RequestOutput:
        while not self._mail[request_id]:
            self._step()
        return self._mail[request_id].popleft()

    def _withdraw(self, request_ids: list[str]) -> None:
        with self._working():
            for request_id in request_ids:
                self._mail.pop(request_id, None)
                self.engine.abort(request_id)

    def _forget(self, request_id: str) -> None:
        """Withdraws a request as soon as the engine is at rest."""
        if self._depth:
            self._forgotten.append(request_id)
        else:
            self._withdraw([request_id])

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Around calls into the engine: the garbage collector may find a forgotten stream amid one."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            while self._forgotten and not self._depth:
                self._withdraw([self._forgotten.popleft()])


class Stream:
    """The deltas of one request as they come; joined they are its text. Iterate, or close it.

    A stream that is closed, or forgotten, before its end aborts its request.
    """

    def __init__(self, llm: LLM, request_id: str):
        self.request_id = request_id
        self._llm = llm
        self._pending: deque[StreamDelta] = deque()
        self._seen: dict[int, tuple[int, int]] = {}  # per completion, characters and ids handed out
        self._ended: set[int] = set()
        self._finished = False

    def __iter__(self) -> Iterator[StreamDelta]:
        return self

    def __next__(self) -> StreamDelta:
        """The next delta.

        Raises:
          RuntimeError: the request failed while it ran.
        """
        while not self._pending:
            if self._finished:
                raise StopIteration
            self._take(self._llm._receive(self.request_id))
        return self._pending.popleft()

    def _take(self, output: RequestOutput) -> None:
        if output.finished:
            self.close()
        if output.error is not None:
            raise RuntimeError(output.error)
        for completion in output.outputs:
            index = completion.index
            text, ids = self._seen.get(index, (0, 0))
            new_text, new_ids = completion.text[text:], completion.token_ids[ids:]
            self._seen[index] = len(completion.text), len(completion.token_ids)
            ends = completion.finish_reason is not None and index not in self._ended
            if ends:
                self._ended.add(index)
            if new_text or new_ids or ends:
                reason, stop = completion.finish_reason, completion.stop_reason
                self._pending.append(StreamDelta(index, new_text, new_ids, reason, stop))

    def close(self) -> None:
        """Ends the stream; what has not been handed out yet is still there to be iterated."""
        if not self._finished:
            self._finished = True
            self._llm._withdraw([self.request_id])

    def __del__(self) -> None:
        if not self._finished:
            self._finished = True
            self._llm._forget(self.request_id)


def _load(
    model: str | os.PathLike[str], dtype: str, quantization: str | None, tokenizer: Any
) -> tuple[ModelConfig, Params, Any]:
    from jpaged.weights import open_checkpoint

    started = time.monotonic()
    checkpoint = open_checkpoint(model)
    if dtype == "auto":
        dtype = cpu_dtype() if jax.default_backend() == "cpu" else checkpoint.config.dtype
    tokenizer = tokenizer if tokenizer is not None else checkpoint.load_tokenizer()
    params = checkpoint.load_params(dtype, quantization)
    logger.info("loaded %s in %s in %.1f s", model, dtype, time.monotonic() - started)
    return checkpoint.config, params, tokenizer


def _use_compilation_cache() -> None:
    """Keeps compiled programs on disk, so that the next start need not compile them again.

    What the user set before stays: `JAX_COMPILATION_CACHE_DIR` names another folder,
    `JAX_ENABLE_COMPILATION_CACHE=false` turns it off. jax opens its cache once in a process.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    chosen = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if chosen is not None or not os.path.isabs(home):
        return
    jax.config.update("jax_compilation_cache_dir", os.path.join(home, "jpaged", "programs"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def cpu_dtype(cpuinfo: str = "/proc/cpuinfo") -> str:
    """What `dtype="auto"` means on a CPU: bfloat16 where it has instructions for it, else float32.

    Measured; see docs/performance.md.
    """
    try:
        flags = Path(cpuinfo).read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return "float32"
    return "bfloat16" if any(flag in flags for flag in _CPU_BFLOAT16) else "float32"


def _load_tokenizer(path: str | os.PathLike[str]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)) or hasattr(prompts, "tolist"):
        return [prompts]
    prompts = list(prompts)
    if prompts and all(hasattr(item, "__index__") for item in prompts):
        return [prompts]
    return prompts


def _refused(item: Any, error: str) -> RequestOutput:
    return RequestOutput("", _text_of(item), [], [], finished=True, error=error)


def _text_of(item: Any) -> str | None:
    text = item.get("prompt") if isinstance(item, Mapping) else item
    return text if isinstance(text, str) else None
