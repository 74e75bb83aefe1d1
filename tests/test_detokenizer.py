"""Incremental text: equal to one-shot decoding however it is cut, and stop strings never leak."""

import json
import os.path
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jpaged.detokenizer import MAX_RUN_BYTES, IncrementalDetokenizer, StopFilter, TextUpdate, TokenDecoder

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It doesn't stop, it doesn't wait.",
    "def area(radius):\n    if radius < 0:\n\t\treturn None\n    return 3.14159 * radius ** 2\n",
    "mouse -> 鼠标, 世界你好，今天天气很好。",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "ภาษาไทย สวัสดีครับ",
    "smile 😀 family 👨‍👩‍👧‍👦 flag 🇫🇷 thumbs 👍🏽 end",
    "  leading and trailing  spaces \n\n\n",
    "",
    "a",
    "世",
    "combining e\u0301 and \ufffd itself, zero\x00byte",
]
SEEN = [TEXTS[0], TEXTS[1], "mouse the there then 世界 你好 "] * 5


def wrap(tokenizer):
    """The given tokenizer with special and ordinary added tokens, as transformers presents it."""
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>")


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SEEN, trainer)
    return wrap(tokenizer)


def sentencepiece(decoder):
    """BPE over `▁` with byte fallback: characters that training has not seen become `<0xNN>` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=130, show_progress=False)
    tokenizer.train_from_iterator(SEEN[:1] * 5 + ["mouse the 世 a dog " * 5], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for token in model["vocab"]:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer.model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoder
    return wrap(tokenizer)


def llama():
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return sentencepiece(decoders.Sequence(steps))


def metaspace():
    return sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


TOKENIZERS = {"byte_level": byte_level(), "llama": llama(), "metaspace": metaspace()}
DECODERS = {name: TokenDecoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}


@pytest.fixture(params=list(TOKENIZERS))
def name(request):
    return request.param


def encode(name, text):
    return TOKENIZERS[name].encode(text, add_special_tokens=False)


def decode(name, ids, skip=True):
    return TOKENIZERS[name].decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def expected(name, prompt, output, skip=True):
    """What decoding everything at once adds to the prompt, in either reading of the prompt's end."""
    after = decode(name, prompt + output, skip)
    known = [token_id for token_id in prompt if decode(name, [token_id] * 4, skip)]
    readings = [known, known[: len(known) - unfinished_bytes(name, known)]]
    return after[max(len(os.path.commonprefix([decode(name, ids, skip), after])) for ids in readings) :]


def unfinished_bytes(name, ids):
    """How many byte tokens at the end are an unfinished character of a run that is otherwise valid."""
    run = b""
    for token in reversed(TOKENIZERS[name].convert_ids_to_tokens(ids)):
        if name == "byte_level" or not (len(token) == 6 and token.startswith("<0x")):
            break
        run = bytes([int(token[3:5], 16)]) + run
    try:
        run.decode()
    except UnicodeDecodeError as error:
        return len(run) - error.start if error.reason == "unexpected end of data" else 0
    return 0


def stream(name, prompt, output, *, cut=lambda: 1, skip=True, **options):
    """Deltas of `output` given in pieces of `cut()` ids, and the detokenizer."""
    detokenizer = IncrementalDetokenizer(DECODERS[name], prompt, skip_special_tokens=skip, **options)
    deltas, start = [], 0
    while start < len(output):
        size = cut()
        deltas.append(detokenizer.append(output[start : start + size]).delta)
        assert detokenizer.text == "".join(deltas)
        start += size
    deltas.append(detokenizer.finish().delta)
    assert detokenizer.text == "".join(deltas)
    return deltas, detokenizer


def byte_id(name, byte):
    return TOKENIZERS[name].convert_tokens_to_ids(f"<0x{byte:02X}>")


# ------------------------------------------------------------------------------ equal to decode


