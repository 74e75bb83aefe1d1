"""What callers of LLM see: forms of prompts, errors in their places, chats, streams, interruptions.

Most run on a runner without a model, whose tokens depend on every token before them.
"""

from __future__ import annotations

import dataclasses
import gc
import json

import jax
import numpy as np
import pytest
from conftest import tiny_config, tiny_params
from fake import FakeRunner, expected_output
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from jpaged import LLM, SamplingParams
from jpaged.engine.engine import Engine

BOS, EOS = 1, 2
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_tokenizer(*, adds_bos: bool = True, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE of a few merges; 291 ids, fewer than the model has."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=291,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(["the capital of france is paris and that of italy is rome "] * 5, trainer)
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer


SIZES = dict(max_model_len=160, max_num_seqs=8, max_num_batched_tokens=32, num_kv_blocks=128)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def fake_llm(config, params, tokenizer, **options) -> LLM:
    llm = LLM(config=config, params=params, tokenizer=tokenizer, **(SIZES | options))
    llm.engine = Engine(config, None, tokenizer=tokenizer, runner=FakeRunner(), **(SIZES | options))
    return llm


@pytest.fixture
def llm(config, params, tokenizer):
    llm = fake_llm(config, params, tokenizer)
    yield llm
    assert_nothing_left(llm)


def assert_nothing_left(llm: LLM) -> None:
    """Every request has ended and gave back what it had."""
    while llm.engine.has_unfinished():  # those that were aborted are reported by the next step
        assert all(output.finished for output in llm.engine.step())
    engine = llm.engine
    engine.scheduler.check_invariants()
    assert engine.scheduler.kv.num_active == 0
    assert not engine._groups and not engine._sequences and not llm._mail


GREEDY = SamplingParams(temperature=0, max_tokens=6)


def generate(llm: LLM, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def ids(outputs) -> list[list[int]]:
    assert all(output.error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


# ---------------------------------------------------------------------------------------------
# Prompts

TEXT = "the capital of france"


def test_a_prompt_may_be_a_string_ids_or_a_mapping(llm, tokenizer):
    token_ids = tokenizer.encode(TEXT)
    assert token_ids[0] == BOS and len(token_ids) > 4
    expected = [expected_output(token_ids, 6)]
    for prompt in (TEXT, {"prompt": TEXT}):
        (output,) = outputs = generate(llm, prompt)
        assert ids(outputs) == expected
        assert (output.prompt, output.prompt_token_ids, output.finished) == (TEXT, token_ids, True)
        assert outputs[0].outputs[0].finish_reason == "length"
    for prompt in (
        token_ids,
        tuple(token_ids),
        np.array(token_ids),
        np.array(token_ids, np.uint8 if max(token_ids) < 256 else np.int16),
        [np.int32(token) for token in token_ids],
        {"prompt_token_ids": token_ids},
        {"prompt_token_ids": np.array(token_ids)},
    ):
        (output,) = outputs = generate(llm, prompt)
        assert ids(outputs) == expected
        assert (output.prompt, output.prompt_token_ids) == (None, token_ids)


def test_a_list_may_mix_all_forms(llm, tokenizer):
    token_ids = tokenizer.encode(TEXT)
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    prompts = [TEXT, token_ids, {"prompt": TEXT}, np.array(token_ids), chat, {"prompt_token_ids": token_ids}]
    outputs = generate(llm, prompts)
    expected = expected_output(token_ids, 6)
    assert [output.outputs[0].token_ids == expected for output in outputs] == [True] * 4 + [False, True]
    assert outputs[4].prompt == f"<s>[user]{TEXT}[assistant]"
    assert outputs[4].prompt_token_ids == tokenizer.encode(outputs[4].prompt, add_special_tokens=False)
    assert generate(llm, []) == []
    assert ids(generate(llm, (TEXT, TEXT))) == [expected, expected]


def test_text_is_what_the_ids_add_to_the_prompt(llm, tokenizer):
    for prompt in (TEXT, "", "x", [5, 6, 7]):
        (output,) = generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=40))
        before = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True)
        after = tokenizer.decode(output.prompt_token_ids + ids([output])[0], skip_special_tokens=True)
        assert after.startswith(before) and output.outputs[0].text == after[len(before) :] != ""


