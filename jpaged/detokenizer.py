"""Text from token ids, as they come: what is safe to send now, and where a stop string ends it.

Owns the text of one output: decoding in the context of the prompt, characters that span tokens, stop
strings and the text held back for them. Knows nothing of requests, end-of-sequence ids or lengths.

Why this is not one `decode` per token: what a token reads as depends on its neighbours. Bytes of one
character may come in several tokens, a sentencepiece space disappears at the start of a text, and a
run of `<0xNN>` tokens reads as characters only if the whole run is valid UTF-8. So a short window of
ids, beginning in text that is already out, is decoded each time, and only what no later token can
change leaves it.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

REPLACEMENT = "\ufffd"
MAX_RUN_BYTES = 256

_KEEP = 8  # ids of context; at least 4, for an unfinished character may begin 3 ids back
_PROMPT_TAIL = 4 * _KEEP
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# What an id is to the window: 0 to 255 is a `<0xNN>` token of that byte.
_PLAIN = -1
_INVISIBLE = -2


@dataclasses.dataclass(frozen=True, slots=True)
class TextUpdate:
    """What an update brought.

    Attributes:
      delta: text to send; never taken back, and never a part of a stop string that is left out.
      stop: the stop string that ended the text, if one did.
      num_tokens: how many of the given ids were used; fewer than given only after a stop.
    """

    delta: str
    stop: str | None = None
    num_tokens: int = 0


class TokenDecoder:
    """A tokenizer's `decode` without embellishments, and what is remembered of its ids.

    Share one among all outputs of an engine. Tokens must not be added to the tokenizer afterwards.

    Args:
      tokenizer: has `decode(ids, skip_special_tokens=...)`, and `convert_ids_to_tokens(id)` where
        byte tokens of the form `<0xNN>` are to be found. Ids it does not know must decode to nothing.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._decode, self._options = _plain_decode(tokenizer)
        self._kinds: dict[bool, dict[int, int]] = {False: {}, True: {}}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of `token_ids`, with no spaces added or cleaned up."""
        return self._decode(token_ids, skip_special_tokens=skip_special_tokens, **self._options)

    def kind(self, token_id: int, *, skip_special_tokens: bool) -> int:
        """The byte of a `<0xNN>` token, or `_PLAIN`, or `_INVISIBLE` for an id that is never any text."""
        kinds = self._kinds[skip_special_tokens]
        kind = kinds.get(token_id)
        if kind is None:
            kind = kinds[token_id] = self._find_kind(token_id, skip_special_tokens)
        return kind

    def _find_kind(self, token_id: int, skip_special_tokens: bool) -> int:
        # Several times, because a space may vanish when it comes first.
        if not self.decode([token_id] * 4, skip_special_tokens=skip_special_tokens):
            return _INVISIBLE
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        token = convert(token_id) if convert is not None else None
        match = _BYTE_TOKEN.fullmatch(token) if isinstance(token, str) else None
        if match and self.decode([token_id], skip_special_tokens=skip_special_tokens) != token:
            return int(match[1], 16)
        return _PLAIN


class StopFilter:
    """Lets text through up to a stop string: the one complete first; of those complete at once, the longest.

    Looks at each character once, so how the text is cut into pieces changes nothing.

    Attributes:
      held: text that is not let through yet, because it may become a stop string.
      matched: the stop string that was found; after that nothing passes.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str: bool = False):
        self.held = ""
        self.matched: str | None = None
        self._stop = tuple(stop)
        self._include_stop_str = include_stop_str
        self._fallbacks = [_fallbacks(string) for string in self._stop]
        self._lengths = [0] * len(self._stop)  # of each string, how much the text so far ends with

    def copy(self) -> StopFilter:
        """A filter in the same state that goes on by itself."""
        other = copy.copy(self)
        other._lengths = list(self._lengths)
        return other

    def feed(self, text: str) -> str:
        """Goes on with `text`; returns what passes now."""
        if self.matched is not None:
            return ""
        end = self._find(text)
        text, end = self.held + text, len(self.held) + end
        if self.matched is not None:
            self.held = ""
            return text[: end if self._include_stop_str else end - len(self.matched)]
        held = 0 if self._include_stop_str else max(self._lengths, default=0)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]

    def _find(self, text: str) -> int:
        """Sets `matched`; returns where in `text` the match ends, or 0."""
        for position, char in enumerate(text):
            for index, string in enumerate(self._stop):
                if self._advance(index, char) and len(string) > len(self.matched or ""):
                    self.matched = string
            if self.matched is not None:
                return position + 1
        return 0

    def _advance(self, index: int, char: str) -> bool:
        string, length = self._stop[index], self._lengths[index]
        while length and string[length] != char:
            length = self._fallbacks[index][length - 1]
        length += string[length] == char
        if length == len(string):
            return True
        self._lengths[index] = length
        return False