def test_the_test_tokenizers_split_characters_over_tokens():
    assert len(encode("byte_level", "😀")) == 4
    assert [TOKENIZERS["llama"].convert_ids_to_tokens(i) for i in encode("llama", "a标")] == [
        "▁a", "<0xE6>", "<0xA0>", "<0x87>",
    ]  # fmt: skip
    assert decode("metaspace", encode("metaspace", "the")) == "the"


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("cut", [1, 3, 1000])
def test_a_text_comes_back_whatever_the_prompt_and_the_pieces(name, text, cut):
    ids = encode(name, text)
    for prompt in ([], encode(name, "The answer is"), encode(name, "世"), TOKENIZERS[name].encode("<s>")):
        deltas, detokenizer = stream(name, prompt, ids, cut=lambda: cut)
        assert "".join(deltas) == expected(name, prompt, ids)
        assert detokenizer.stop is None


def test_joined_with_the_prompt_it_is_the_whole_text(name):
    for text in TEXTS:
        ids = encode(name, text)
        for split in range(len(ids) + 1):
            prompt = decode(name, ids[:split])
            if prompt.endswith("\ufffd"):
                continue
            deltas, _ = stream(name, ids[:split], ids[split:])
            assert prompt + "".join(deltas) == decode(name, ids)


def test_a_first_token_keeps_its_space_after_a_prompt_and_loses_it_at_the_start():
    for name in ("llama", "metaspace"):
        ids = encode(name, "the")
        assert TOKENIZERS[name].convert_ids_to_tokens(ids) == ["▁the"]
        assert stream(name, encode(name, "mouse"), ids)[0] == [" the", ""]
        assert stream(name, [], ids)[0] == ["the", ""]
        assert stream(name, TOKENIZERS[name].encode("<s>", add_special_tokens=False), ids)[0] == ["the", ""]


def test_an_unfinished_character_is_held_and_then_sent_whole():
    ids = encode("byte_level", "a😀b")
    assert stream("byte_level", [], ids)[0] == ["a", "", "", "", "😀", "b", ""]
    assert stream("byte_level", [], ids[:3])[0] == ["a", "", "", "\ufffd"]


def test_a_run_of_byte_tokens_is_held_until_it_ends():
    ids = encode("llama", "a标") + encode("llama", "the")
    assert stream("llama", [], ids)[0] == ["a", "", "", "", "标 the", ""]
    assert stream("llama", [], ids[:-1])[0] == ["a", "", "", "", "标"]
    assert stream("llama", [], ids[:-2])[0] == ["a", "", "", "\ufffd\ufffd"]


def test_a_run_that_turns_invalid_is_all_replacement_characters_as_in_decode():
    run = [byte_id("llama", byte) for byte in b"\xe6\xa0\x87\xff\x41"]
    assert decode("llama", run) == "\ufffd" * 5
    assert stream("llama", [], run)[0] == ["", "", "", "\ufffd" * 4, "\ufffd", ""]
    the = encode("llama", "the")
    assert "".join(stream("llama", the, run + the + run[:3])[0]) == "\ufffd" * 5 + " the标"


def test_a_very_long_valid_run_is_sent_before_it_ends():
    run = [byte_id("llama", byte) for byte in "标".encode()] * (2 * MAX_RUN_BYTES)
    for cut in (1, 7, 10**6):
        deltas, _ = stream("llama", [], run, cut=lambda cut=cut: cut)
        assert "".join(deltas) == "标" * (2 * MAX_RUN_BYTES)
    deltas, _ = stream("llama", [], run)
    assert max(map(len, deltas)) <= MAX_RUN_BYTES // 3 + 1
    # Only the characters since the last release are still open to doubt.
    broken = run[: MAX_RUN_BYTES + 2] + [byte_id("llama", 0xFF)]
    texts = {"".join(stream("llama", [], broken, cut=lambda cut=cut: cut)[0]) for cut in (1, 7, 10**6)}
    (text,) = texts
    assert text.rstrip("\ufffd") == "标" * 86 and text.endswith("\ufffd")