def test_each_prompt_may_have_its_own_parameters(llm, tokenizer):
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 1, 7)]
    outputs = generate(llm, [TEXT, "x", TEXT], params)
    assert [len(x) for x in ids(outputs)] == [3, 1, 7]
    assert ids(outputs)[2] == expected_output(tokenizer.encode(TEXT), 7)
    assert [len(x) for x in ids(generate(llm, ["a", "b"], [params[0], None]))] == [3, 16]
    assert len(ids(generate(llm, "x", None))[0]) == 16


def test_a_wrong_number_of_parameters_is_refused_before_anything_runs(llm):
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        generate(llm, ["a", "b", "c"], [GREEDY, GREEDY])
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize("wrong", [{"temperature": 0}, "greedy", [{"temperature": 0}], [0.5], [{}]])
def test_parameters_of_another_type_are_refused_before_anything_runs(llm, wrong):
    with pytest.raises((ValueError, TypeError), match="sampling_params"):
        generate(llm, ["a"], wrong)
    assert not llm.engine.has_unfinished()


def test_one_bad_prompt_in_a_hundred_fails_alone(llm, tokenizer):
    prompts = [f"prompt number {index}" for index in range(100)]
    prompts[50] = "x" * 500
    prompts[70] = {"prompt": TEXT, "prompt_token_ids": [5]}
    outputs = generate(llm, prompts)
    assert [i for i, output in enumerate(outputs) if output.error is not None] == [50, 70]
    assert "501 tokens" in outputs[50].error and "max_model_len=160" in outputs[50].error
    assert outputs[50].prompt == prompts[50] and outputs[50].finished and not outputs[50].outputs
    assert "prompt_token_ids" in outputs[70].error and not outputs[70].outputs
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.error is None:
            assert output.prompt == prompt
            assert ids([output])[0] == expected_output(tokenizer.encode(prompt), 6)


WRONG = {
    "nothing": None,
    "a number": 1.5,
    "an int": np.int64(5),
    "an empty list": [],
    "an empty array": np.array([], np.int32),
    "a scalar array": np.array(5),
    "two dimensions": np.zeros((2, 3), np.int32),
    "bytes": b"the capital",
    "floats": [1.0, 2.0],
    "strings": ["a", "b"],
    "negative": [5, -1],
    "beyond the vocabulary": [5, 301],
    "far beyond": [2**40],
    "a bool": [True, 5],
    "an empty mapping": {},
    "no such key": {"text": "a"},
    "null": {"prompt": None},
    "ids as prompt": {"prompt": [5, 6]},
    "a string as ids": {"prompt_token_ids": "abc"},
    "a number as ids": {"prompt_token_ids": 5},
    "a mapping in a mapping": {"prompt_token_ids": {"prompt": "a"}},
    "no messages": {"messages": []},
    "messages as text": {"messages": "hi"},
    "messages of text": {"messages": ["hi"]},
    "a message without a role": {"messages": [{"content": "hi"}]},
    "null content": {"messages": [{"role": "user", "content": None}]},
    "content in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    "a role that the template refuses": {"messages": [{"role": "system", "content": "hi"}]},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_prompt_gives_an_error_and_its_neighbours_their_output(llm, tokenizer, name):
    first, middle, last = generate(llm, ["a", WRONG[name], TEXT])
    assert middle.error and middle.finished and middle.outputs == []
    assert ids([first, last]) == [expected_output(tokenizer.encode(text), 6) for text in ("a", TEXT)]


def test_the_limits_of_ids_are_those_of_the_embedding(llm):
    """Ten ids more than the tokenizer knows."""
    assert len(llm.tokenizer) == 291
    for prompt in ([0], [300], [300, np.int64(300), np.uint8(3)]):
        assert ids(generate(llm, [prompt])) == [expected_output([int(token) for token in prompt], 6)]


def test_an_empty_string_is_the_beginning_token_if_the_tokenizer_adds_one(llm, config, params):
    outputs = generate(llm, ["a", "", " ", TEXT])
    assert [output.prompt_token_ids[0] for output in outputs] == [BOS] * 4
    assert outputs[1].prompt_token_ids == [BOS]
    assert ids(outputs)[1] == expected_output([BOS], 6)
    plain = fake_llm(config, params, make_tokenizer(adds_bos=False))
    outputs = generate(plain, ["a", "", " ", TEXT])
    assert [output.error is not None for output in outputs] == [False, True, False, False]
    assert "no tokens" in outputs[1].error
    assert ids(outputs[2:])[1] == expected_output(plain.tokenizer.encode(TEXT), 6)
    assert_nothing_left(plain)


# ---------------------------------------------------------------------------------------------
# Order


def test_outputs_keep_their_places_when_later_ones_finish_first(llm, tokenizer):
    prompts = [f"{'x' * (40 - 3 * i)} {i}" for i in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=60 - 5 * i) for i in range(12)]
    finished = []
    step = llm.engine.step

    def watched():
        outputs = step()
        finished.extend(output.prompt for output in outputs if output.finished)
        return outputs

    llm.engine.step = watched
    outputs = generate(llm, prompts, params)
    assert finished != prompts and sorted(finished) == sorted(prompts)
    for index, output in enumerate(outputs):
        assert output.prompt == prompts[index]
        assert ids([output])[0] == expected_output(tokenizer.encode(prompts[index]), 60 - 5 * index)


