"""SamplingParams: defaults, normal forms, and what is refused with which words."""

import copy
import dataclasses
import pickle
import re

import numpy as np
import pytest

from jpaged.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

INT_FIELDS = ("n", "top_k", "min_tokens", "seed", "max_tokens", "logprobs", "prompt_logprobs")
FLOAT_FIELDS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
FLAG_FIELDS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")


def test_defaults_sample_the_plain_distribution_for_16_tokens():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None, "max_tokens": 16,
        "min_tokens": 0, "stop": (), "stop_token_ids": (), "include_stop_str_in_output": False,
        "ignore_eos": False, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "logit_bias": None, "allowed_token_ids": None, "bad_words": (), "logprobs": None,
        "prompt_logprobs": None, "detokenize": True, "skip_special_tokens": True,
    }  # fmt: skip


@pytest.mark.parametrize("field", INT_FIELDS)
@pytest.mark.parametrize(
    "value", [True, False, 1.5, "5", 1.0, float("nan"), [1], np.bool_(True), np.float32(2)]
)
def test_an_int_field_takes_only_integers(field, value):
    with pytest.raises(ValueError, match=rf"^{field}=.* must be an int$"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["n", "top_k", "min_tokens"])
def test_an_int_field_that_is_not_optional_refuses_none(field):
    with pytest.raises(ValueError, match=f"{field}=None must be an int"):
        SamplingParams(**{field: None})


@pytest.mark.parametrize("field", FLOAT_FIELDS)
@pytest.mark.parametrize("value", [True, "1", None, 1j, [1.0]])
def test_a_float_field_takes_only_numbers(field, value):
    with pytest.raises(ValueError, match=rf"^{field}={re.escape(repr(value))} must be a number$"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", FLOAT_FIELDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), np.float32("nan"), 10**400])
def test_a_float_field_refuses_what_is_not_finite(field, value):
    with pytest.raises(ValueError, match=rf"^{field}=.* must be a finite number in \["):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", FLAG_FIELDS)
@pytest.mark.parametrize("value", [1, 0, "true", None])
def test_a_flag_takes_only_booleans(field, value):
    with pytest.raises(ValueError, match=f"^{field}={value!r} must be True or False$"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("n", (1, MAX_N), (0, -1, MAX_N + 1)),
        ("top_k", (0, 1, 10**7), (-2,)),
        ("min_tokens", (0, 16), (-1,)),
        ("seed", (0, MAX_SEED), (-1, MAX_SEED + 1)),
        ("max_tokens", (0, 1, 10**9), (-1,)),
        ("logprobs", (0, MAX_LOGPROBS), (-1, MAX_LOGPROBS + 1)),
        ("prompt_logprobs", (0, MAX_LOGPROBS), (-1, MAX_LOGPROBS + 1)),
        ("temperature", (0.0, 2.0, 1e6), (-0.1, 1.1e6)),
        ("top_p", (0.1, 1.0), (0.0, 0, -0.1, 1.01)),
        ("min_p", (0.0, 1.0), (-0.01, 1.01)),
        ("presence_penalty", (-2.0, 2.0), (-2.01, 2.01)),
        ("frequency_penalty", (-2.0, 2.0), (-2.01, 2.01)),
        ("repetition_penalty", (1e-6, 0.5, 1e6), (0.0, -1.0, 1e-7, 2e6)),
    ],
)
def test_limits_are_inclusive_and_named(field, good, bad):
    for value in good:
        assert getattr(SamplingParams(**{field: value}), field) == value
    for value in bad:
        with pytest.raises(ValueError, match=rf"^{field}={re.escape(str(value))} must be "):
            SamplingParams(**{field: value})


def test_off_values_and_extremes_have_one_stored_form():
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(top_p=1e-30).top_p == 1e-6
    assert SamplingParams(temperature=1e-6) == SamplingParams(temperature=0)
    assert SamplingParams(temperature=1e-4).temperature == 1e-4
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_greedy_and_needs_counts_follow_the_values():
    assert SamplingParams(temperature=0).greedy and not SamplingParams(temperature=0.01).greedy
    assert not SamplingParams().needs_counts
    assert SamplingParams(repetition_penalty=1.1).needs_counts
    assert SamplingParams(frequency_penalty=-0.1).needs_counts
    assert SamplingParams(presence_penalty=0.1).needs_counts