def test_a_prompt_that_ends_inside_a_character_leaves_it_to_the_output():
    ids = encode("byte_level", "a😀b")
    assert "".join(stream("byte_level", ids[:3], ids[3:])[0]) == "😀b"
    assert "".join(stream("byte_level", ids[:3], encode("byte_level", "b"))[0]) == "b"
    assert "".join(stream("byte_level", ids[:3], [])[0]) == ""
    ids = encode("llama", "a标标")
    assert "".join(stream("llama", ids[:2], ids[2:4])[0]) == "标"
    assert "".join(stream("llama", ids[:5], ids[5:])[0]) == "标"
    assert "".join(stream("llama", ids[:2], encode("llama", "the"))[0]) == " the"


def test_a_prompt_that_ends_in_a_newline_byte_does_not_repeat_it():
    newline = byte_id("llama", 0x0A)
    prompt = encode("llama", "the") + [newline]
    assert stream("llama", prompt, [newline] + encode("llama", "dog"))[0] == ["", "\n dog", ""]
    long_run = [byte_id("llama", byte) for byte in "标".encode()] * 200
    for prompt in (long_run, encode("llama", "the") + long_run):
        assert "".join(stream("llama", prompt, long_run[:6])[0]) == "标标"
    assert "".join(stream("llama", long_run[:-1], long_run[2:9])[0]) == "标标标"


def test_a_replacement_character_of_the_text_itself_is_not_lost():
    for name in TOKENIZERS:
        ids = encode(name, "\ufffd\ufffd a \ufffd")
        assert "".join(stream(name, encode(name, "the"), ids)[0]) == expected(name, encode(name, "the"), ids)


def random_ids(rng, name):
    """Ids that mix all kinds: bytes, words, added tokens, characters of real text, unknown ids."""
    size = len(TOKENIZERS[name])
    specials = list(range(size - 4, size + 3))
    ids = []
    for _ in range(rng.randrange(1, 12)):
        kind = rng.randrange(5)
        if kind == 0:
            ids += [rng.randrange(size)]
        elif kind == 1:
            ids += [rng.choice(specials)]
        elif kind == 2:
            piece = encode(name, rng.choice(TEXTS))
            start = rng.randrange(len(piece) + 1)
            ids += piece[start : start + rng.randrange(8)]
        elif kind == 3:
            ids += [rng.randrange(1, 257) for _ in range(rng.randrange(4))]
        else:
            ids += [rng.choice(ids or [0])] * rng.randrange(6)
    return ids


@pytest.mark.parametrize("seed", range(10))
def test_random_ids_give_what_decode_gives(name, seed):
    rng = random.Random(f"{name} {seed}")
    for _ in range(350):
        prompt, output, skip = random_ids(rng, name), random_ids(rng, name), rng.random() < 0.5
        if rng.random() < 0.3:
            prompt = []
        want = expected(name, prompt, output, skip)
        assert "".join(stream(name, prompt, output, skip=skip)[0]) == want
        deltas, _ = stream(name, prompt, output, skip=skip, cut=lambda: rng.randrange(1, 5))
        assert "".join(deltas) == want


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(st.text(max_size=30), st.text(max_size=60), st.data())
def test_any_unicode_text_comes_back(prompt, text, data):
    name = data.draw(st.sampled_from(sorted(TOKENIZERS)))
    prompt_ids, ids = encode(name, prompt), encode(name, text)
    assert "".join(stream(name, prompt_ids, ids)[0]) == expected(name, prompt_ids, ids)


def test_long_random_outputs_stay_exact(name):
    rng = random.Random(name)
    output = [rng.randrange(len(TOKENIZERS[name]) + 2) for _ in range(3000)]
    assert "".join(stream(name, [], output)[0]) == decode(name, output)


# ----------------------------------------------------------------------------- added tokens, ids


