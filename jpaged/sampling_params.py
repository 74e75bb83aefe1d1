"""How one request is sampled and when it ends: values only, validated when they are made.

Owns the names, defaults and limits of the sampling options. Knows no tokenizer and no device: what
needs the vocabulary is checked by `SamplingParams.validate_vocab`, what needs the tokenizer
(`bad_words`) by the engine.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jpaged.config import check_int

# Limits that the device arrays, of one row per running sequence, are sized by.
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 8  # per bad word, checked against the tokenizer by the engine

MAX_N = 1024
MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 1e6
MIN_TEMPERATURE = 1e-5  # smaller ones would overflow float32 logits; they are greedy for any purpose
MIN_TOP_P = 1e-6  # a smaller one keeps only the most probable token too, and might vanish in float32
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
MAX_PENALTY = 2.0
MAX_BIAS = 100.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request; a wrong one raises `ValueError` here, before any work is done.

    How the next token is chosen from the logits, in this order:

    1. `allowed_token_ids`, `bad_words` and `min_tokens` mask logits; `logit_bias` is added to the rest.
    2. Penalties: `repetition_penalty`, over prompt and output, divides positive logits and
       multiplies negative ones; then `frequency_penalty` (times the count) and `presence_penalty`
       (once) are subtracted, both over the output only.
    3. `temperature` divides. At 0 the choice is the argmax of step 2, and the steps below are skipped.
    4. `min_p` drops tokens less probable than `min_p` times the most probable one.
    5. `top_k` keeps the most probable of what is left.
    6. `top_p` keeps the smallest set, of what is left and renormalized, whose probability reaches it.

    Tokens that tie at a threshold are all kept. Reported logprobs are of the model's own
    distribution, before step 1.

    Sequences are stored as tuples, and ids and numbers as plain `int` and `float` (numpy scalars
    are accepted). Instances are hashable; `logit_bias` takes part in equality but not in the hash.

    Attributes:
      n: completions per prompt. Greedy ones are all equal.
      temperature: 0 is greedy; a value in (0, 1e-5) is stored as 0.
      top_k: 0 or -1 (stored as 0) is off; so is a value from the vocabulary size upwards.
      top_p: in (0, 1]; 1 is off; values below 1e-6 are stored as 1e-6.
      min_p: in [0, 1]; 0 is off.
      seed: in [0, 2**63). `None` takes one from the engine's seed and the order of arrival.
      max_tokens: most output tokens. `None` is until the context ends. 0 gives an empty
        completion, which is useful with `prompt_logprobs`.
      min_tokens: no end-of-sequence or stop id is sampled, and no stop string counts, before this
        many output tokens exist. A stop string must begin after the text of those tokens.
      stop: strings that end the output; the text is cut before the earliest match.
      stop_token_ids: ids that end the output, besides the model's end-of-sequence ids.
      include_stop_str_in_output: cut after the stop string instead of before it.
      ignore_eos: treat end-of-sequence ids as any other id.
      presence_penalty: in [-2, 2], 0 is off.
      frequency_penalty: in [-2, 2], 0 is off.
      repetition_penalty: in [1e-6, 1e6], 1 is off.
      logit_bias: token id to a value in [-100, 100] that is added to its logit.
      allowed_token_ids: only these can be sampled; `None` allows all.
      bad_words: strings whose token sequences are never completed.
      logprobs: how many most probable alternatives to report for each output token, besides the
        token itself; `None` reports nothing.
      prompt_logprobs: the same for each prompt token but the first.
      detokenize: whether the outputs have text at all.
      skip_special_tokens: leave special tokens out of the text.

    Raises:
      ValueError: names the field, the value and the limit.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check_ints()
        self._check_floats()
        self._check_flags()
        self._check_collections()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs detokenize=True: without text nothing can match")

    @property
    def greedy(self) -> bool:
        """Whether the choice is the argmax, so that no random number is drawn."""
        return self.temperature == 0.0

    @property
    def needs_counts(self) -> bool:
        """Whether any penalty changes the logits, so that token counts are needed."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    def validate_vocab(self, vocab_size: int) -> None:
        """Checks every token id against the model's vocabulary: rows of its embedding.

        Raises:
          ValueError: an id is not in [0, vocab_size); the message names field, value and limit.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name}: token id {token_id} must be in [0, {vocab_size})")

    def _check_ints(self) -> None:
        self._int("n", low=1, high=MAX_N)
        self._int("top_k", low=-1)
        self._set("top_k", max(self.top_k, 0))
        self._int("min_tokens", low=0)
        self._int("seed", low=0, high=MAX_SEED, optional=True)
        self._int("max_tokens", low=0, optional=True)
        self._int("logprobs", low=0, high=MAX_LOGPROBS, optional=True)
        self._int("prompt_logprobs", low=0, high=MAX_LOGPROBS, optional=True)

    def _check_floats(self) -> None:
        self._float("temperature", 0.0, MAX_TEMPERATURE)
        if self.temperature < MIN_TEMPERATURE:
            self._set("temperature", 0.0)
        if self.top_p == 0:
            raise ValueError(f"top_p={self.top_p} must be above 0")
        self._float("top_p", 0.0, 1.0)
        self._set("top_p", max(self.top_p, MIN_TOP_P))
        self._float("min_p", 0.0, 1.0)
        self._float("presence_penalty", -MAX_PENALTY, MAX_PENALTY)
        self._float("frequency_penalty", -MAX_PENALTY, MAX_PENALTY)
        self._float("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)

    def _check_flags(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")

    def _check_collections(self) -> None:
        self._set("stop", _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        self._set("bad_words", _strings("bad_words", self.bad_words))
        _check_count("bad_words", self.bad_words, MAX_BAD_WORDS)
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        _check_count("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids=() must have at least 1 token id; None allows all")
        if self.logit_bias is not None:
            self._set("logit_bias", _logit_bias(self.logit_bias))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _int(self, name: str, *, low: int, high: int | None = None, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        plain = _plain_int(value)
        check_int(name, plain, low=low, high=high)
        if plain is not value:
            self._set(name, plain)

    def _float(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        checked = _checked_float(name, value, low, high)
        if checked is not value:
            self._set(name, checked)


def _plain_int(value: Any) -> Any:
    """A plain `int` for any integer type but bool; anything else unchanged, for `check_int` to refuse."""
    if type(value) is not int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return value


def _checked_float(name: str, value: Any, low: float, high: float) -> float:
    is_number = type(value) is float or (isinstance(value, numbers.Real) and not isinstance(value, bool))
    if not is_number:
        raise ValueError(f"{name}={value!r} must be a number")
    if not low <= value <= high:  # NaN and infinities fail too
        raise ValueError(f"{name}={value} must be a finite number in [{low:g}, {high:g}]")
    return float(value)


def _items(name: str, values: Any) -> Iterable[Any]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r} must be a list")
    return values


def _strings(name: str, values: Any) -> tuple[str, ...]:
    strings = tuple(_items(name, values))
    for value in strings:
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} has {value!r}; every entry must be a string of at least 1 character")
    return tuple(dict.fromkeys(strings))


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    ids = tuple(_plain_int(value) for value in _items(name, values))
    for token_id in ids:
        check_int(name, token_id, low=0)
    return tuple(dict.fromkeys(ids))


def _check_count(name: str, values: Sequence[Any] | Mapping[Any, Any], limit: int) -> None:
    if len(values) > limit:
        raise ValueError(f"{name} has {len(values)} entries, must have at most {limit}")


def _logit_bias(values: Any) -> dict[int, float] | None:
    if not isinstance(values, Mapping):
        raise ValueError(f"logit_bias={values!r} must be a mapping from token id to bias")
    _check_count("logit_bias", values, MAX_LOGIT_BIAS)
    bias = {}
    for key, value in values.items():
        token_id = _plain_int(key)
        check_int("logit_bias", token_id, low=0)
        bias[token_id] = _checked_float(f"logit_bias[{token_id}]", value, -MAX_BIAS, MAX_BIAS)
    return bias or None
