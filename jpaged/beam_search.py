"""Beam search over paused requests and forks of them.

Each live beam is a request of the engine that pauses after every token. A beam that goes on in several
ways is forked, one that is dropped is aborted; so beams share the blocks of what they have in common,
and a block is copied only where they part within it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jpaged.request import Logprob
from jpaged.sampling_params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from jpaged.llm import LLM


@dataclasses.dataclass(frozen=True, slots=True)
class Beam:
    """One hypothesis: its generated ids, their text, and the sum of their log-probabilities."""

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float  # cumulative_logprob / length ** length_penalty
    finish_reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best hypotheses of one prompt, best first; none, and `error` set, if it was refused."""

    prompt: str | None
    prompt_token_ids: list[int]
    beams: list[Beam]
    error: str | None = None


@dataclasses.dataclass(slots=True)
class _Live:
    """A hypothesis that goes on, in a request of the engine."""

    request_id: str
    token_ids: list[int]
    logprob: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Candidate:
    parent: int
    token: int
    logprob: float


class BeamSearch:
    """The search over one prompt, one token at a time.

    Per step, of the `2 * width` best continuations of every live beam, those that end the sequence are
    kept as finished, and the `width` best others live on. At `max_tokens` the best `width` of all are
    the result.
    """

    def __init__(self, llm: LLM, prompt_token_ids: list[int], width: int, max_tokens: int):
        self._engine = llm.engine
        self._width = width
        self._max_tokens = max_tokens
        self._eos = frozenset(llm.config.eos_token_ids)
        self.finished: list[_Live] = []
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2 * width, detokenize=False
        )
        first = self._engine.add_request(prompt_token_ids, params)
        self._engine.pause(first, 1)
        self.live = [_Live(first, [], 0.0)]

    @property
    def done(self) -> bool:
        return not self.live

    def advance(self, logprobs: list[dict[int, Logprob]]) -> None:
        """Takes the distribution after each live beam, in order, and chooses those that go on."""
        candidates = [
            _Candidate(parent, token, beam.logprob + entry.logprob)
            for parent, (beam, tokens) in enumerate(zip(self.live, logprobs, strict=True))
            for token, entry in tokens.items()
        ]
        candidates.sort(key=lambda candidate: -candidate.logprob)
        going_on: list[_Candidate] = []
        for candidate in candidates[: 2 * self._width]:
            if candidate.token in self._eos:
                self.finished.append(self._extended(candidate, ""))
            elif len(going_on) < self._width:
                going_on.append(candidate)
        if len(self.live[0].token_ids) + 1 >= self._max_tokens:
            self.finished += [self._extended(candidate, "") for candidate in going_on]
            going_on = []
        self._branch(going_on)

    def _extended(self, candidate: _Candidate, request_id: str) -> _Live:
        ids = [*self.live[candidate.parent].token_ids, candidate.token]
        return _Live(request_id, ids, candidate.logprob)

    def _branch(self, going_on: list[_Candidate]) -> None:
        """Gives every candidate a request: the parent's own the first time, a fork after that."""
        used: set[int] = set()
        names = []
        for candidate in going_on:
            parent = self.live[candidate.parent].request_id
            names.append(self._engine.fork(parent)[0] if candidate.parent in used else parent)
            used.add(candidate.parent)
        for index, beam in enumerate(self.live):
            if index not in used:
                self._engine.abort(beam.request_id)
        self.live = [self._extended(c, name) for c, name in zip(going_on, names, strict=True)]
        for beam in self.live:
            self._engine.resume(beam.request_id, beam.token_ids[-1])

    def results(self, length_penalty: float, decode) -> list[Beam]:  # noqa: ANN001
        """The best beams, best first."""

        def score(beam: _Live) -> float:
            return beam.logprob / len(beam.token_ids) ** length_penalty

        best = sorted(self.finished, key=score, reverse=True)[: self._width]
        return [
            Beam(
                token_ids=beam.token_ids,
                text=decode(beam.token_ids),
                cumulative_logprob=beam.logprob,
                score=score(beam),
                finish_reason="stop" if beam.token_ids[-1] in self._eos else "length",
            )
            for beam in best
        ]


def check_width(beam_width: int) -> None:
    """Raises `ValueError` unless two continuations per beam and place can be reported."""
    if isinstance(beam_width, bool) or not isinstance(beam_width, int):
        raise ValueError(f"{beam_width=} must be an int")
    if not 1 <= beam_width <= MAX_LOGPROBS // 2:
        raise ValueError(f"{beam_width=} must be in [1, {MAX_LOGPROBS // 2}]")