@pytest.mark.parametrize("skip", [True, False])
def test_added_tokens_read_as_in_decode_and_only_special_ones_are_dropped(name, skip):
    tokenizer = TOKENIZERS[name]
    think, end_think, special = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|end|>"])
    ids = [think, *encode(name, "ok"), special, end_think, *encode(name, "1"), special]
    text = "".join(stream(name, encode(name, "the"), ids, skip=skip)[0])
    assert text == expected(name, encode(name, "the"), ids, skip)
    assert text.count("<think>") == text.count("</think>") == 1
    assert text.count("<|end|>") == (0 if skip else 2)


def test_a_skipped_token_inside_a_character_does_not_break_it():
    end = TOKENIZERS["byte_level"].convert_tokens_to_ids("<|end|>")
    a, b, c, d = encode("byte_level", "😀")
    assert "".join(stream("byte_level", [], [a, end, b, end, c, end, d])[0]) == "😀"
    x, y, z = encode("llama", "a标")[1:]
    end = TOKENIZERS["llama"].convert_tokens_to_ids("<|end|>")
    assert "".join(stream("llama", [], [x, end, y, end, z])[0]) == "标"


def test_ids_the_tokenizer_does_not_have_are_no_text(name):
    unknown = len(TOKENIZERS[name]) + 5
    ids = encode(name, "the dog")
    mixed = [unknown, *(i for token in ids for i in (token, unknown))]
    assert "".join(stream(name, [unknown], mixed)[0]) == decode(name, ids)
    assert stream(name, [], [unknown] * 3)[0] == ["", "", "", ""]


class CountingTokenizer:
    """Records how many ids each decode was given; takes no option about spaces."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.sizes = []

    def decode(self, ids, skip_special_tokens):
        self.sizes.append(len(ids))
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_id):
        return self.tokenizer.convert_ids_to_tokens(token_id)


@pytest.mark.parametrize("kind", ["text", "random", "one byte", "special"])
def test_each_id_is_decoded_a_bounded_number_of_times(name, kind):
    rng = random.Random(1)
    tokenizer = TOKENIZERS[name]
    output = {
        "text": encode(name, TEXTS[0] * 40),
        "random": [rng.randrange(len(tokenizer)) for _ in range(2000)],
        "one byte": [encode(name, "😀")[-1]] * 2000,
        "special": [tokenizer.convert_tokens_to_ids("<|end|>")] * 2000,
    }[kind]
    prompt = encode(name, TEXTS[0] * 100)
    counting = CountingTokenizer(tokenizer)
    decoder = TokenDecoder(counting)
    for token_id in set(prompt + output):
        decoder.kind(token_id, skip_special_tokens=True)
    counting.sizes.clear()
    detokenizer = IncrementalDetokenizer(decoder, prompt)
    for token_id in output:
        detokenizer.append([token_id])
    detokenizer.finish()
    assert detokenizer.text == expected(name, prompt, output)
    assert max(counting.sizes) <= 64
    assert sum(counting.sizes) <= 32 * len(output) + 200


def test_a_plain_tokenizers_object_or_a_stub_will_do():
    backend = TOKENIZERS["byte_level"].backend_tokenizer
    ids = encode("byte_level", "the 😀 dog")
    detokenizer = IncrementalDetokenizer(backend, [])
    assert detokenizer.append(ids).delta + detokenizer.finish().delta == "the 😀 dog"

    class Stub:
        def decode(self, ids, skip_special_tokens):
            return "".join(chr(i) for i in ids)

    assert IncrementalDetokenizer(Stub()).append([104, 105]) == TextUpdate("hi", None, 2)


def test_outputs_that_share_a_decoder_share_no_state():
    ids = encode("byte_level", "😀")
    one = IncrementalDetokenizer(DECODERS["byte_level"], [])
    two = IncrementalDetokenizer(DECODERS["byte_level"], [])
    one.append(ids[:2])
    assert two.append(encode("byte_level", "a")).delta == "a"
    assert one.append(ids[2:]).delta == "😀"


def test_append_after_finish_is_refused_and_a_second_finish_is_empty():
    detokenizer = IncrementalDetokenizer(DECODERS["byte_level"], [])
    detokenizer.append(encode("byte_level", "😀")[:1])
    assert detokenizer.finish() == TextUpdate("\ufffd")
    assert detokenizer.finish() == TextUpdate("")
    with pytest.raises(RuntimeError, match="append after finish"):
        detokenizer.append([1])


# ------------------------------------------------------------------------------------ stop strings


def reference_stop(text, stops):
    """The match that ends first, then the longest: (start, end, string), by brute force."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stops if text[:end].endswith(s)]
        if matches:
            string = max(matches, key=len)
            return end - len(string), end, string
    return None