def test_duplicates_are_each_answered(llm, tokenizer):
    prompts = ["same", "x" * 300, "same", "same", "other", "x" * 300, "same"]
    outputs = generate(llm, prompts, SamplingParams(temperature=0, max_tokens=4, n=2))
    assert [output.prompt for output in outputs] == prompts
    assert [bool(output.error) for output in outputs] == [prompt[0] == "x" for prompt in prompts]
    for output in outputs:
        if output.error is None:
            expected = expected_output(tokenizer.encode(output.prompt), 4)
            assert [(o.index, o.token_ids) for o in output.outputs] == [(0, expected), (1, expected)]


# ---------------------------------------------------------------------------------------------
# Chat

ASK = [{"role": "user", "content": TEXT}]
TALK = [*ASK, {"role": "assistant", "content": "paris"}, {"role": "user", "content": "and rome?"}]


def test_one_conversation_or_several(llm, tokenizer):
    (single,) = llm.chat(ASK, GREEDY, use_tqdm=False)
    both = llm.chat([ASK, TALK], GREEDY, use_tqdm=False)
    assert single.prompt == both[0].prompt == f"<s>[user]{TEXT}[assistant]"
    assert both[1].prompt == f"<s>[user]{TEXT}[assistant]paris[user]and rome?[assistant]"
    for output in (single, *both):
        rendered = tokenizer.encode(output.prompt, add_special_tokens=False)
        assert output.prompt_token_ids == rendered
        assert ids([output])[0] == expected_output(rendered, 6)
    params = [SamplingParams(max_tokens=n) for n in (1, 2)]
    assert [len(x) for x in ids(llm.chat([ASK, TALK], params, use_tqdm=False))] == [1, 2]


def test_template_and_tokenizer_together_make_one_beginning_token(llm, tokenizer):
    assert tokenizer.encode("a")[0] == BOS and tokenizer.apply_chat_template(ASK, tokenize=False)[:3] == "<s>"
    (chat,) = llm.chat(ASK, GREEDY, use_tqdm=False)
    message, text, given = generate(llm, [{"messages": ASK}, TEXT, [7, 8]])
    for output in (chat, message, text):
        assert output.prompt_token_ids.count(BOS) == 1 and output.prompt_token_ids[0] == BOS
    assert given.prompt_token_ids == [7, 8]