class IncrementalDetokenizer:
    """The text of one output, from the ids as they are known.

    The text is the part of `decode(prompt + output)` after its longest common prefix with
    `decode(prompt)`: an output that continues a word has no space before it, one that begins a word
    has. Of a prompt that ends inside a character, that character belongs to the output if the output
    completes it. The deltas joined are that text, cut at the stop string if there was one. One
    exception: a run of more than `MAX_RUN_BYTES` `<0xNN>` tokens that turns invalid does not take
    back the characters it made before.

    Held back: a character that is not complete; the characters of a run of `<0xNN>` tokens until the
    run ends or is known to be invalid; and, unless `include_stop_str`, text that may still become a
    stop string. `finish` releases what is left.

    The stop string that is complete first ends the text, the longest of those complete with the same
    character. It must begin in text that was complete only after the first `min_tokens` ids.

    Each id is decoded a bounded number of times.

    Args:
      tokenizer: a tokenizer, or the `TokenDecoder` that several outputs share.
      prompt_token_ids: the context; only its end is looked at.
      skip_special_tokens: leave special tokens out.
      stop: strings that end the text.
      include_stop_str: whether the text ends after the stop string instead of before it.
      min_tokens: ids before which no stop string counts.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
    ):
        self._decoder = tokenizer if isinstance(tokenizer, TokenDecoder) else TokenDecoder(tokenizer)
        self._window = _Window(self._decoder, skip_special_tokens, prompt_token_ids)
        self._filter = StopFilter(stop, include_stop_str=include_stop_str) if stop else None
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._exempt = 0  # characters still to come from the first `min_tokens` ids
        self._pieces: list[str] = []
        self._finished = False

    @property
    def text(self) -> str:
        """All deltas so far, joined."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._filter.matched if self._filter else None

    def append(self, token_ids: Sequence[int]) -> TextUpdate:
        """Takes the next ids of the output; an id whose text is not wanted must not be given.

        The result is the same however the ids are cut into calls. Ids after a stop are not used.

        Raises:
          RuntimeError: after `finish`.
        """
        if self._finished:
            raise RuntimeError("append after finish")
        if self._filter is None:
            self._num_tokens += len(token_ids)
            return self._update(self._window.push(token_ids), len(token_ids))
        deltas = []
        for token_id in token_ids:
            if self.stop is not None:
                break
            deltas.append(self._append_one(token_id))
        return self._update("".join(deltas), len(deltas))

    def finish(self) -> TextUpdate:
        """Releases what is held: no more ids will come. Stop strings count here too."""
        if self._finished or self.stop is not None:
            self._finished = True
            return self._update("", 0)
        self._finished = True
        delta = self._window.flush()
        if self._filter is not None and self._num_tokens >= self._min_tokens:
            delta = self._pass(self._filter, delta) + self._filter.held
        return self._update(delta, 0)

    def _update(self, delta: str, num_tokens: int) -> TextUpdate:
        if delta:
            self._pieces.append(delta)
        return TextUpdate(delta, self.stop, num_tokens)

    def _append_one(self, token_id: int) -> str:
        assert self._filter is not None
        new = self._window.push((token_id,))
        self._num_tokens += 1
        if self._num_tokens <= self._min_tokens:
            self._exempt = len(self._window.open_text()) if self._num_tokens == self._min_tokens else 0
            return new
        delta = self._pass(self._filter, new)
        self._exempt = max(0, self._exempt - len(new))
        # A stop string in an open run ends the run too, so nothing can invalidate its text any more.
        open_text = self._window.open_text()
        if open_text and self.stop is None:
            trial = self._filter.copy()
            more = self._pass(trial, open_text)
            if trial.matched is not None:
                self._filter = trial
                return delta + more
        return delta

    def _pass(self, stop_filter: StopFilter, text: str) -> str:
        return text[: self._exempt] + stop_filter.feed(text[self._exempt :])


