"""JSONL batch jobs: read requests line by line, run them, write a record for each, continue after a kill.

Owns the file formats. Everything about running is the engine's; this module only keeps it supplied.

Input, one JSON object per line; blank lines, CRLF and a byte order mark are allowed:

* OpenAI's batch form, `{"custom_id", "method": "POST", "url", "body"}`, with the url
  `/v1/completions` or `/v1/chat/completions`, and in the body OpenAI's fields and the further ones
  of `SamplingParams`;
* the short form, `{"id", "prompt" | "prompt_token_ids" | "messages", ...}`, with the fields of
  `SamplingParams`; `id` defaults to `line-<number>`.

`max_tokens: null` means until the context ends; any other null means the default. `max_tokens`
defaults to 16 for prompts and to the rest of the context for messages. `model`, `user`, `metadata`
and `store` are ignored. Any other field is an error.

Output, one JSON object per line in the order of completion, written when its request has finished:

* `{"id", "custom_id", "response": {"status_code": 200, "request_id", "body"}, "error": null}`, the
  body as OpenAI's, without times and with `token_ids` and `stop_reason` in each choice. Completions
  have `logprobs` of tokens, token_logprobs and top_logprobs, chats the `content` list. A body has
  `prompt_logprobs`, `{token id: {logprob, rank, decoded_token}}` per prompt token, if they were asked for.
  Log-probabilities below -9999 are written as -9999.
* `{"id", "custom_id", "response": null, "error": {"code", "message", "line"}}` for a line that could
  not run. It counts as done: `resume` does not try it again.

A record's `id` is unique in the file and depends on the input alone: it is the `custom_id`, but
`<custom_id>#line-<number>` for a line that repeats an earlier id, which is an error. A line without
a seed takes one from the job's seed and that id, so that records depend neither on what runs beside
them nor on a resume.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tqdm import tqdm

from jpaged.config import check_int
from jpaged.request import CompletionOutput, FinishReason, Logprob, RequestOutput
from jpaged.sampling_params import MAX_SEED, SamplingParams

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 8 * 2**20
LOGPROB_FLOOR = -9999.0

Record = dict[str, Any]
PathLike = str | os.PathLike[str]


class EncodedPromptLike(Protocol):
    @property
    def text(self) -> str | None: ...
    @property
    def token_ids(self) -> list[int]: ...


class EngineLike(Protocol):
    """What a batch job needs of an engine."""

    def add_request(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        stream: bool = True,
    ) -> str: ...
    def step(self) -> list[RequestOutput]: ...
    def has_unfinished(self) -> bool: ...
    def abort(self, request_id: str) -> None: ...
    def stats(self) -> dict[str, Any]: ...


class LLMLike(Protocol):
    """What a batch job needs of an `LLM`. All but `model_name` raise `ValueError` for bad requests."""

    model_name: str

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def engine(self) -> EngineLike: ...
    def encode_prompt(self, prompt: str | list[int], /) -> EncodedPromptLike: ...
    def encode_chat(self, messages: list[dict[str, Any]], /) -> EncodedPromptLike: ...


@dataclasses.dataclass(frozen=True, slots=True)
class BatchJob:
    """One request of the input.

    Attributes:
      line: number of its line, from 1.
      id: of its record, unique in the job.
      custom_id: as the line has it, or `id`.
      chat: whether `prompt` is a list of messages; otherwise it is a string or token ids.
    """

    line: int
    id: str
    custom_id: str
    chat: bool
    prompt: Any
    params: SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class BadLine:
    """A line of the input that is not a request, and why."""

    line: int
    id: str
    custom_id: str
    code: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSummary:
    """What a run did.

    Attributes:
      requests: records written by this run, errors included.
      errors: how many of them are errors.
      resumed: records that were there before.
      resumed_errors: how many of them are errors.
      prompt_tokens: of successful requests; counted once whatever `n` is.
      output_tokens: of successful requests, over all completions.
      elapsed_s: seconds from start to end, with whatever the engine had to compile.
      interrupted: whether Ctrl-C ended it early.
      kv_blocks_peak: most KV blocks in use at once, if the engine tells.
      kv_waste: share of the allocated KV slots that held no token, if the engine tells.
    """

    requests: int = 0
    errors: int = 0
    resumed: int = 0
    resumed_errors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    elapsed_s: float = 0.0
    interrupted: bool = False
    kv_blocks_peak: int | None = None
    kv_waste: float | None = None

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 1 if any record of the output is an error, else 0."""
        return 130 if self.interrupted else 1 if self.errors or self.resumed_errors else 0

    def describe(self) -> str:
        """The summary for people, one fact per line."""
        lines = [
            f"requests         {self.requests} ({self.errors} errors)",
            f"prompt tokens    {self.prompt_tokens}",
            f"output tokens    {self.output_tokens}",
            f"elapsed          {self.elapsed_s:.2f} s (compilation included)",
            f"output tokens/s  {self.output_tokens_per_s:.1f}",
        ]
        if self.resumed:
            lines.insert(1, f"done before      {self.resumed} ({self.resumed_errors} errors)")
        if self.kv_blocks_peak is not None:
            lines.append(f"KV blocks, peak  {self.kv_blocks_peak}")
        if self.kv_waste is not None:
            lines.append(f"KV waste         {self.kv_waste:.1%}")
        if self.interrupted:
            lines.append("interrupted: --resume continues where it stopped")
        return "\n".join(lines)