def test_a_template_without_a_beginning_token_gets_none(config, params):
    bare = fake_llm(config, params, make_tokenizer(template="{{ messages[0].content }}"))
    (output,) = bare.chat(ASK, GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == bare.tokenizer.encode(TEXT, add_special_tokens=False)


def test_a_rendered_prompt_that_gets_two_beginning_tokens_is_warned_about(llm, caplog):
    rendered = f"<s>[user]{TEXT}[assistant]"
    (output,) = generate(llm, [rendered])
    assert output.prompt_token_ids[:2] == [BOS, BOS]
    assert "beginning-of-sequence" in caplog.text
    caplog.clear()
    generate(llm, [TEXT, {"messages": ASK}, [BOS, BOS, 7]])
    assert not caplog.text


def test_a_conversation_that_cannot_be_rendered_fails_alone(llm):
    refused = [{"role": "system", "content": "be brief"}, *ASK]
    outputs = llm.chat([ASK, refused, [], [{"role": "user", "content": None}], TALK], GREEDY, use_tqdm=False)
    assert [bool(output.error) for output in outputs] == [False, True, True, True, False]
    assert "no system here" in outputs[1].error
    assert "messages" in outputs[2].error and "content" in outputs[3].error
    (alone,) = llm.chat([], GREEDY, use_tqdm=False)
    assert "messages" in alone.error


def test_without_a_template_nothing_is_made_up(config, params):
    bare = fake_llm(config, params, make_tokenizer(template=None))
    chat, text = generate(bare, [{"messages": ASK}, TEXT])
    assert "no chat template" in chat.error and text.error is None
    assert_nothing_left(bare)


# ---------------------------------------------------------------------------------------------
# Streams


def script(llm: LLM, prompt: str, text: str, *, end: bool = False) -> None:
    """The next request, of that prompt, will produce the tokens of `text`, then perhaps the end."""
    name = f"request-{llm.engine._num_added}"
    tokens = llm.tokenizer.encode(text, add_special_tokens=False) + [EOS] * end
    llm.engine.runner.scripts[name] = tokens
    llm.engine.runner.scripts[f"{name}/prompt"] = llm.tokenizer.encode(prompt)


def collect(stream) -> tuple[str, list[int], list[str], tuple]:
    """Joined text and ids, the text after each delta, and how it ended."""
    text, token_ids, after, ends = "", [], [], []
    for delta in stream:
        text += delta.text
        token_ids += delta.token_ids
        after.append(text)
        ends.append((delta.finish_reason, delta.stop_reason))
    assert all(end == (None, None) for end in ends[:-1])
    return text, token_ids, after, ends[-1]


def test_joined_deltas_are_what_generate_gives(llm):
    params = SamplingParams(temperature=0, max_tokens=50)
    for prompt in (TEXT, "x", [5, 6], {"messages": ASK}):
        (output,) = generate(llm, [prompt], params)
        text, token_ids, after, end = collect(llm.stream(prompt, params))
        assert (text, token_ids) == (output.outputs[0].text, output.outputs[0].token_ids)
        assert end == ("length", None)
        assert len(after) > 25, "it did not come piece by piece"


LETTERS = "abcdefghijklmnop"

STOPS = [
    # text of the model, options, text of the output, how it ends
    (LETTERS, dict(stop="defghij"), "abc", ("stop", "defghij")),
    (LETTERS, dict(stop=["de", "defg"]), "abc", ("stop", "de")),
    (LETTERS, dict(stop=["defg", "de"]), "abc", ("stop", "de")),
    (LETTERS, dict(stop=["defg", "fgh", "bcx"]), "abc", ("stop", "defg")),
    (LETTERS, dict(stop=["fg", "defg"]), "abc", ("stop", "defg")),  # complete at once: the longest
    (LETTERS, dict(stop="defg", include_stop_str_in_output=True), "abcdefg", ("stop", "defg")),
    (LETTERS, dict(stop="a"), "", ("stop", "a")),
    (LETTERS, dict(stop="xyz"), LETTERS, ("length", None)),
    ("abcdexyz", dict(stop="defg"), "abcdexyz", ("length", None)),
    ("abcdedefgh", dict(stop="defg"), "abcde", ("stop", "defg")),
    ("abcdef", dict(stop="defg"), "abcdef", ("length", None)),  # ends inside a partial match
    ("the capital of france", dict(stop="apit"), "the c", ("stop", "apit")),  # inside tokens
    ("the capital of france", dict(stop=" of f"), "the capital", ("stop", " of f")),
    ("añ😀😀b日本", dict(stop="本x"), "añ😀😀b日本", ("length", None)),
    ("añ😀😀b日本", dict(stop="😀b"), "añ😀", ("stop", "😀b")),
]


@pytest.mark.parametrize("case", STOPS, ids=lambda case: f"{case[0]} {case[1]}")
def test_no_part_of_a_stop_string_is_ever_sent(llm, tokenizer, case):
    produced, options, expected, end = case
    count = len(tokenizer.encode(produced, add_special_tokens=False))
    params = SamplingParams(temperature=0, max_tokens=count, **options)
    script(llm, "p", produced)
    text, token_ids, after, how = collect(llm.stream("p", params))
    assert (text, how) == (expected, end)
    assert all(expected.startswith(piece) and "\ufffd" not in piece for piece in after)
    script(llm, "p", produced)
    (output,) = generate(llm, ["p"], params)
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == (expected, token_ids)
    assert (completion.finish_reason, completion.stop_reason) == end
    if end[0] == "length":
        assert len(token_ids) == count


def test_held_text_is_let_go_as_soon_as_it_cannot_match(llm):
    script(llm, "p", "abcdexyzdefq")
    _, _, after, _ = collect(llm.stream("p", SamplingParams(temperature=0, max_tokens=12, stop="defg")))
    assert [piece for piece in after if piece] == [
        *("a", "ab", "abc", "abc", "abc", "abcdex", "abcdexy", "abcdexyz"),
        *("abcdexyz", "abcdexyz", "abcdexyz", "abcdexyzdefq"),
    ]


def test_characters_of_several_tokens_come_whole(llm):
    script(llm, "p", "añ😀b")
    _, token_ids, after, _ = collect(llm.stream("p", SamplingParams(temperature=0, max_tokens=8)))
    assert len(token_ids) == 8
    assert list(dict.fromkeys(after)) == ["a", "añ", "añ😀", "añ😀b"]


def test_the_end_token_is_an_id_of_the_output_and_no_text(llm):
    for collected in (False, True):
        script(llm, "p", "abc", end=True)
        if collected:
            text, token_ids, _, end = collect(llm.stream("p", SamplingParams(max_tokens=20)))
        else:
            completion = generate(llm, ["p"], SamplingParams(max_tokens=20))[0].outputs[0]
            text, token_ids = completion.text, completion.token_ids
            end = completion.finish_reason, completion.stop_reason
        assert (text, token_ids[-1], len(token_ids), end) == ("abc", EOS, 4, ("stop", None))


def test_special_tokens_are_text_only_where_that_is_asked_for(llm):
    for skip, expected in ((True, "ab"), (False, "a<s>b")):
        script(llm, "p", "a<s>b")
        params = SamplingParams(temperature=0, max_tokens=3, skip_special_tokens=skip)
        assert generate(llm, ["p"], params)[0].outputs[0].text == expected
        script(llm, "p", "a<s>b")
        assert collect(llm.stream("p", params))[0] == expected


def test_streams_and_calls_take_turns(llm, tokenizer):
    params = SamplingParams(temperature=0, max_tokens=20)
    first, second = llm.stream("first", params), llm.stream("second", params)
    texts = {"first": "", "second": ""}
    tokens = {"first": [], "second": []}

    def take(name, stream, count):
        for _ in range(count):
            delta = next(stream, None)
            if delta is not None:
                texts[name] += delta.text
                tokens[name] += delta.token_ids

    take("first", first, 3)
    take("second", second, 7)
    assert ids(generate(llm, ["x", TEXT])) == [
        expected_output(tokenizer.encode(text), 6) for text in ("x", TEXT)
    ]
    take("second", second, 100)
    take("first", first, 100)
    for name in texts:
        assert tokens[name] == expected_output(tokenizer.encode(name), 20)
        assert texts[name] == generate(llm, [name], params)[0].outputs[0].text


def test_several_completions_are_streamed_side_by_side(llm, tokenizer):
    params = SamplingParams(temperature=0, max_tokens=5, n=3)
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    ends = []
    for delta in llm.stream("p", params):
        tokens[delta.index] += delta.token_ids
        ends += [delta.index] * (delta.finish_reason is not None)
    assert list(tokens.values()) == [expected_output(tokenizer.encode("p"), 5)] * 3
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("how", ["close", "forget"])
def test_a_stream_that_is_left_early_frees_its_blocks(llm, how):
    stream = llm.stream(TEXT, SamplingParams(temperature=0, max_tokens=100))
    for _ in range(5):
        next(stream)
    assert llm.engine.scheduler.kv.num_active > 0
    if how == "close":
        stream.close()
        assert next(stream, None) is None
    else:
        del stream
        gc.collect()
    assert_nothing_left(llm)


def test_a_stream_found_by_the_garbage_collector_in_a_step_is_aborted_after_it(llm, monkeypatch, tokenizer):
    """As when an exception that was kept holds a frame that holds the stream."""
    gc.disable()
    try:
        stream = llm.stream(TEXT, SamplingParams(temperature=0, max_tokens=100))
        next(stream)
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
        admit = llm.engine.scheduler._admit

        def collecting(*args):
            gc.collect()
            return admit(*args)

        monkeypatch.setattr(llm.engine.scheduler, "_admit", collecting)
        assert len(llm._mail) == 1
        assert ids(generate(llm, ["a"])) == [expected_output(tokenizer.encode("a"), 6)]
        assert not llm._mail
    finally:
        gc.enable()


def test_a_stream_of_a_wrong_prompt_raises_at_once(llm):
    for wrong in (None, [], "x" * 500, {"messages": []}):
        with pytest.raises(ValueError):
            llm.stream(wrong)
    assert not llm.engine.has_unfinished()


def test_a_stream_whose_request_fails_raises(config, params, tokenizer):
    sick = jax.tree.map(lambda x: x * np.float32(np.nan), params)
    broken = LLM(config=config, params=sick, tokenizer=tokenizer, **SIZES)
    stream = broken.stream(TEXT, GREEDY)
    with pytest.raises(RuntimeError, match="not finite"):
        next(stream)
    assert next(stream, None) is None
    assert_nothing_left(broken)


# ---------------------------------------------------------------------------------------------
# Interruptions


def interrupt(llm: LLM, monkeypatch, at: int) -> None:
    """Ctrl-C in the `at`-th step from now."""
    real, count = llm.engine.runner.run, iter(range(10**6))

    def run(step):
        if next(count) == at:
            raise KeyboardInterrupt
        return real(step)

    monkeypatch.setattr(llm.engine.runner, "run", run)


@pytest.mark.parametrize("at", [0, 1, 5])
def test_ctrl_c_in_generate_leaves_nothing_behind(llm, monkeypatch, tokenizer, at):
    interrupt(llm, monkeypatch, at)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [f"prompt {i}" for i in range(20)], SamplingParams(temperature=0, max_tokens=30))
    assert not llm._mail
    assert llm.engine.scheduler.kv.num_active == 0 and not llm.engine.scheduler.has_unfinished
    assert ids(generate(llm, [TEXT])) == [expected_output(tokenizer.encode(TEXT), 6)]
    assert_nothing_left(llm)