class _Window:
    """The last ids, and how much of their text has left.

    `_taken` counts the characters of `decode(_ids)` that have left. Ids that are never any text are
    not kept. `_run` holds the bytes of the run of `<0xNN>` tokens at the end, if it is open and may
    still become valid; `_broken` holds the few ids that prove the open run invalid.
    """

    def __init__(self, decoder: TokenDecoder, skip_special_tokens: bool, prompt_token_ids: Sequence[int]):
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._taken = 0
        self._run = bytearray()
        self._broken: list[int] = []
        self._trim_at = 2 * _KEEP
        self._prompt_rest: tuple[str, ...] = ()
        self.push(self._prompt_tail(prompt_token_ids))
        # What is not settled of the prompt's text: as it reads now, and without an unfinished character.
        self._prompt_rest = (self._decode(self._ids)[self._taken :], self.open_text())

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes ids; returns the text that no later id can change."""
        settled = []
        changed = False
        for token_id in token_ids:
            kind = self._kind(token_id)
            if kind != _INVISIBLE:
                self._add(int(token_id), kind)
                changed = True
                if len(self._run) >= MAX_RUN_BYTES and not _utf8_error(self._run):
                    settled.append(self._settle_long_run())
        if changed:
            settled.append(self._settle())
        return "".join(settled)

    def open_text(self) -> str:
        """Text, not yet settled, of the complete characters in the open run."""
        if not self._run:
            return ""
        error = _utf8_error(self._run)
        end = len(self._ids) - (len(self._run) - error.start if error else 0)
        return self._without_prompt(self._decode(self._ids[:end])[self._taken :])

    def flush(self) -> str:
        """All text that is left."""
        text = self._decode(self._ids)
        return self._take(text, len(text))

    def _kind(self, token_id: int) -> int:
        return self._decoder.kind(token_id, skip_special_tokens=self._skip)

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip) if token_ids else ""

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last visible ids of the prompt, not beginning inside a run if that can be helped."""
        tail: list[int] = []
        following = _PLAIN
        for token_id in reversed(prompt_token_ids):
            kind = self._kind(token_id)
            if kind == _INVISIBLE:
                continue
            inside_run = kind >= 0 and following >= 0
            if len(tail) >= _PROMPT_TAIL + (MAX_RUN_BYTES if inside_run else 0):
                while inside_run and 0x80 <= self._kind(tail[-1]) < 0xC0:  # not inside a character either
                    tail.pop()
                break
            tail.append(token_id)
            following = kind
        return tail[::-1]

    def _add(self, token_id: int, kind: int) -> None:
        self._ids.append(token_id)
        if kind == _PLAIN:
            self._run.clear()
            self._broken.clear()
        elif not self._broken:
            self._run.append(kind)
            error = _utf8_error(self._run)
            if error and error.reason != "unexpected end of data":
                self._broken = self._ids[-(len(self._run) - error.start) :]
                self._run.clear()

    def _settle(self) -> str:
        if self._broken:  # whatever follows, every byte of the run is one replacement character
            new = self.flush()
            self._ids = list(self._broken)
            self._taken = len(self._decode(self._ids))
            return new
        text = self._decode(self._ids[: len(self._ids) - len(self._run)])
        unfinished = not self._run and text.endswith(REPLACEMENT)
        new = self._take(text, len(text) - unfinished)
        if len(self._ids) - len(self._run) >= self._trim_at:
            self._trim(text)
        return new

    def _settle_long_run(self) -> str:
        """Lets a run that is valid so far go; its last character stays as the context."""
        new = self.flush()
        last = len(self._run.decode()[-1].encode())
        del self._run[:-last]
        self._ids = self._ids[-last:]
        self._taken = len(self._decode(self._ids))
        return new

    def _take(self, text: str, end: int) -> str:
        """The characters up to `end` that have not left yet; the mark never moves backwards."""
        new = self._without_prompt(text[self._taken : end])
        if end > self._taken:
            self._taken = end
            self._prompt_rest = ()
        return new

    def _without_prompt(self, text: str) -> str:
        if not self._prompt_rest:
            return text
        return text[max(_common_length(rest, text) for rest in self._prompt_rest) :]

    def _trim(self, text: str) -> None:
        """Drops the oldest ids if what remains reads the same; `text` is that of the ids before the run.

        An unfinished character begins at most 3 ids back and so stays. One of 4 neighbouring
        places to cut is not inside a character.
        """
        end = len(self._ids) - len(self._run)
        for start in range(end - _KEEP, end - _KEEP - 4, -1):
            kept = self._decode(self._ids[start:end])
            dropped = len(text) - len(kept)
            if kept and text.endswith(kept) and dropped <= self._taken:
                self._ids = self._ids[start:]
                self._taken -= dropped
                self._trim_at = 2 * _KEEP
                return
        self._trim_at = end + _KEEP


def _plain_decode(tokenizer: Any) -> tuple[Callable[..., str], dict[str, bool]]:
    """The tokenizer's `decode` and the options that keep it from adding or removing spaces.

    Where Python code adds nothing to the decoder beneath it, that is called directly: on a few ids
    the layer above takes most of the time.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        from transformers import PreTrainedTokenizerFast

        kind = type(tokenizer)
        if all(
            getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, backend)
            for name in ("decode", "_decode")
        ):
            return backend.decode, {}
    options = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
    try:
        tokenizer.decode([], skip_special_tokens=False, **options)
    except TypeError:
        options = {}
    return tokenizer.decode, options


def _common_length(one: str, two: str) -> int:
    """Length of the longest common prefix."""
    for index, (left, right) in enumerate(zip(one, two, strict=False)):
        if left != right:
            return index
    return min(len(one), len(two))


def _utf8_error(data: bytes | bytearray) -> UnicodeDecodeError | None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error
    return None


def _fallbacks(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its end."""
    table = [0] * len(string)
    matched = 0
    for index in range(1, len(string)):
        while matched and string[index] != string[matched]:
            matched = table[matched - 1]
        matched += string[index] == string[matched]
        table[index] = matched
    return table