# ---------------------------------------------------------------------------------------------
# Running


def run_batch(
    llm: LLMLike,
    input_path: PathLike,
    output_path: PathLike,
    *,
    seed: int = 0,
    resume: bool = False,
    max_tokens: int | None = None,
    use_tqdm: bool = True,
    on_record: Callable[[Record], None] | None = None,
) -> BatchSummary:
    """Runs every request of a JSONL file and writes a record for each.

    At most `2 * llm.max_num_seqs` requests are in the engine at once, and lines are read when there
    is room for them. The first Ctrl-C stops at the next step: what is in flight is aborted without a
    record, so that `resume` runs it again. A second one raises `KeyboardInterrupt`.

    Args:
      llm: not used by others meanwhile: outputs of other requests are dropped.
      input_path, output_path: see the module docstring. Missing directories are made.
      seed: what lines without a seed take theirs from.
      resume: continue an earlier run with the same input, seed and options: requests with a record
        are skipped, and a torn last line is removed. Without it a non-empty output is refused.
      max_tokens: default for lines that have none.
      on_record: called with each record after it is written.

    Raises:
      ValueError: an argument is wrong, the output exists and `resume` is not set, or the output is
        not one of an earlier run. Nothing is written then.
      OSError: a file cannot be read or written.
    """
    check_batch(input_path, output_path, seed=seed, resume=resume, max_tokens=max_tokens)
    started = time.monotonic()
    done = _recover(Path(output_path)) if resume else _Done()
    Path(output_path).parent.mkdir(parents=True, exist_ok=True)
    total = _count_lines(input_path) if use_tqdm else None
    with (
        open(input_path, "rb") as source,
        open(output_path, "ab") as sink,
        tqdm(total=total, initial=done.records, unit="req", disable=not use_tqdm) as bar,
    ):
        run = _Run(llm, _Writer(sink, bar, on_record))
        jobs = read_jobs(source, seed=seed, max_tokens=max_tokens, done=done.ids)
        interrupted = run.run(jobs)
    if not run.writer.records and not done.records and not interrupted:
        logger.warning("%s has no requests; %s is empty", input_path, output_path)
    stats = llm.engine.stats()
    return BatchSummary(
        requests=run.writer.records,
        errors=run.writer.errors,
        resumed=done.records,
        resumed_errors=done.errors,
        prompt_tokens=run.prompt_tokens,
        output_tokens=run.output_tokens,
        elapsed_s=time.monotonic() - started,
        interrupted=interrupted,
        kv_blocks_peak=stats.get("kv_blocks_peak"),
        kv_waste=stats.get("kv_waste"),
    )