def test_ctrl_c_while_prompts_are_read_leaves_nothing_behind(llm, monkeypatch, tokenizer):
    encode = llm.encode_prompt

    def interrupted(prompt):
        if prompt == "c":
            raise KeyboardInterrupt
        return encode(prompt)

    monkeypatch.setattr(llm, "encode_prompt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["a", "b", "c", "d"])
    assert not llm._mail and not llm.engine.scheduler.has_unfinished
    assert ids(generate(llm, ["d"])) == [expected_output(tokenizer.encode("d"), 6)]


def test_a_stream_survives_ctrl_c_in_a_call_beside_it(llm, monkeypatch, tokenizer):
    stream = llm.stream("p", SamplingParams(temperature=0, max_tokens=30))
    first = [next(stream) for _ in range(4)]
    interrupt(llm, monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["a", "b"])
    rest = list(stream)
    tokens = [token for delta in [*first, *rest] for token in delta.token_ids]
    assert tokens == expected_output(tokenizer.encode("p"), 30)


def test_a_step_that_fails_raises_to_the_caller_and_the_next_call_works(llm, tokenizer):
    llm.engine.runner.fail_at = llm.engine.scheduler.stats.steps + 3
    with pytest.raises(RuntimeError, match="the device failed"):
        generate(llm, ["a", "b"])
    assert ids(generate(llm, ["a"])) == [expected_output(tokenizer.encode("a"), 6)]


# ---------------------------------------------------------------------------------------------
# Tokenizers, or none


@pytest.mark.parametrize("form", ["generate", "stream"])
def test_without_detokenizing_there_are_ids_and_no_text(llm, tokenizer, form):
    params = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
    if form == "generate":
        completion = generate(llm, [TEXT], params)[0].outputs[0]
        text, token_ids = completion.text, completion.token_ids
    else:
        text, token_ids, _, _ = collect(llm.stream(TEXT, params))
    assert (text, token_ids) == ("", expected_output(tokenizer.encode(TEXT), 6))


def test_without_a_tokenizer_ids_work_and_text_is_refused(config, params):
    bare = fake_llm(config, params, None)
    outputs = generate(bare, [[5, 6], TEXT, {"messages": ASK}])
    assert outputs[0].outputs[0].token_ids == expected_output([5, 6], 6)
    assert outputs[0].outputs[0].text == ""
    assert all("tokenizer" in output.error for output in outputs[1:])
    with pytest.raises(ValueError, match="tokenizer"):
        bare.stream(TEXT)
    assert_nothing_left(bare)


def test_a_tokenizer_may_be_a_path(config, params, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for path in (tmp_path, str(tmp_path)):
        loaded = LLM(config=config, params=params, tokenizer=path, **SIZES)
        assert loaded.encode_prompt(TEXT).token_ids == tokenizer.encode(TEXT)
        assert loaded.encode_chat(ASK).text == f"<s>[user]{TEXT}[assistant]"


def test_reported_tokens_have_their_text(config, params, tokenizer):
    real = LLM(config=config, params=params, tokenizer=tokenizer, **SIZES)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=3, prompt_logprobs=1)
    (output,) = generate(real, [TEXT], params)
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(entries) == len(output.prompt_token_ids) - 1 + 3
    for step in entries:
        for token, value in step.items():
            assert value.decoded_token == tokenizer.decode([token], skip_special_tokens=False)


# ---------------------------------------------------------------------------------------------
# With a model


@pytest.fixture(scope="module")
def real(config, params, tokenizer) -> LLM:
    return LLM(config=config, params=params, tokenizer=tokenizer, **SIZES)


def test_a_model_streams_what_it_generates(real):
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=30, stop=["the", "e"])
    outputs = generate(real, [TEXT, "x", "another"], params)
    for output in outputs:
        text, token_ids, _, _ = collect(real.stream(output.prompt, params))
        assert (text, token_ids) == (output.outputs[0].text, output.outputs[0].token_ids)
    assert_nothing_left(real)