CASES = [
    # text, stop, without it, with it, matched
    ("ABCDEFGHIJKL", ["DEFGHIJ"], "ABC", "ABCDEFGHIJ", "DEFGHIJ"),
    ("ABCDEFGHIJKL", ["DEFGHIJ", "DEF"], "ABC", "ABCDEF", "DEF"),
    ("ABCDEFGHIJKL", ["DEF", "CDEF", "F"], "AB", "ABCDEF", "CDEF"),
    ("ABCDEFGHIJKL", ["BCDX", "CD"], "AB", "ABCD", "CD"),
    ("ABCDEFGHIJKL", ["DEFX", "KLM"], "ABCDEFGHIJKL", "ABCDEFGHIJKL", None),
    ("aabaabaac", ["aabaac"], "aab", "aabaabaac", "aabaac"),
    ("the dog. It", [". "], "the dog", "the dog. ", ". "),
    ("doesn't stop", ["n't s"], "does", "doesn't s", "n't s"),
    ("A", ["A"], "", "A", "A"),
    ("你好，世界。", ["世"], "你好，", "你好，世", "世"),
    ("smile 😀!", ["😀"], "smile ", "smile 😀", "😀"),
]


@pytest.mark.parametrize(("text", "stop", "without", "including", "matched"), CASES)
@pytest.mark.parametrize("cut", [1, 2, 100])
def test_a_stop_string_ends_the_text_and_none_of_it_is_sent(
    name, text, stop, without, including, matched, cut
):
    ids = encode(name, text)
    deltas, detokenizer = stream(name, [], ids, stop=stop, cut=lambda: cut)
    assert ("".join(deltas), detokenizer.stop) == (without, matched)
    deltas, detokenizer = stream(name, [], ids, stop=stop, include_stop_str=True, cut=lambda: cut)
    assert ("".join(deltas), detokenizer.stop) == (including, matched)


def test_held_text_is_released_as_soon_as_it_cannot_match():
    ids = [i for char in "ABDEFXDEFG" for i in encode("byte_level", char)]
    deltas, detokenizer = stream("byte_level", [], ids, stop=["DEFGHIJ"])
    assert deltas == ["A", "B", "", "", "", "DEFX", "", "", "", "", "DEFG"]
    assert detokenizer.stop is None


def test_with_the_stop_string_included_nothing_is_held():
    ids = [i for char in "ABDEFXDEFG" for i in encode("byte_level", char)]
    assert stream("byte_level", [], ids, stop=["DEFGHIJ"], include_stop_str=True)[0] == [*"ABDEFXDEFG", ""]


def test_the_update_says_which_stop_matched_and_how_many_ids_it_took():
    ids = [i for char in "ABCDEF" for i in encode("byte_level", char)]
    detokenizer = IncrementalDetokenizer(DECODERS["byte_level"], [], stop=("CD",))
    assert detokenizer.append(ids) == TextUpdate("AB", "CD", 4)
    assert detokenizer.append(ids) == TextUpdate("", "CD", 0)
    assert detokenizer.finish() == TextUpdate("", "CD", 0)
    assert detokenizer.text == "AB"


def test_a_newline_byte_token_stops_at_once_though_its_run_is_open():
    newline = byte_id("llama", 0x0A)
    detokenizer = IncrementalDetokenizer(DECODERS["llama"], encode("llama", "the"), stop=("\n\n",))
    assert detokenizer.append(encode("llama", "dog")).delta == " dog"
    assert detokenizer.append([newline]) == TextUpdate("", None, 1)
    assert detokenizer.append([newline]) == TextUpdate("", "\n\n", 1)
    assert detokenizer.text == " dog"