def check_batch(
    input_path: PathLike, output_path: PathLike, *, seed: int, resume: bool, max_tokens: int | None
) -> None:
    """The checks of `run_batch` that need no model; changes nothing.

    Raises:
      ValueError: see `run_batch`.
      OSError: the input cannot be read.
    """
    check_int("seed", seed, low=0, high=MAX_SEED)
    if max_tokens is not None:
        check_int("max_tokens", max_tokens, low=0)
    with open(input_path, "rb"):
        pass
    output = Path(output_path)
    if not output.exists():
        return
    if not output.is_file():
        raise ValueError(f"output {output} is not a file")
    if output.samefile(input_path):
        raise ValueError(f"output {output} is the input")
    if output.stat().st_size and not resume:
        raise ValueError(f"output {output} exists and is not empty: continue it with --resume, or remove it")


class _Run:
    """Keeps the engine supplied, and turns its outputs into records."""

    def __init__(self, llm: LLMLike, writer: _Writer):
        self.writer = writer
        self.prompt_tokens = 0
        self.output_tokens = 0
        self._llm = llm
        self._in_flight: dict[str, BatchJob] = {}

    def run(self, jobs: Iterator[BatchJob | BadLine]) -> bool:
        """Runs all jobs; returns whether Ctrl-C ended it early."""
        with _catch_interrupt() as interrupt:
            try:
                while not interrupt.is_set():
                    self._admit(jobs, interrupt)
                    if not self._in_flight or interrupt.is_set():
                        break
                    for output in self._llm.engine.step():
                        self._take(output)
            finally:
                self._abort()
            return interrupt.is_set()

    def _admit(self, jobs: Iterator[BatchJob | BadLine], interrupt: threading.Event) -> None:
        while len(self._in_flight) < 2 * self._llm.max_num_seqs and not interrupt.is_set():
            job = next(jobs, None)
            if job is None:
                return
            if isinstance(job, BadLine):
                self.writer.write(_error_record(job))
                continue
            try:
                self._submit(job)
            except ValueError as error:
                self._fail(job, "invalid_request", str(error))

    def _submit(self, job: BatchJob) -> None:
        encode = self._llm.encode_chat if job.chat else self._llm.encode_prompt
        encoded = encode(job.prompt)
        self._llm.engine.add_request(
            encoded.token_ids, job.params, request_id=job.id, prompt=encoded.text, stream=False
        )
        self._in_flight[job.id] = job

    def _take(self, output: RequestOutput) -> None:
        if not output.finished:
            return
        job = self._in_flight.pop(output.request_id, None)
        if job is None:
            return
        reasons = {completion.finish_reason for completion in output.outputs}
        if output.error is not None:
            self._fail(job, "failed", output.error)
        elif reasons & {FinishReason.ABORT, FinishReason.ERROR}:
            self._fail(job, "failed", "the request was aborted")
        else:
            self.prompt_tokens += len(output.prompt_token_ids)
            self.output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
            self.writer.note_tokens(self.output_tokens)
            self.writer.write(_response_record(job, output, self._llm.model_name))

    def _fail(self, job: BatchJob, code: str, message: str) -> None:
        self.writer.write(_error_record(BadLine(job.line, job.id, job.custom_id, code, message)))

    def _abort(self) -> None:
        """Leaves nothing of this job in the engine."""
        engine = self._llm.engine
        for request_id in self._in_flight:
            engine.abort(request_id)
        while self._in_flight and engine.has_unfinished():
            for output in engine.step():
                if output.finished:
                    self._in_flight.pop(output.request_id, None)


class _Writer:
    """Appends records, each in the file before the next is made."""

    def __init__(self, sink: BinaryIO, bar: tqdm, on_record: Callable[[Record], None] | None):
        self.records = 0
        self.errors = 0
        self._sink = sink
        self._bar = bar
        self._on_record = on_record
        self._started = time.monotonic()

    def write(self, record: Record) -> None:
        self._sink.write(_encode_record(record))
        self._sink.flush()
        self.records += 1
        self.errors += record["error"] is not None
        self._bar.update()
        if self._on_record is not None:
            self._on_record(record)

    def note_tokens(self, output_tokens: int) -> None:
        seconds = max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{output_tokens / seconds:.1f} output tokens/s", refresh=False)