def test_an_engine_of_the_dtype_that_was_asked_for(config, params, tokenizer):
    half = LLM(config=config, params=params, tokenizer=tokenizer, dtype="bfloat16", **SIZES)
    assert str(half.engine.runner.params.embed.dtype) == half.engine.runner.cache.k[0].dtype == "bfloat16"
    assert str(params.embed.dtype) == "float32"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (dict(), "either model, or both"),
        (dict(model="x", config=tiny_config(), params=()), "either model, or both"),
        (dict(config=tiny_config()), "either model, or both"),
        (dict(params=()), "either model, or both"),
        (dict(model="/nowhere", dtype="int8"), "dtype='int8'"),
        (dict(model="/nowhere", max_num_seqs=0), "max_num_seqs=0"),
        (dict(model="/nowhere", attention_backend="cuda"), "attention_backend='cuda'"),
    ],
    ids=str,
)
def test_wrong_arguments_are_told_before_anything_is_read(arguments, match):
    with pytest.raises(ValueError, match=match):
        LLM(**arguments)


def test_compiled_programs_are_kept_where_the_user_says_or_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        for chosen, kept in (("/chosen", "/chosen"), (None, str(tmp_path / "jpaged" / "programs"))):
            jax.config.update("jax_compilation_cache_dir", chosen)
            with pytest.raises(ValueError, match="either model, or both"):
                LLM()
            assert jax.config.jax_compilation_cache_dir == kept
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


def test_a_context_longer_than_the_model_has_is_refused(params):
    config = tiny_config(max_position_embeddings=64)
    with pytest.raises(ValueError, match="max_model_len=65 must be at most 64"):
        LLM(config=config, params=tiny_params(config), max_model_len=65)


def test_outputs_are_plain_data(llm):
    """So that they can be written down."""
    (output,) = generate(llm, [TEXT])
    assert json.loads(json.dumps(dataclasses.asdict(output)))["outputs"][0]["token_ids"] == ids([output])[0]
