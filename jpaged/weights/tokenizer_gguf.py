"""The tokenizer that a GGUF file describes, rebuilt with the `tokenizers` library.

Owns the reading of `tokenizer.ggml.*` and of `tokenizer.chat_template`. The measure is the
tokenizer that transformers builds from the same file: same ids, without needing torch.

One consequence: for the names that llama.cpp splits digits off first (`smollm`, `starcoder`,
`refact`, `command-r`), transformers splits as GPT-2 does. Both agree unless two or more spaces or
line breaks stand before a digit; there the whole run is one piece for llama.cpp, while GPT-2's
split keeps its last character apart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Values of `tokenizer.ggml.token_type`, of which unknown, unused and byte are the others."""

# How a text is cut before merging, in the words of the models' own tokenizers: a contraction, a
# word with what may stand before it, some digits, punctuation with line breaks, blanks.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = None
"""The split that `ByteLevel` has built in."""
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)

SPLITS: Mapping[str, str | None] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _GPT2,
    "starcoder": _GPT2,
    "refact": _GPT2,
    "command-r": _GPT2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
"""`tokenizer.ggml.pre` -> the regular expression whose matches are the pieces."""


def build_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a GGUF file.

    Args:
      metadata: the file's metadata by key.

    Returns:
      A `PreTrainedTokenizerFast` with the file's chat template and special tokens, or `None` if the
      file describes no tokenizer.

    Raises:
      ValueError: the tokenizer's model or pre-tokenizer is not supported, or its description is
        incomplete.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "no_vocab", "none"):
        return None
    if "tokenizer.ggml.tokens" not in metadata:
        raise ValueError("the GGUF file has no tokenizer.ggml.tokens")
    if kind == "gpt2":
        backend = _byte_level(metadata)
    elif kind == "llama":
        backend = _sentencepiece(metadata)
    else:
        raise ValueError(f"tokenizer.ggml.model={kind!r} is not supported (gpt2, llama are); pass tokenizer=")
    _add_special_tokens(backend, metadata)
    # llama.cpp adds BOS to a sentencepiece vocabulary that does not say otherwise.
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    return _wrap(backend, metadata, add_bos=add_bos, add_eos=add_eos)


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE, as GPT-2 has it; families differ by the split before it."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre={name!r} is not supported (supported: {', '.join(SPLITS)}); "
            "pass tokenizer= with the model's own tokenizer"
        )
    if "tokenizer.ggml.merges" not in metadata:
        raise ValueError("the GGUF file has no tokenizer.ggml.merges")
    backend = Tokenizer(BPE(vocab=_vocab(metadata), merges=_merges(metadata)))
    split = SPLITS[name]
    if split is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    """Sentencepiece's BPE: blanks are written as U+2581, unknown characters fall back to bytes."""
    vocab = _vocab(metadata)
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata)
    else:
        merges = _merges_from_scores(metadata, vocab)
    unknown = _token(metadata, "unknown")
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(content=" ", left=1)] if prefix else []))
    return backend


def _vocab(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for merge in metadata["tokenizer.ggml.merges"]:
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    return merges


def _merges_from_scores(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merges that rebuild the vocabulary, best score first: what sentencepiece does at run time.

    Of the ways to split one piece, those whose left part is longer come first; remaining ties are
    in the order of the vocabulary.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise ValueError("the GGUF file has neither tokenizer.ggml.merges nor tokenizer.ggml.scores")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(scores)
    pieces = {token for token, index in vocab.items() if types[index] in (_NORMAL, _USER_DEFINED)}

    def splits() -> Iterator[tuple[float, str, str]]:
        for token in vocab:
            if token not in pieces:
                continue
            found = [(token[:i], token[i:]) for i in range(1, len(token))]
            found = [pair for pair in found if pair[0] in pieces and pair[1] in pieces]
            for left, right in sorted(found, key=lambda pair: (vocab[pair[0]], vocab[pair[1]])):
                yield scores[vocab[token]], left, right

    ordered = sorted(splits(), key=lambda item: (-item[0], -len(item[1]), -len(item[2])))
    return [(left, right) for _, left, right in ordered]


def _add_special_tokens(backend: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Control tokens are special; user-defined ones are matched whole but are ordinary text."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [
            AddedToken(token, normalized=False, special=special)
            for token, kind in zip(tokens, types, strict=True)
            if kind == wanted
        ]
        if special:
            backend.add_special_tokens(found)
        else:
            backend.add_tokens(found)


def _token(metadata: Mapping[str, Any], role: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{role}_token_id")
    tokens = metadata["tokenizer.ggml.tokens"]
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise ValueError(f"tokenizer.ggml.{role}_token_id={index} must be in [0, {len(tokens)})")
    return tokens[index]


def _wrap(
    backend: Tokenizer, metadata: Mapping[str, Any], *, add_bos: bool, add_eos: bool
) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{name}_token": _token(metadata, role) for name, role in roles.items()}
    first = _added(special["bos_token"], "bos") if add_bos else []
    last = _added(special["eos_token"], "eos") if add_eos else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *first, "$B", *last],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*first, *last}],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        add_bos_token=add_bos,
        add_eos_token=add_eos,
        **special,
    )


def _added(token: str | None, name: str) -> list[str]:
    if token is None:
        raise ValueError(f"tokenizer.ggml.add_{name}_token is true, but there is no {name}_token_id")
    return [token]
