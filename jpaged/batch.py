"""What a step takes and gives: pytrees of arrays, shapes only. Packing fills them.

The last row of every per-row array is the dump row: padding reads and writes it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct

from jpaged.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
)

MAX_STOP_IDS = MAX_STOP_TOKEN_IDS + 32  # a request's own stop ids and the model's end-of-sequence ids
Array = Any  # a numpy array where packing fills a batch, a jax.Array inside a step

FROM_DEVICE = -1  # a token id that is still on the device: RowState.last_token of its row
NON_FINITE = -1  # instead of a sampled token: its logits held NaN or an infinity
NO_CANDIDATE = -2  # instead of a sampled token: every token was masked


@struct.dataclass
class SamplingBatch:
    """Sampling values of the S sequences of a step, packed into two arrays to save transfers.

    `floats` [S, 6] and `ints` [S, 6] hold, in the order of the properties below, one column each.
    """

    floats: Array
    ints: Array

    @property
    def temperature(self) -> Array:
        """0 is greedy."""
        return self.floats[:, 0]

    @property
    def top_p(self) -> Array:
        return self.floats[:, 1]

    @property
    def min_p(self) -> Array:
        return self.floats[:, 2]

    @property
    def repetition_penalty(self) -> Array:
        return self.floats[:, 3]

    @property
    def frequency_penalty(self) -> Array:
        return self.floats[:, 4]

    @property
    def presence_penalty(self) -> Array:
        return self.floats[:, 5]

    @property
    def top_k(self) -> Array:
        """V where it is off."""
        return self.ints[:, 0]

    @property
    def seed(self) -> Array:
        """int32 [S, 2]: the two halves of the request's seed."""
        return self.ints[:, 1:3]

    @property
    def choice(self) -> Array:
        """Which of the request's `n` completions this is."""
        return self.ints[:, 3]

    @property
    def position(self) -> Array:
        """Position of the token that is drawn."""
        return self.ints[:, 4]

    @property
    def flags(self) -> Array:
        """Bits: see FLAG_*."""
        return self.ints[:, 5]


FLAG_HOLD_STOP = 1  # min_tokens is not reached: the row's stop ids are masked
FLAG_ALLOWED = 2  # the row's allowed-token mask applies
FLAG_EXTRAS = 4  # the row's bias and bad words apply
FLAG_PENALTIES = 8  # the row's token counts are kept and used


@struct.dataclass
class DecodeBatch:
    """One token of each of S sequences, its id in `RowState.last_token`."""

    rows: Array  # int32 [S]
    slots: Array  # int32 [S]
    context_lens: Array  # int32 [S], this token included; 0 is padding
    tables: Array  # int32 [S, M]
    sampling: SamplingBatch


@struct.dataclass
class RaggedBatch:
    """T packed tokens of S sequences in any mix of chunk lengths."""

    token_ids: Array  # int32 [T], or FROM_DEVICE
    token_rows: Array  # int32 [T]
    positions: Array  # int32 [T]
    slots: Array  # int32 [T]
    query_start: Array  # int32 [S + 1]
    context_lens: Array  # int32 [S], this step's tokens included
    tables: Array  # int32 [S, M]
    rows: Array  # int32 [S]: the dump row unless a token is sampled
    sampled: Array  # int32 [S]: packed index of the token whose logits are sampled
    targets: Array  # int32 [T]: next prompt token, whose log-probability may be asked for
    sampling: SamplingBatch


@struct.dataclass
class RowState:
    """What lasts longer than a step, by row; R = max_num_seqs + 1 rows, the last the dump row."""

    last_token: Array  # int32 [R]
    output_counts: Array  # int16 [R, V]: how often each id was generated
    in_prompt: Array  # uint8 [R, V / 8]: bit set of the prompt's ids
    allowed: Array  # uint8 [R, V / 8]: bit set of the ids that may be drawn
    bias_ids: Array  # int32 [R, MAX_LOGIT_BIAS], V where unused
    bias: Array  # float32 [R, MAX_LOGIT_BIAS]
    stop_ids: Array  # int32 [R, MAX_STOP_IDS], V where unused
    bad_words: Array  # int32 [R, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS], right-aligned, -1 where unused
    recent: Array  # int32 [R, MAX_BAD_WORD_TOKENS - 1]: last generated ids, newest last


def init_row_state(max_num_seqs: int, vocab_size: int) -> RowState:
    """The state of `max_num_seqs` rows and the dump row."""
    rows = max_num_seqs + 1
    bits = -(-vocab_size // 8)
    return RowState(
        last_token=jnp.zeros(rows, jnp.int32),
        output_counts=jnp.zeros((rows, vocab_size), jnp.int16),
        in_prompt=jnp.zeros((rows, bits), jnp.uint8),
        allowed=jnp.zeros((rows, bits), jnp.uint8),
        bias_ids=jnp.full((rows, MAX_LOGIT_BIAS), vocab_size, jnp.int32),
        bias=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
        stop_ids=jnp.full((rows, MAX_STOP_IDS), vocab_size, jnp.int32),
        bad_words=jnp.full((rows, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, jnp.int32),
        recent=jnp.full((rows, MAX_BAD_WORD_TOKENS - 1), -2, jnp.int32),
    )


@struct.dataclass
class Logprobs:
    """Log-probabilities of X tokens under the raw distribution."""

    logprob: Array  # float32 [X], of the token itself
    rank: Array  # int32 [X], 1 is the most probable
    top_ids: Array  # int32 [X, MAX_LOGPROBS]
    top_logprobs: Array  # float32 [X, MAX_LOGPROBS]


@struct.dataclass
class StepOutput:
    """What a step hands to the host."""

    tokens: Array  # int32 [S]; NON_FINITE where the logits were not finite
    logprobs: Logprobs | None  # of the sampled tokens
    prompt_logprobs: Logprobs | None  # of `RaggedBatch.targets`
