"""A request on the host: the state of one sequence, and what the caller gets back.

Owns no memory: blocks belong to `scheduling.kv_manager`, rows to `scheduling.scheduler`.
"""

from __future__ import annotations

import dataclasses
import enum

from jpaged.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, max_model_len, or the KV pool cannot hold one more token
    ABORT = "abort"
    ERROR = "error"  # see RequestOutput.error


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the model's own distribution (before any filter)."""

    logprob: float
    rank: int  # 1 is the most probable
    decoded_token: str | None = None


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One completion of a request. `token_ids` include the token that stopped it, `text` does not."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of `time.monotonic()`; `None` until they happen."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """What a request has produced so far. `error` is set, and `outputs` empty, if it was refused."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Request:
    """Host state of one sequence (one of the `n` completions of what the caller added).

    Counts of tokens: `num_tokens` known ids, then `num_pending` sampled ids that are still on the
    device. `num_scheduled` tokens, from the start, have been given to the device; their KV may
    be read by any later step. A step computes tokens `[num_scheduled, num_scheduled + n)`. The first
    `num_from_host` ids are fed by the host, the later ones were sampled in the request's row. The first
    `num_committed` blocks of `block_ids` are known to the prefix cache. Entries of `block_ids` from
    `table_changed` on have changed since the device was told.
    """

    __slots__ = (
        "arrival", "block_ids", "cache_salt", "finish_reason", "fork_parent", "index", "max_total_tokens",
        "num_cached_tokens", "num_committed", "num_from_host", "num_pending", "num_preemptions",
        "num_prompt_tokens", "num_scheduled", "params", "parent_id", "pause_at", "request_id", "row",
        "seed", "status", "stop_ids", "stop_reason", "table_changed", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival: int = 0,
        parent_id: str | None = None,
        index: int = 0,
        seed: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        max_total_tokens: int = 2**31 - 1,
        cache_salt: str | None = None,
    ):
        """Makes a waiting request.

        Args:
          arrival: position in the order of arrival; smaller is older.
          parent_id: id of the caller's request; `request_id` itself unless `n > 1`.
          index: which of the parent's completions this is.
          stop_ids: token ids that end the sequence, end-of-sequence ids included.
          max_total_tokens: prompt and output tokens after which it ends with `length`.
          cache_salt: requests with different salts never share cached prefixes.
        """
        self.request_id = request_id
        self.parent_id = parent_id or request_id
        self.index = index
        self.params = params
        self.arrival = arrival
        self.seed = seed
        self.stop_ids = stop_ids
        self.max_total_tokens = max_total_tokens
        self.cache_salt = cache_salt
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_scheduled = 0
        self.num_pending = 0
        self.num_committed = 0
        self.num_from_host = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.block_ids: list[int] = []
        self.table_changed = 0
        self.fork_parent: Request | None = None
        self.pause_at: int | None = None  # known tokens at which it waits, neither running on nor ended
        self.row: int | None = None
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def reset(self) -> None:
        """Back to waiting, owning nothing, with all its known tokens: they are computed again."""
        self.block_ids.clear()
        self.num_scheduled = self.num_pending = self.num_committed = 0
        self.row = None
        self.status = RequestStatus.WAITING

    @property
    def num_tokens(self) -> int:
        """Known ids: the prompt and the output that has reached the host."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def paused(self) -> bool:
        """Whether it waits for `pause_at` to be moved."""
        return self.pause_at is not None and self.num_tokens + self.num_pending >= self.pause_at

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"known={self.num_tokens}, scheduled={self.num_scheduled}, row={self.row})"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class StreamDelta:
    """What a stream brought: new text and ids of one completion, and at its end why it ended."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