@contextlib.contextmanager
def _catch_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second raises. Only the main thread can catch any."""
    interrupt = threading.Event()

    def handle(signum: int, frame: Any) -> None:
        if interrupt.is_set():
            raise KeyboardInterrupt
        interrupt.set()

    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


# ---------------------------------------------------------------------------------------------
# Input


class _Refused(ValueError):
    """A line that cannot be a request, before its fields are looked at."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


def read_jobs(
    source: BinaryIO, *, seed: int = 0, max_tokens: int | None = None, done: IdSet | None = None
) -> Iterator[BatchJob | BadLine]:
    """Reads requests as they are asked for, in the order of the lines.

    Args:
      source: the input, opened in binary mode.
      seed: what lines without a seed take theirs from.
      max_tokens: default for lines that have none.
      done: record ids to leave out.
    """
    seen = IdSet()
    for line, raw in _lines(source):
        fields: dict[str, Any] = {}
        custom_id: str | None = None
        refused: _Refused | None = None
        try:
            fields = _parse_object(raw)
            custom_id = _own_id(fields)
        except _Refused as error:
            refused = error
        record_id = own_id = custom_id if custom_id is not None else f"line-{line}"
        while not seen.add(record_id):
            record_id += f"#line-{line}"
        if done is not None and record_id in done:
            continue
        if refused is None and custom_id not in (None, record_id):
            refused = _Refused("duplicate_id", f"custom_id={custom_id!r} is that of an earlier line")
        if refused is not None:
            yield BadLine(line, record_id, own_id, refused.code, str(refused))
            continue
        try:
            request = _parse_request(fields, max_tokens, derive_seed(seed, record_id))
        except ValueError as error:
            yield BadLine(line, record_id, own_id, "invalid_request", str(error))
        else:
            yield BatchJob(line, record_id, own_id, request.chat, request.prompt, request.params)


def derive_seed(seed: int, record_id: str) -> int:
    """The seed of a line that has none: the same in every process and on every machine."""
    return _digest(f"{seed}\0{record_id}") >> 1