def test_a_stop_string_never_reaches_into_the_prompt(name):
    prompt = encode(name, "the AB")
    deltas, detokenizer = stream(name, prompt, encode(name, "x BC AB"), stop=["AB"])
    assert detokenizer.stop == "AB" and decode(name, prompt) + "".join(deltas) in (
        "the ABx BC ",
        "the AB x BC ",
    )
    newline = byte_id("llama", 0x0A)
    _, detokenizer = stream("llama", encode("llama", "the") + [newline], [newline], stop=["\n\n"])
    assert detokenizer.stop is None and detokenizer.text == "\n"


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_min_tokens_lets_earlier_matches_pass_for_good(cut):
    ids = [i for char in "A\nB\nC\nD" for i in encode("byte_level", char)]
    for min_tokens, text in [(0, "A"), (1, "A"), (2, "A\nB"), (3, "A\nB"), (4, "A\nB\nC"), (6, "A\nB\nC\nD")]:
        deltas, detokenizer = stream(
            "byte_level", [], ids, stop=["\n"], min_tokens=min_tokens, cut=lambda: cut
        )
        assert "".join(deltas) == text
        assert detokenizer.stop == (None if min_tokens == 6 else "\n")


def test_a_match_across_the_min_tokens_boundary_does_not_count():
    ids = [i for char in "ABAB" for i in encode("byte_level", char)]
    deltas, detokenizer = stream("byte_level", [], ids, stop=["AB"], min_tokens=1)
    assert deltas == ["A", "B", "", "", ""] and detokenizer.text == "AB" and detokenizer.stop == "AB"


def test_min_tokens_covers_the_newline_bytes_of_a_run_that_is_still_open():
    newline, dog = byte_id("llama", 0x0A), encode("llama", "dog")
    for output in ([newline, *dog], [newline]):
        deltas, detokenizer = stream("llama", dog, output, stop=["\n"], min_tokens=1)
        assert "".join(deltas) == expected("llama", dog, output) and detokenizer.stop is None
    deltas, detokenizer = stream("llama", dog, [newline, newline, *dog], stop=["\n"], min_tokens=1)
    assert "".join(deltas) == "\n" and detokenizer.stop == "\n"


def test_ids_without_text_count_towards_min_tokens():
    end = TOKENIZERS["byte_level"].convert_tokens_to_ids("<|end|>")
    ids = [end, end, *encode("byte_level", "A")]
    assert stream("byte_level", [], ids, stop=["A"], min_tokens=2)[1].stop == "A"
    assert stream("byte_level", [], ids, stop=["A"], min_tokens=3)[1].stop is None


@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(
    st.text(alphabet="ab世\n ", max_size=30),
    st.lists(st.text(alphabet="ab世\n ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 4),
    st.sampled_from(sorted(TOKENIZERS)),
)
def test_stop_strings_match_a_brute_force_search(text, stops, include, cut, name):
    ids = encode(name, text)
    text = decode(name, ids)
    deltas, detokenizer = stream(name, [], ids, stop=stops, include_stop_str=include, cut=lambda: cut)
    want = reference_stop(text, stops)
    if want is None:
        assert ("".join(deltas), detokenizer.stop) == (text, None)
    else:
        start, end, string = want
        assert ("".join(deltas), detokenizer.stop) == (text[: end if include else start], string)


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(
    st.lists(st.text(alphabet="ab", max_size=4), max_size=6),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_the_filter_holds_exactly_what_may_still_match(pieces, stops):
    stop_filter = StopFilter(stops)
    text = passed = ""
    for piece in pieces:
        passed += stop_filter.feed(piece)
        text += piece
        if stop_filter.matched is not None:
            break
        prefixes = [text[k:] for k in range(len(text)) if any(s.startswith(text[k:]) for s in stops)]
        assert stop_filter.held == max(prefixes, key=len, default="")
        assert passed + stop_filter.held == text
