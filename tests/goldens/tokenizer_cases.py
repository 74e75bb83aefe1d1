"""Texts and small vocabularies on which tokenizers are compared with transformers'."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

STRINGS = [
    "",
    " ",
    "Hello, world!",
    "hello hello  hello   hello",
    " leading and trailing ",
    "The quick brown fox's tail; it's HERE, I'LL say, we've DON'T",
    "0 1 12 123 1234 12345 123456",
    "x=3.14159, y=-2e10, 50%",
    "１２３ ² ½ Ⅷ ٣",
    "a1b22c333",
    "Straße, naïve café, Ünïcödé",
    "e\u0301 cafe\u0301 n\u0303 combining a\u0300\u0301\u0302",
    "日本語のテキスト、中文文本。한국어 문장",
    "Русский текст и ελληνικά",
    "العربية עברית हिन्दी ไทย",
    "🙂 👩‍👩‍👧‍👦 🇫🇷 👍🏽",
    "line one\nline two\n\nline four\r\nwindows\n",
    "\n",
    "\n\n\n",
    "   ",
    "\t\ttabs\tand \t mixed",
    "trailing blanks   \n   leading blanks",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    'for (int i = 0; i < n; ++i) { printf("%d\\n", a[i]); }',
    "https://example.org/a/b?c=d&e=f#g user@example.org",
    "!!!???...---///\\\\ /\n //\n",
    "<|im_start|>user\nhello<|im_end|>\n",
    "a<|im_end|>b <|im_end|> c",
    "<|im_start|><|im_start|>",
    "<s>hello</s> <unk>",
    "text with <think>thoughts</think> inside",
    "end!\n// comment\n",
    "CamelCaseAndHTTPServer snake_case_name kebab-case",
    "\u00a0no-break\u2003em\u3000ideographic\u200bzero width",
    "\x00\x01\x1f control",
    "ab" * 40,
]
"""Mixed texts. A run of blanks or line breaks before a digit is left to `DIGITS_AFTER_BLANKS`."""

DIGITS_AFTER_BLANKS = ["a  1", "x   42", "list:\n\n1. one\n2. two"]
"""Where GPT-2's split, which transformers takes for `smollm`, differs from llama.cpp's."""

WORDS = (
    "hello world the quick brown fox it's I'LL we've DON'T HERE return class text line user and "
    "café naïve Straße 日本語 中文 Русский العربية 한국어 CamelCase HTTPServer Case Server one two 🙂"
).split()
RUNS = (
    "12",
    "123",
    "1234",
    "  ",
    "   ",
    "    ",
    "\n\n",
    "\n ",
    "\t\t",
    "!!",
    "//",
    "\n//",
    "/\n",
    "' s",
    "...",
    " (",
)
SPECIAL = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4, "</think>": 4}
"""Token -> its `tokenizer.ggml.token_type`."""

BYTE_LEVEL = ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken")


def byte_level_metadata(pre: str) -> dict[str, Any]:
    """A byte-level vocabulary whose merges make one token of each of `WORDS` and `RUNS`."""
    spelling = bytes_to_unicode()
    tokens = [*SPECIAL, *spelling.values()]
    types = [*SPECIAL.values(), *[1] * len(spelling)]
    texts = [*WORDS, *(" " + word for word in WORDS), *RUNS]
    merges = _train(["".join(spelling[byte] for byte in text.encode()) for text in texts])
    found = list(dict.fromkeys(left + right for left, right in merges))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + found,
        "tokenizer.ggml.token_type": types + [1] * len(found),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": pre == "llama-bpe",
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }


def _train(pieces: list[str]) -> list[tuple[str, str]]:
    """Byte pair encoding: merges the most frequent pair, the first seen of several, to the end."""
    words, merges = [list(piece) for piece in pieces], []
    while counts := Counter(pair for word in words for pair in itertools.pairwise(word)):
        left, right = best = max(counts, key=counts.__getitem__)
        merges.append(best)
        for word in words:
            for at in range(len(word) - 2, -1, -1):
                if word[at : at + 2] == [left, right]:
                    word[at : at + 2] = [left + right]
    return merges


def sentencepiece_metadata() -> dict[str, Any]:
    """A sentencepiece vocabulary: scores, no merges, and bytes for what it does not know."""
    texts = [*("▁" + word for word in WORDS), *WORDS, "▁▁", "▁▁▁▁", "12", "345"]
    singles = dict.fromkeys(character for text in texts for character in text)
    pieces = dict.fromkeys(text[:end] for text in texts for end in range(2, len(text) + 1))
    pieces |= dict.fromkeys(text[-2:] for text in texts)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<think>"]
    types = [2, 3, 3, *[6] * 256, 4]
    normal = [*pieces, *(one for one in singles if one not in pieces)]
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(normal))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + normal,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types + [1] * len(normal),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def cases() -> dict[str, dict[str, Any]]:
    """The small vocabularies, by name, as GGUF metadata."""
    made = {pre: byte_level_metadata(pre) for pre in BYTE_LEVEL}
    return made | {"sentencepiece": sentencepiece_metadata()}