def _lines(source: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Numbers from 1 and contents of the lines that are not blank; `None` for one that is too long."""
    line = 0
    while raw := source.readline(MAX_LINE_BYTES + 1):
        line += 1
        if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            while raw and not raw.endswith(b"\n"):
                raw = source.readline(2**20)
            yield line, None
            continue
        if line == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        raw = raw.strip()
        if raw:
            yield line, raw


def _count_lines(path: PathLike) -> int:
    with open(path, "rb") as source:
        return sum(1 for _ in _lines(source))


def _parse_object(raw: bytes | None) -> dict[str, Any]:
    if raw is None:
        raise _Refused("line_too_long", f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        value = json.loads(raw.decode(), parse_constant=_refuse_constant)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except UnicodeDecodeError as error:
        raise _Refused("invalid_utf8", f"not UTF-8: {error.reason} at byte {error.start}") from None
    except UnicodeEncodeError:
        raise _Refused("invalid_json", "a string has half of a surrogate pair") from None
    except _Refused:
        raise
    except json.JSONDecodeError as error:
        raise _Refused("invalid_json", f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise _Refused("invalid_json", f"not JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise _Refused("invalid_json", f"the line is a {type(value).__name__}, it must be an object")
    return value


def _refuse_constant(name: str) -> None:
    raise _Refused("invalid_json", f"not JSON: {name}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    chat: bool
    prompt: Any
    params: SamplingParams


_PARAM_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_IGNORED_FIELDS = frozenset({"model", "user", "metadata", "store"})
_ENVELOPE_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
_URLS = {"/v1/completions": False, "/v1/chat/completions": True}
# Of SamplingParams, those that OpenAI's bodies do not have in any dialect.
_NOT_IN_BODY = frozenset({"detokenize"})


def _own_id(fields: dict[str, Any]) -> str | None:
    """The id that the line gives itself; only the short form need not have one."""
    name = "custom_id" if _ENVELOPE_FIELDS & fields.keys() else "id"
    custom_id = fields.get(name)
    if name == "id":
        if custom_id is None:
            return None
        if isinstance(custom_id, int) and not isinstance(custom_id, bool):
            return str(custom_id)
    if not isinstance(custom_id, str) or not custom_id:
        raise _Refused(
            "invalid_request", f"{name}={_short(custom_id)} must be a string of at least 1 character"
        )
    return custom_id


def _parse_request(fields: dict[str, Any], max_tokens: int | None, seed: int) -> _Request:
    """Reads either form; `max_tokens` and `seed` are for lines that have none."""
    if _ENVELOPE_FIELDS & fields.keys():
        return _parse_envelope(fields, max_tokens, seed)
    return _parse_short(fields, max_tokens, seed)


def _parse_envelope(fields: dict[str, Any], max_tokens: int | None, seed: int) -> _Request:
    _refuse_unknown(fields.keys() - _ENVELOPE_FIELDS, "field")
    if fields.get("method", "POST") != "POST":
        raise ValueError(f"method={_short(fields['method'])} must be 'POST'")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in _URLS:
        raise ValueError(f"url={_short(url)} must be one of {', '.join(_URLS)}")
    if not isinstance(body, dict):
        raise ValueError(f"body={_short(body)} must be an object")
    chat = _URLS[url]
    options = {key: value for key, value in body.items() if key not in _IGNORED_FIELDS}
    prompt = options.pop("messages" if chat else "prompt", None)
    _refuse_streaming(options)
    _map_token_limit(options)
    if chat:
        _map_chat_logprobs(options)
    _refuse_unknown(options.keys() - (_PARAM_FIELDS - _NOT_IN_BODY), "body field")
    return _Request(chat, _check_prompt(prompt, chat), _params(options, chat, max_tokens, seed))


def _parse_short(fields: dict[str, Any], max_tokens: int | None, seed: int) -> _Request:
    options = {key: value for key, value in fields.items() if key != "id" and key not in _IGNORED_FIELDS}
    prompts = {key: options.pop(key) for key in _PROMPT_FIELDS if key in options}
    given = [key for key, value in prompts.items() if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"exactly 1 of {', '.join(_PROMPT_FIELDS)} is needed; the line has {given or 'none'}"
        )
    _refuse_unknown(options.keys() - _PARAM_FIELDS, "field")
    key = given[0]
    chat, prompt = key == "messages", prompts[key]
    if isinstance(prompt, str) != (key == "prompt"):
        raise ValueError(f"{key}={_short(prompt)} must be a {'string' if key == 'prompt' else 'list'}")
    return _Request(chat, _check_prompt(prompt, chat), _params(options, chat, max_tokens, seed))


def _check_prompt(prompt: Any, chat: bool) -> Any:
    if chat:
        if not isinstance(prompt, list):
            raise ValueError(f"messages={_short(prompt)} must be a list")
        return prompt
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise ValueError(f"prompt={_short(prompt)} must be a string or a list of token ids")
    for token_id in prompt:
        if isinstance(token_id, (str, list)):
            raise ValueError("prompt must be one prompt: give each its own line")
        check_int("prompt token id", token_id, low=0)
    return prompt


def _refuse_unknown(names: set[str], what: str) -> None:
    if names:
        raise ValueError(f"unknown {what} {', '.join(map(_short, sorted(names)))}")


def _refuse_streaming(options: dict[str, Any]) -> None:
    for name in ("stream", "echo"):
        value = options.pop(name, None)
        if value is not None and value is not False:
            raise ValueError(f"{name}={_short(value)} is not supported in batch jobs")


def _map_token_limit(options: dict[str, Any]) -> None:
    """OpenAI's two names for one limit."""
    if "max_completion_tokens" not in options:
        return
    value = options.pop("max_completion_tokens")
    if "max_tokens" in options and options["max_tokens"] != value:
        raise ValueError(
            f"max_completion_tokens={_short(value)} and max_tokens={_short(options['max_tokens'])} differ"
        )
    options["max_tokens"] = value


def _map_chat_logprobs(options: dict[str, Any]) -> None:
    """OpenAI's chats ask with a bool, and say how many alternatives apart from it."""
    wanted = options.pop("logprobs", None)
    count = options.pop("top_logprobs", None)
    if wanted is not None and not isinstance(wanted, bool):
        raise ValueError(f"logprobs={_short(wanted)} must be true or false in a chat")
    if wanted:
        options["logprobs"] = 0 if count is None else count
    elif count is not None:
        raise ValueError(f"top_logprobs={_short(count)} needs logprobs=true")


def _params(options: dict[str, Any], chat: bool, max_tokens: int | None, seed: int) -> SamplingParams:
    values = {key: value for key, value in options.items() if value is not None or key == "max_tokens"}
    values.setdefault("seed", seed)
    if "max_tokens" not in values and (max_tokens is not None or chat):
        values["max_tokens"] = max_tokens
    if isinstance(values.get("logit_bias"), dict):
        values["logit_bias"] = {_bias_key(key): value for key, value in values["logit_bias"].items()}
    return SamplingParams(**values)


def _bias_key(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        raise ValueError(f"logit_bias: {_short(key)} must be a token id")
    return int(key)


def _short(value: Any) -> str:
    """A value of the input for a message, cut to what a person reads."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---------------------------------------------------------------------------------------------
# Records


def _error_record(bad: BadLine) -> Record:
    error = {"code": bad.code, "message": bad.message, "line": bad.line}
    return {"id": bad.id, "custom_id": bad.custom_id, "response": None, "error": error}


def _response_record(job: BatchJob, output: RequestOutput, model: str) -> Record:
    prompt_tokens = len(output.prompt_token_ids)
    completion_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    choice = _chat_choice if job.chat else _completion_choice
    completions = sorted(output.outputs, key=lambda completion: completion.index)
    body: Record = {
        "id": f"{'chatcmpl' if job.chat else 'cmpl'}-{job.id}",
        "object": "chat.completion" if job.chat else "text_completion",
        "model": model,
        "choices": [choice(completion, job.params.logprobs) for completion in completions],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = [_prompt_logprobs(position) for position in output.prompt_logprobs]
    response = {"status_code": 200, "request_id": job.id, "body": body}
    return {"id": job.id, "custom_id": job.custom_id, "response": response, "error": None}


def _completion_choice(completion: CompletionOutput, count: int | None) -> Record:
    logprobs = None
    if completion.logprobs is not None and count is not None:
        positions = list(zip(completion.token_ids, completion.logprobs, strict=False))
        logprobs = {
            "tokens": [_token_text(token_id, values[token_id]) for token_id, values in positions],
            "token_logprobs": [_finite(values[token_id].logprob) for token_id, values in positions],
            "top_logprobs": [_top_by_text(values) for _, values in positions],
        }
    return {"index": completion.index, "text": completion.text} | _ending(completion) | {"logprobs": logprobs}


def _chat_choice(completion: CompletionOutput, count: int | None) -> Record:
    logprobs = None
    if completion.logprobs is not None and count is not None:
        content = []
        for token_id, values in zip(completion.token_ids, completion.logprobs, strict=False):
            top = [_chat_token(key, value) for key, value in _by_rank(values) if value.rank <= count]
            content.append(_chat_token(token_id, values[token_id]) | {"top_logprobs": top})
        logprobs = {"content": content}
    message = {"role": "assistant", "content": completion.text}
    return {"index": completion.index, "message": message} | _ending(completion) | {"logprobs": logprobs}


def _ending(completion: CompletionOutput) -> Record:
    return {
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "token_ids": completion.token_ids,
    }


def _chat_token(token_id: int, value: Logprob) -> Record:
    text = _token_text(token_id, value)
    return {"token": text, "logprob": _finite(value.logprob), "bytes": list(text.encode())}


def _top_by_text(values: Mapping[int, Logprob]) -> dict[str, float]:
    """By text, as OpenAI has it: of tokens that read the same, the most probable."""
    top: dict[str, float] = {}
    for token_id, value in _by_rank(values):
        top.setdefault(_token_text(token_id, value), _finite(value.logprob))
    return top


def _prompt_logprobs(values: Mapping[int, Logprob] | None) -> Record | None:
    if values is None:
        return None
    return {
        str(token_id): {
            "logprob": _finite(value.logprob),
            "rank": value.rank,
            "decoded_token": value.decoded_token,
        }
        for token_id, value in _by_rank(values)
    }


def _by_rank(values: Mapping[int, Logprob]) -> Sequence[tuple[int, Logprob]]:
    return sorted(values.items(), key=lambda item: (item[1].rank, item[0]))


def _token_text(token_id: int, value: Logprob) -> str:
    return value.decoded_token if value.decoded_token is not None else f"token_id:{token_id}"


def _finite(logprob: float) -> float:
    return LOGPROB_FLOOR if math.isnan(logprob) else max(float(logprob), LOGPROB_FLOOR)


def _encode_record(record: Record) -> bytes:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    for separator in ("\x85", "\u2028", "\u2029"):  # some readers end lines at these
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    return text.encode() + b"\n"


# ---------------------------------------------------------------------------------------------
# What is done


class IdSet:
    """A set of strings in about 8 to 24 bytes each, by 64-bit digests: one false hit in 10**19 pairs.

    An open-addressing table without removal; 0 marks a free place.
    """

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * 1024))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, text: str) -> bool:
        digest = _digest(text)
        return self._table[self._place(self._table, digest)] == digest

    def add(self, text: str) -> bool:
        """Adds `text`; returns whether it was not there."""
        digest = _digest(text)
        place = self._place(self._table, digest)
        if self._table[place] == digest:
            return False
        self._table[place] = digest
        self._count += 1
        if 3 * self._count > 2 * len(self._table):
            self._grow()
        return True

    def _grow(self) -> None:
        table = array("Q", bytes(16 * len(self._table)))
        for digest in self._table:
            if digest:
                table[self._place(table, digest)] = digest
        self._table = table

    @staticmethod
    def _place(table: array[int], digest: int) -> int:
        mask = len(table) - 1
        place = digest & mask
        while table[place] and table[place] != digest:
            place = (place + 1) & mask
        return place


def _digest(text: str) -> int:
    """64 bits of a stable hash, never 0."""
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


@dataclasses.dataclass(slots=True)
class _Done:
    """The records that an output file has."""

    ids: IdSet = dataclasses.field(default_factory=IdSet)
    records: int = 0
    errors: int = 0


def _recover(path: Path) -> _Done:
    """Reads an earlier run's output, and cuts off the line that a kill has torn.

    Raises:
      ValueError: the file holds something else; it is left as it was.
    """
    done = _Done()
    if not path.exists():
        return done
    good = 0
    with open(path, "rb") as file:
        for line, raw in enumerate(file, start=1):
            record = _read_record(raw)
            if record is None and raw.startswith(b"{") and not file.read(1):
                break
            if not isinstance(record, dict) or {"id", "custom_id", "response", "error"} - record.keys():
                raise ValueError(
                    f"output {path}: line {line} is not a record of a batch job; nothing was changed"
                )
            done.ids.add(str(record["id"]))
            done.records += 1
            done.errors += record["error"] is not None
            good += len(raw)
    if good < path.stat().st_size:
        logger.warning("%s: removing its last line, which is torn", path)
        os.truncate(path, good)
    return done


def _read_record(raw: bytes) -> Any:
    """The JSON value of a complete line, or `None`."""
    if not raw.endswith(b"\n"):
        return None
    try:
        return json.loads(raw)
    except ValueError:
        return None