def test_numpy_scalars_become_plain_numbers():
    params = SamplingParams(
        n=np.int64(2),
        top_k=np.uint8(5),
        max_tokens=np.int32(7),
        temperature=np.float32(0.5),
        stop_token_ids=np.array([3, 4]),
        logit_bias={np.int64(9): np.float32(1.5)},
    )
    expected = SamplingParams(
        n=2, top_k=5, max_tokens=7, temperature=0.5, stop_token_ids=[3, 4], logit_bias={9: 1.5}
    )
    assert params == expected and repr(params) == repr(expected)


def test_an_int_is_a_number_and_is_stored_as_a_float():
    assert repr(SamplingParams(temperature=1, repetition_penalty=2).repetition_penalty) == "2.0"


def test_sequences_become_tuples_without_repeats():
    params = SamplingParams(
        stop=["b", "a", "b"], stop_token_ids=(5, 1, 5), allowed_token_ids=[2, 2], bad_words=["x"]
    )
    assert params.stop == ("b", "a")
    assert params.stop_token_ids == (5, 1)
    assert params.allowed_token_ids == (2,)
    assert params.bad_words == ("x",)
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None) == SamplingParams()


@pytest.mark.parametrize("field", ["stop", "bad_words"])
@pytest.mark.parametrize("value", [[""], ["a", ""], [1], [None], [b"a"]])
def test_strings_must_be_strings_and_not_empty(field, value):
    with pytest.raises(ValueError, match=rf"^{field} has .*must be a string of at least 1 character"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("value", ["12", b"12", {1: 2}, 5])
def test_token_ids_must_be_a_list(field, value):
    with pytest.raises(ValueError, match=f"^{field}=.* must be a list"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize(
    ("value", "words"),
    [(-1, "=-1 must be at least 0"), (True, "=True must be an int"), ("1", "'1'"), (1.0, "1.0")],
)
def test_each_token_id_is_checked(field, value, words):
    with pytest.raises(ValueError, match=f"^{field}.*{re.escape(words)}"):
        SamplingParams(**{field: [3, value]})


def test_counts_have_limits():
    SamplingParams(stop_token_ids=range(MAX_STOP_TOKEN_IDS))
    with pytest.raises(ValueError, match="stop_token_ids has 65 entries, must have at most 64"):
        SamplingParams(stop_token_ids=range(MAX_STOP_TOKEN_IDS + 1))
    SamplingParams(bad_words=[f"w{i}" for i in range(MAX_BAD_WORDS)])
    with pytest.raises(ValueError, match="bad_words has 65 entries, must have at most 64"):
        SamplingParams(bad_words=[f"w{i}" for i in range(MAX_BAD_WORDS + 1)])
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0))
    with pytest.raises(ValueError, match="logit_bias has 1025 entries, must have at most 1024"):
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0))


def test_nothing_to_sample_from_is_refused():
    with pytest.raises(ValueError, match="allowed_token_ids=.* at least 1"):
        SamplingParams(allowed_token_ids=[])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"5": 1.0}, "logit_bias='5' must be an int"),
        ({True: 1.0}, "logit_bias=True must be an int"),
        ({-1: 1.0}, "logit_bias=-1 must be at least 0"),
        ({5: 100.5}, "logit_bias[5]=100.5 must be a finite number in [-100, 100]"),
        ({5: float("nan")}, "logit_bias[5]=nan must be"),
        ({5: "1"}, "logit_bias[5]='1' must be a number"),
        ([5], "logit_bias=[5] must be a mapping"),
    ],
)
def test_logit_bias_is_checked_key_and_value(value, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        SamplingParams(logit_bias=value)


def test_logit_bias_is_a_copy():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}


def test_fields_are_checked_together():
    with pytest.raises(ValueError, match="min_tokens=5 must be at most max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5
    with pytest.raises(ValueError, match="needs detokenize=True"):
        SamplingParams(detokenize=False, stop="a")
    assert SamplingParams(detokenize=False, stop=[]).detokenize is False


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_validate_vocab_names_field_id_and_limit(field):
    def make(token_id):
        return SamplingParams(**{field: {token_id: 1.0} if field == "logit_bias" else [token_id]})

    make(99).validate_vocab(100)
    with pytest.raises(ValueError, match=rf"^{field}: token id 100 must be in \[0, 100\)$"):
        make(100).validate_vocab(100)
    with pytest.raises(ValueError, match=rf"^{field}: token id 2147483648 must be"):
        make(2**31).validate_vocab(100)


def test_values_are_frozen_hashable_and_survive_copying():
    params = SamplingParams(stop="x", logit_bias={1: 2.0}, allowed_token_ids=[1, 2], seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    assert hash(params) == hash(copy.deepcopy(params))
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params, n=3).stop == ("x",)
    with pytest.raises(ValueError, match="n=0"):
        dataclasses.replace(params, n=0)


def test_an_unknown_name_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
