"""ScheduledStep -> the padded arrays of a compiled step.

Owns the host's copy of what the device knows by row (block tables, sampling values) and the choice
of bucket. Every array it hands out is fresh: a step in flight never sees a later write.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from jpaged.batch import (
    FLAG_ALLOWED,
    FLAG_EXTRAS,
    FLAG_HOLD_STOP,
    FLAG_PENALTIES,
    FROM_DEVICE,
    MAX_STOP_IDS,
    DecodeBatch,
    RaggedBatch,
    SamplingBatch,
)
from jpaged.ops.sampling import Variant
from jpaged.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, SamplingParams
from jpaged.scheduling.scheduler import AdmittedRow, ScheduledSequence, ScheduledStep

DETERMINISTIC_TOKENS = 64  # fewer rows make XLA choose other products on a CPU


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The shapes that steps are compiled for.

    Attributes:
      decode: numbers of sequences, ascending; empty where every token takes the prefill step.
      ragged: (tokens, sequences), ascending.
    """

    decode: tuple[int, ...]
    ragged: tuple[tuple[int, int], ...]

    def for_decode(self, num_seqs: int) -> int:
        return self.decode[bisect.bisect_left(self.decode, num_seqs)]

    def for_ragged(self, num_tokens: int, num_seqs: int) -> tuple[int, int]:
        return next(b for b in self.ragged if b[0] >= num_tokens and b[1] >= num_seqs)


def declare_buckets(
    *, max_num_seqs: int, max_num_batched_tokens: int, min_decode: int, deterministic: bool
) -> Buckets:
    """A few shapes, each a small multiple of the one before, so their number grows as a logarithm.

    With `deterministic`, every token takes the prefill step, and every engine has the bucket of
    DETERMINISTIC_TOKENS, the one that the others must agree with: so a result does not depend on how
    the engine was sized either.
    """
    tokens = _ladder(32, 4, max_num_batched_tokens)
    if deterministic:
        tokens = [DETERMINISTIC_TOKENS, *(count for count in tokens if count > DETERMINISTIC_TOKENS)]
        num_seqs = max(DETERMINISTIC_TOKENS, max_num_seqs)  # reductions over logits depend on it, too
        return Buckets((), tuple((count, num_seqs) for count in tokens))
    ragged = {(t, s) for t in tokens for s in (min(8, max_num_seqs), min(t, max_num_seqs))}
    decode = _ladder(8, 2, max_num_seqs)
    if min_decode < decode[0]:
        decode.insert(0, min_decode)
    return Buckets(tuple(decode), tuple(sorted(ragged)))


def _ladder(first: int, factor: int, last: int) -> list[int]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return [*sizes, last]


@dataclasses.dataclass(frozen=True)
class RowSetup:
    """One row of `RowState`, for a request that needs more than `SamplingBatch` holds."""

    row: int
    output_counts: np.ndarray  # int16 [V]
    in_prompt: np.ndarray  # uint8 [V / 8]
    allowed: np.ndarray  # uint8 [V / 8]
    bias_ids: np.ndarray  # int32 [MAX_LOGIT_BIAS]
    bias: np.ndarray  # float32 [MAX_LOGIT_BIAS]
    stop_ids: np.ndarray  # int32 [MAX_STOP_IDS]
    bad_words: np.ndarray  # int32 [MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]
    recent: np.ndarray  # int32 [MAX_BAD_WORD_TOKENS - 1]


@dataclasses.dataclass(frozen=True)
class PromptSpan:
    """Packed tokens `[first, first + count)` whose targets are prompt tokens from `position` on."""

    owner: str
    first: int
    count: int
    position: int


@dataclasses.dataclass(frozen=True)
class PackedStep:
    """A step ready for the device. `owners[i]` is the request whose token is `StepOutput.tokens[i]`."""

    batch: DecodeBatch | RaggedBatch
    variant: Variant
    setups: tuple[RowSetup, ...]
    owners: tuple[tuple[int, str], ...]
    prompt_spans: tuple[PromptSpan, ...]


