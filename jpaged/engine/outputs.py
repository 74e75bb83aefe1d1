"""What callers get: sampled ids gathered into texts, log-probabilities and RequestOutputs.

Owns the output side of a request the caller added: its `n` sequences, their detokenizers, and what
has been reported of them.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from jpaged.detokenizer import IncrementalDetokenizer, TokenDecoder
from jpaged.engine.runner import TokenLogprobs
from jpaged.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
)


class SequenceOutput:
    """The output of one sequence as it grows."""

    def __init__(self, request: Request, decoder: TokenDecoder | None, *, stream: bool):
        params = request.params
        self.request = request
        self.num_seen = 0
        self._complete = False  # all text is out
        self._values: list[TokenLogprobs] = []  # by output token
        self._decoder = decoder
        self._incremental = stream or bool(params.stop)
        self._detokenizer: IncrementalDetokenizer | None = None
        if decoder is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                decoder,
                request.token_ids[: request.num_prompt_tokens],
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop_str=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    @property
    def due(self) -> bool:
        """Whether its text or its end may be wanted now, and not only once it has finished."""
        return self._incremental or self.request.finished

    @property
    def text(self) -> str:
        return self._detokenizer.text if self._detokenizer else ""

    def take_tokens(self) -> str | None:
        """Catches up with the request's known ids; returns a stop string if they complete one.

        Called again, it does nothing.
        """
        request = self.request
        if self._detokenizer is None or self._complete or not self.due:
            return None
        self._complete = request.finished
        output = request.output_token_ids
        new = output[self.num_seen :]
        self.num_seen = len(output)
        silent = request.finish_reason is FinishReason.STOP and not request.params.include_stop_str_in_output
        if silent and isinstance(request.stop_reason, str):
            return None  # the stop string was found before
        if silent and new:
            new = new[:-1]  # the token that stopped it
        stop = self._detokenizer.append(new).stop
        if request.finished and stop is None:
            stop = self._detokenizer.finish().stop
        return stop

    def note_logprobs(self, values: TokenLogprobs) -> None:
        """Keeps the values of the token that comes next, in place of earlier ones for that token."""
        del self._values[self.request.num_output_tokens :]
        self._values.append(values)

    def continue_from(self, other: SequenceOutput) -> None:
        """Starts with what another sequence, of which this one is a branch, has noted so far."""
        self._values = other._values[: self.request.num_output_tokens]

    def snapshot(self) -> CompletionOutput:
        """A copy of what there is so far."""
        request, count = self.request, self.request.params.logprobs
        token_ids = [] if request.params.max_tokens == 0 else request.output_token_ids
        values = list(zip(token_ids, self._values, strict=False)) if count is not None else None
        return CompletionOutput(
            index=request.index,
            text=self.text if token_ids else "",
            token_ids=token_ids,
            finish_reason=request.finish_reason and str(request.finish_reason),
            stop_reason=request.stop_reason,
            cumulative_logprob=None if values is None else sum(v.logprob for _, v in values),
            logprobs=None if values is None else [self._logprob_dict(t, v) for t, v in values],
        )

    def _logprob_dict(self, token: int, values: TokenLogprobs) -> dict[int, Logprob]:
        return logprob_dict(token, values, self.request.params.logprobs or 0, self._decoder)


@dataclasses.dataclass(slots=True)
class RequestGroup:
    """One request of the caller: `n` sequences over one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[SequenceOutput]
    stream: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def error(self) -> str | None:
        """Why the request failed, if one of its sequences did."""
        failed = [s.request for s in self.sequences if s.request.finish_reason is FinishReason.ERROR]
        return str(failed[0].stop_reason) if failed else None

    @property
    def finished(self) -> bool:
        return all(s.request.finished for s in self.sequences)

    def snapshot(self) -> RequestOutput:
        """A copy of what there is so far."""
        requests = [sequence.request for sequence in self.sequences]
        self.metrics.num_preemptions = sum(request.num_preemptions for request in requests)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[] if self.error else [sequence.snapshot() for sequence in self.sequences],
            finished=self.finished,
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            num_cached_tokens=requests[0].num_cached_tokens if requests else 0,
            metrics=dataclasses.replace(self.metrics),
            error=self.error,
        )


def logprob_dict(
    token: int, values: TokenLogprobs, count: int, decoder: TokenDecoder | None
) -> dict[int, Logprob]:
    """The token itself and the `count` most probable ones, by id."""

    def text(token_id: int) -> str | None:
        return decoder.decode([token_id], skip_special_tokens=False) if decoder else None

    result = {token: Logprob(values.logprob, values.rank, text(token))}
    best = zip(values.top_ids[:count], values.top_logprobs[:count], strict=True)
    for rank, (token_id, logprob) in enumerate(best, start=1):
        if token_id != token:
            result[token_id] = Logprob(logprob, rank, text(token_id))
    return result


def new_metrics() -> RequestMetrics:
    return RequestMetrics(arrival_time=time.monotonic())


def tokenizer_decoder(tokenizer: Any) -> TokenDecoder | None:
    return None if tokenizer is None else TokenDecoder(tokenizer)