class Packer:
    """Fills batches. Holds per-row arrays of `max_num_seqs` rows and the dump row after them."""

    def __init__(
        self, buckets: Buckets, *, max_num_seqs: int, table_width: int, block_size: int, vocab_size: int
    ):
        self.buckets = buckets
        self.dump_row = max_num_seqs
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._tables = np.zeros((max_num_seqs + 1, table_width), np.int32)
        self._floats = np.zeros((max_num_seqs + 1, 6), np.float32)
        self._ints = np.zeros((max_num_seqs + 1, 6), np.int32)
        self._floats[self.dump_row] = _sampling_floats(SamplingParams(temperature=0))
        self._hold_until = np.zeros(max_num_seqs + 1, np.int64)
        self._variants = np.zeros(max_num_seqs + 1, np.int8)
        self._bad_words: dict[str, list[list[int]]] = {}

    def set_bad_words(self, request_id: str, words: list[list[int]]) -> None:
        """Token ids of a request's bad words, to be used when it is admitted."""
        self._bad_words[request_id] = words

    def forget(self, request_id: str) -> None:
        """Drops what was kept for a request that ended."""
        self._bad_words.pop(request_id, None)

    def pack(self, step: ScheduledStep) -> PackedStep:
        """Pads a step to the smallest bucket that holds it."""
        setups = tuple(filter(None, [self._admit(row) for row in step.admitted]))
        sequences = step.sequences
        for sequence in sequences:
            if sequence.table_blocks:
                start = sequence.table_start
                self._tables[sequence.row, start : start + len(sequence.table_blocks)] = sequence.table_blocks
        decode = self.buckets.decode and all(s.token_ids is None for s in sequences)
        if decode:  # neighbours of like length share the attention's loop over their contexts
            sequences = tuple(sorted(sequences, key=lambda sequence: sequence.start))
        batch = self._decode_batch(sequences) if decode else self._ragged_batch(sequences)
        sampled = [s.row for s in sequences if s.samples]
        variant = Variant(self._variants[sampled].max(initial=Variant.GREEDY))
        spans = _prompt_spans(sequences)
        if spans:
            variant = Variant.PROMPT
        owners = tuple((i, s.request_id) for i, s in enumerate(sequences) if s.samples)
        return PackedStep(batch, variant, setups, owners, spans)

    def padding_batch(self) -> DecodeBatch | RaggedBatch:
        """A batch of the smallest bucket in which every row is padding."""
        return self._decode_batch(()) if self.buckets.decode else self._ragged_batch(())

    def padding_setup(self) -> RowSetup:
        """Values for the dump row."""
        nothing = AdmittedRow(self.dump_row, "", SamplingParams(), 0, 0, (), (), 0)
        return self._row_setup(nothing)

    # -- rows ---------------------------------------------------------------------------------

    def _admit(self, admitted: AdmittedRow) -> RowSetup | None:
        row, params = admitted.row, admitted.params
        self._tables[row] = 0
        flags = _flags(params)
        self._floats[row] = _sampling_floats(params)
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        high, low = np.uint64(admitted.seed) >> np.uint64(32), admitted.seed & 0xFFFFFFFF
        seed = np.array([high, low], np.uint32).view(np.int32)
        self._ints[row] = (top_k, *seed, admitted.choice, 0, flags)
        self._hold_until[row] = admitted.num_prompt_tokens + params.min_tokens
        needs_row = bool(flags) or params.min_tokens > 0
        if needs_row or params.logprobs is not None or params.prompt_logprobs is not None:
            self._variants[row] = Variant.FULL
        else:
            self._variants[row] = Variant.GREEDY if params.greedy else Variant.SAMPLED
        return self._row_setup(admitted) if needs_row else None

    def _row_setup(self, admitted: AdmittedRow) -> RowSetup:
        params, size = admitted.params, self._vocab_size
        prompt = np.array(admitted.token_ids[: admitted.num_prompt_tokens], np.int64)
        output = np.array(admitted.token_ids[admitted.num_prompt_tokens :], np.int64)
        allowed = np.array(params.allowed_token_ids or (), np.int64)
        bias = params.logit_bias or {}
        words = self._bad_words.get(admitted.request_id, [])
        bad_words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
        for line, word in zip(bad_words, words, strict=False):
            line[-len(word) :] = word
        recent = np.full(MAX_BAD_WORD_TOKENS - 1, -2, np.int32)  # matches nothing
        tail = output[-len(recent) :]
        recent[len(recent) - len(tail) :] = tail
        return RowSetup(
            row=admitted.row,
            output_counts=np.bincount(output, minlength=size).astype(np.int16),
            in_prompt=_bit_set(prompt, size),
            allowed=_bit_set(allowed, size),
            bias_ids=_padded(list(bias), MAX_LOGIT_BIAS, size, np.int32),
            bias=_padded(list(bias.values()), MAX_LOGIT_BIAS, 0, np.float32),
            stop_ids=_padded(list(admitted.stop_ids), MAX_STOP_IDS, size, np.int32),
            bad_words=bad_words,
            recent=recent,
        )

    def _sampling(self, rows: np.ndarray, positions: np.ndarray) -> SamplingBatch:
        """Values of `rows` [S], each about to draw the token at `positions` [S]."""
        ints = self._ints[rows]
        ints[:, 4] = positions
        ints[:, 5] |= np.where(positions < self._hold_until[rows], FLAG_HOLD_STOP, 0)
        return SamplingBatch(floats=self._floats[rows], ints=ints)

    # -- batches ------------------------------------------------------------------------------

    def _decode_batch(self, sequences: tuple[ScheduledSequence, ...]) -> DecodeBatch:
        size, count = self.buckets.for_decode(len(sequences)), len(sequences)
        rows = np.full(size, self.dump_row, np.int32)
        rows[:count] = [s.row for s in sequences]
        positions = np.zeros(size, np.int32)
        positions[:count] = [s.start for s in sequences]
        tables = self._tables[rows]
        slots = self._slots(tables[np.arange(size), positions // self._block_size], positions)
        context_lens = positions + 1
        slots[count:] = context_lens[count:] = 0
        return DecodeBatch(
            rows=rows,
            slots=slots,
            context_lens=context_lens,
            tables=tables,
            sampling=self._sampling(rows, context_lens),
        )

    def _ragged_batch(self, sequences: tuple[ScheduledSequence, ...]) -> RaggedBatch:
        count = len(sequences)
        lens = np.array([s.num_tokens for s in sequences], np.int32)
        total = int(lens.sum())
        num_tokens, num_seqs = self.buckets.for_ragged(total, count)
        seq_rows = np.full(num_seqs, self.dump_row, np.int32)
        seq_rows[:count] = [s.row for s in sequences]
        starts = np.array([s.start for s in sequences], np.int32)
        query_start = np.full(num_seqs + 1, total, np.int32)
        query_start[0] = 0
        query_start[1 : count + 1] = np.cumsum(lens)
        context_lens = np.zeros(num_seqs, np.int32)
        context_lens[:count] = starts + lens

        owner = np.repeat(np.arange(count), lens)  # [total]
        positions = np.zeros(num_tokens, np.int32)
        positions[:total] = np.arange(total) - query_start[owner] + starts[owner]
        tables = self._tables[seq_rows]
        slots = np.zeros(num_tokens, np.int32)
        slots[:total] = self._slots(tables[owner, positions[:total] // self._block_size], positions[:total])
        token_ids = np.zeros(num_tokens, np.int32)
        token_ids[:total] = [token for s in sequences for token in s.token_ids or (FROM_DEVICE,)]
        token_rows = np.full(num_tokens, self.dump_row, np.int32)
        token_rows[:total] = seq_rows[owner]
        targets = np.zeros(num_tokens, np.int32)
        for sequence, first in zip(sequences, query_start.tolist(), strict=False):
            if sequence.prompt_targets:
                targets[first : first + len(sequence.prompt_targets)] = sequence.prompt_targets
        rows = seq_rows.copy()
        rows[:count][[not s.samples for s in sequences]] = self.dump_row
        sampled = np.zeros(num_seqs, np.int32)
        sampled[:count] = query_start[1 : count + 1] - 1
        return RaggedBatch(
            token_ids=token_ids,
            token_rows=token_rows,
            positions=positions,
            slots=slots,
            query_start=query_start,
            context_lens=context_lens,
            tables=tables,
            rows=rows,
            sampled=sampled,
            targets=targets,
            sampling=self._sampling(rows, context_lens),
        )

    def _slots(self, blocks: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return blocks * self._block_size + positions % self._block_size


def _prompt_spans(sequences: tuple[ScheduledSequence, ...]) -> tuple[PromptSpan, ...]:
    spans, first = [], 0
    for sequence in sequences:
        if sequence.prompt_targets:
            count = len(sequence.prompt_targets)
            spans.append(PromptSpan(sequence.request_id, first, count, sequence.start + 1))
        first += sequence.num_tokens
    return tuple(spans)


def _flags(params: SamplingParams) -> int:
    flags = FLAG_ALLOWED if params.allowed_token_ids is not None else 0
    flags |= FLAG_EXTRAS if params.logit_bias or params.bad_words else 0
    flags |= FLAG_PENALTIES if params.needs_counts else 0
    return flags


def _sampling_floats(params: SamplingParams) -> tuple[float, ...]:
    return (
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )


def _bit_set(ids: np.ndarray, size: int) -> np.ndarray:
    present = np.zeros(size, np.bool_)
    present[ids] = True
    return np.packbits(present, bitorder="little")


def _padded(values: list, size: int, fill: int, dtype: type) -> np.ndarray:
    array: np.ndarray = np.full(size, fill, dtype)
    array[: len(values)] = values
    return array
