"""JSONL batch jobs on a fake engine: forms, bad lines, bounds, kills and Ctrl-C."""

import hashlib
import importlib.util
import io
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jpaged.offline import (
    MAX_LINE_BYTES,
    BadLine,
    BatchJob,
    BatchSummary,
    IdSet,
    derive_seed,
    read_jobs,
    run_batch,
)
from jpaged.request import CompletionOutput, Logprob, RequestOutput
from jpaged.sampling_params import SamplingParams

ROOT = Path(__file__).parents[1]


class FakeEngine:
    """Answers each request, out of order, with ids that depend on its prompt and seed alone."""

    def __init__(self, *, max_steps=6, delay_s=0.0):
        self.requests = {}
        self.steps = 0
        self.peak = 0
        self.aborted = []
        self.max_steps = max_steps
        self.delay_s = delay_s
        self.on_step = lambda: None

    def add_request(self, prompt_token_ids, params, *, request_id=None, prompt=None, stream=True):
        if not prompt_token_ids:
            raise ValueError("the prompt has no tokens; at least 1 is needed")
        if len(prompt_token_ids) > 50:
            raise ValueError(f"the prompt has {len(prompt_token_ids)} tokens, at most 50 fit")
        assert request_id not in self.requests and stream is False
        digest = hashlib.sha256(repr((prompt_token_ids, params.seed)).encode()).digest()
        self.requests[request_id] = [prompt_token_ids, params, digest, 1 + digest[0] % self.max_steps]
        self.peak = max(self.peak, len(self.requests))
        return request_id

    def step(self):
        self.steps += 1
        time.sleep(self.delay_s)
        self.on_step()
        outputs = [self._output(request_id, "abort") for request_id in self.aborted]
        self.aborted = []
        for request_id, request in list(self.requests.items()):
            request[3] -= 1
            if request[3] == 0:
                outputs.append(self._output(request_id, "length"))
        return outputs

    def _output(self, request_id, reason):
        ids, params, digest, _ = self.requests.pop(request_id)
        if ids[:1] == [13]:
            return RequestOutput(request_id, None, ids, [], True, error="logits are not finite")
        output_ids = [int(byte) for byte in digest[1 : 1 + min(params.max_tokens or 8, 8)]]
        if params.max_tokens == 0:
            output_ids = []
        text = " ".join(map(str, output_ids))
        completions = [
            CompletionOutput(index, f"{text} #{index}", output_ids, reason)
            for index in reversed(range(params.n))
        ]
        return RequestOutput(request_id, None, ids, completions, True)

    def has_unfinished(self):
        return bool(self.requests)

    def abort(self, request_id):
        if request_id in self.requests:
            self.aborted.append(request_id)

    def stats(self):
        return {"kv_blocks_peak": 7, "kv_waste": 0.125}


class FakeLLM:
    model_name = "fake"

    def __init__(self, *, max_num_seqs=4, **engine):
        self.max_num_seqs = max_num_seqs
        self.engine = FakeEngine(**engine)

    def encode_prompt(self, prompt):
        ids = [byte for byte in prompt.encode()] if isinstance(prompt, str) else list(prompt)
        return SimpleNamespace(text=prompt if isinstance(prompt, str) else None, token_ids=ids)

    def encode_chat(self, messages):
        if not messages:
            raise ValueError("messages=[] must be a list of at least 1 message")
        if messages[0].get("role") == "system":
            raise ValueError("the chat template refused the messages: no system role")
        return self.encode_prompt("".join(message["content"] for message in messages))


def dump(lines):
    return b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)


def run(tmp_path, lines, *, llm=None, **options):
    """Records and summary of a job."""
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(dump(lines))
    summary = run_batch(llm or FakeLLM(), source, sink, use_tqdm=False, **options)
    data = sink.read_bytes()
    assert data.endswith(b"\n") or not data
    return [json.loads(line) for line in data.split(b"\n")[:-1]], summary


def parse(line, **options):
    """The one job of a line."""
    (job,) = read_jobs(io.BytesIO(dump([line])), **options)
    return job


def params_of(line, **options):
    job = parse(line, **options)
    assert isinstance(job, BatchJob), job
    return job.params


def refusal(line):
    job = parse(line)
    assert isinstance(job, BadLine), job
    assert job.code == "invalid_request"
    return job.message


def completion(**body):
    return {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"} | body}


def chat(**body):
    messages = [{"role": "user", "content": "hi"}]
    return {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": messages} | body,
    }


# ------------------------------------------------------------------------------------- requests


def test_a_completion_has_openais_defaults_and_maps_every_field():
    seed = derive_seed(0, "a")
    assert params_of(completion()) == SamplingParams(seed=seed)
    body = {
        "model": "m", "user": "u", "metadata": {}, "store": False, "stream": False, "echo": False,
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x", "y"], "seed": 3,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "logit_bias": {"7": 1, "8": -2.5}, "logprobs": 4,
        "top_k": 6, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [9], "include_stop_str_in_output": True, "skip_special_tokens": False,
        "allowed_token_ids": [1, 2], "bad_words": ["bad"], "prompt_logprobs": 1,
    }  # fmt: skip
    assert params_of(completion(**body)) == SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, n=2, stop=("x", "y"), seed=3, presence_penalty=0.1,
        frequency_penalty=0.2, logit_bias={7: 1.0, 8: -2.5}, logprobs=4, top_k=6, min_p=0.01,
        repetition_penalty=1.1, min_tokens=2, ignore_eos=True, stop_token_ids=(9,),
        include_stop_str_in_output=True, skip_special_tokens=False, allowed_token_ids=(1, 2),
        bad_words=("bad",), prompt_logprobs=1,
    )  # fmt: skip


def test_a_chat_maps_its_own_names():
    assert params_of(chat()).max_tokens is None and params_of(chat()).logprobs is None
    assert params_of(chat(max_completion_tokens=9)).max_tokens == 9
    assert params_of(chat(max_completion_tokens=9, max_tokens=9)).max_tokens == 9
    assert params_of(chat(logprobs=True)).logprobs == 0
    assert params_of(chat(logprobs=True, top_logprobs=3)).logprobs == 3
    assert params_of(chat(logprobs=False)).logprobs is None


def test_the_short_form_takes_prompts_ids_and_messages():
    job = parse({"prompt": "hi", "temperature": 0, "logprobs": 2, "stop": "x"})
    assert job == BatchJob(
        1, "line-1", "line-1", False, "hi",
        SamplingParams(temperature=0, logprobs=2, stop=("x",), seed=derive_seed(0, "line-1")),
    )  # fmt: skip
    job = parse({"id": 7, "prompt_token_ids": [1, 2], "prompt": None})
    assert (job.id, job.chat, job.prompt) == ("7", False, [1, 2])
    job = parse({"id": "c", "messages": [{"role": "user", "content": "x"}]})
    assert (job.id, job.chat, job.params.max_tokens) == ("c", True, None)


def test_the_default_of_max_tokens_fills_in_and_null_is_until_the_context_ends():
    assert params_of({"prompt": "x"}, max_tokens=40).max_tokens == 40
    assert params_of(chat(), max_tokens=40).max_tokens == 40
    assert params_of({"prompt": "x", "max_tokens": 3}, max_tokens=40).max_tokens == 3
    assert params_of({"prompt": "x", "max_tokens": None}, max_tokens=40).max_tokens is None
    assert params_of({"prompt": "x", "max_tokens": 0}).max_tokens == 0
    assert params_of({"prompt": "x", "seed": None, "stop": None, "top_p": None}) == params_of({"prompt": "x"})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (completion(echo=True), "echo=True is not supported"),
        (completion(stream=True), "stream=True is not supported"),
        (completion(suffix="x"), "unknown body field 'suffix'"),
        (completion(messages=[]), "unknown body field 'messages'"),
        (completion(max_token=3), "unknown body field 'max_token'"),
        (completion(detokenize=False), "unknown body field 'detokenize'"),
        (completion(max_tokens=1.5), "max_tokens=1.5 must be an int"),
        (completion(max_tokens="5"), "max_tokens='5' must be an int"),
        (completion(max_tokens=True), "max_tokens=True must be an int"),
        (completion(max_tokens=-1), "max_tokens=-1 must be at least 0"),
        (completion(top_p=2), "top_p=2 must be a finite number in [0, 1]"),
        (completion(logprobs=21), "logprobs=21 must be at most 20"),
        (completion(logit_bias={"x": 1}), "logit_bias: 'x' must be a token id"),
        (completion(logit_bias={"-1": 1}), "logit_bias: '-1' must be a token id"),
        (completion(logit_bias=[1]), "logit_bias=[1] must be a mapping"),
        (completion(prompt=["a", "b"]), "prompt must be one prompt"),
        (completion(prompt=[1, 2.5]), "prompt token id=2.5 must be an int"),
        (completion(prompt=None), "prompt=None must be a string or a list"),
        (completion(temperature=float("1e999")), "NaN"),
        (chat(prompt="x"), "unknown body field 'prompt'"),
        (chat(messages="x"), "messages='x' must be a list"),
        (chat(logprobs=3), "logprobs=3 must be true or false in a chat"),
        (chat(top_logprobs=3), "top_logprobs=3 needs logprobs=true"),
        (chat(max_tokens=1, max_completion_tokens=2), "max_completion_tokens=2 and max_tokens=1 differ"),
        (completion() | {"method": "GET"}, "method='GET' must be 'POST'"),
        (completion() | {"url": "/v1/embeddings"}, "url='/v1/embeddings' must be one of /v1/completions"),
        (completion() | {"body": 3}, "body=3 must be an object"),
        (completion() | {"extra": 3}, "unknown field 'extra'"),
        (completion() | {"custom_id": 3}, "custom_id=3 must be a string"),
        (completion() | {"custom_id": ""}, "custom_id='' must be a string of at least 1"),
        ({"method": "POST", "url": "/v1/completions", "body": {}}, "custom_id=None must be a string"),
        ({"id": "a"}, "exactly 1 of prompt, prompt_token_ids, messages is needed; the line has none"),
        ({"prompt": "x", "messages": []}, "the line has ['prompt', 'messages']"),
        ({"prompt": [1]}, "prompt=[1] must be a string"),
        ({"prompt_token_ids": "x"}, "prompt_token_ids='x' must be a list"),
        ({"prompt": "x", "temprature": 1}, "unknown field 'temprature'"),
        ({"prompt": "x", "id": True}, "id=True must be a string"),
        ({"prompt": "x", "id": ""}, "id='' must be a string of at least 1"),
        ({"prompt": "x", "n": 0}, "n=0 must be at least 1"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(line, words):
    if words == "NaN":
        line = json.dumps(line).replace("Infinity", "1e999").encode()
        words = "temperature=inf must be a finite number"
    assert words in refusal(line)


def test_a_refused_line_keeps_its_own_id():
    assert parse(completion(echo=True)).custom_id == "a"
    assert parse({"id": "q", "prompt": "x", "n": 0}).custom_id == "q"
    assert parse({"prompt": "x", "n": 0}).custom_id == "line-1"


def test_derived_seeds_are_the_same_everywhere_and_differ_by_id_and_job():
    assert derive_seed(0, "a") == derive_seed(0, "a") == 7635241192072670218
    assert len({derive_seed(s, i) for s in range(3) for i in "abc"}) == 9
    assert all(0 <= derive_seed(0, str(i)) < 2**63 for i in range(1000))
    assert params_of({"prompt": "x", "seed": 5}).seed == 5
    assert params_of({"prompt": "x"}, seed=1).seed == derive_seed(1, "line-1")


# -------------------------------------------------------------------------------------- records


def test_a_completion_record_is_openais_without_clock_or_chance(tmp_path):
    records, summary = run(tmp_path, [completion(n=2, max_tokens=2, seed=1)])
    ids = list(hashlib.sha256(repr(([120], 1)).encode()).digest()[1:3])
    choices = [
        {
            "index": index,
            "text": f"{ids[0]} {ids[1]} #{index}",
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": ids,
            "logprobs": None,
        }
        for index in (0, 1)
    ]
    body = {
        "id": "cmpl-a",
        "object": "text_completion",
        "model": "fake",
        "choices": choices,
        "usage": {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5},
    }
    response = {"status_code": 200, "request_id": "a", "body": body}
    assert records == [{"id": "a", "custom_id": "a", "response": response, "error": None}]
    assert (summary.requests, summary.errors, summary.prompt_tokens, summary.output_tokens) == (1, 0, 1, 4)
    assert (summary.kv_blocks_peak, summary.kv_waste, summary.exit_code) == (7, 0.125, 0)


def test_a_chat_record_has_messages(tmp_path):
    records, _ = run(tmp_path, [chat(max_tokens=1, seed=1)])
    body = records[0]["response"]["body"]
    (ids,) = [choice["token_ids"] for choice in body["choices"]]
    assert body["id"] == "chatcmpl-a" and body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": f"{ids[0]} #0"},
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": ids,
            "logprobs": None,
        }
    ]


class LogprobEngine(FakeEngine):
    def _output(self, request_id, reason):
        output = super()._output(request_id, reason)
        values = {
            5: Logprob(-3.0, 3, "\u2028"),
            1: Logprob(-0.5, 1, "é"),
            2: Logprob(float("-inf"), 2, "é"),
            9: Logprob(float("nan"), 4),
        }
        output.outputs = [
            CompletionOutput(0, "\u2028é", [5, 9], "stop", stop_reason=9, logprobs=[values, values])
        ]
        output.prompt_logprobs = [None, values]
        return output


def test_logprobs_are_finite_and_in_openais_shapes(tmp_path):
    llm = FakeLLM()
    llm.engine = LogprobEngine()
    lines = [
        completion(logprobs=2, prompt_logprobs=0),
        chat(logprobs=True, top_logprobs=1) | {"custom_id": "b"},
    ]
    records, _ = run(tmp_path, lines, llm=llm)
    by_id = {record["id"]: record["response"]["body"] for record in records}
    assert by_id["a"]["choices"][0]["logprobs"] == {
        "tokens": ["\u2028", "token_id:9"],
        "token_logprobs": [-3.0, -9999.0],
        "top_logprobs": [{"é": -0.5, "\u2028": -3.0, "token_id:9": -9999.0}] * 2,
    }
    assert by_id["a"]["prompt_logprobs"] == [
        None,
        {
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": "é"},
            "2": {"logprob": -9999.0, "rank": 2, "decoded_token": "é"},
            "5": {"logprob": -3.0, "rank": 3, "decoded_token": "\u2028"},
            "9": {"logprob": -9999.0, "rank": 4, "decoded_token": None},
        },
    ]
    top = [{"token": "é", "logprob": -0.5, "bytes": [195, 169]}]
    assert by_id["b"]["choices"][0]["logprobs"]["content"] == [
        {"token": "\u2028", "logprob": -3.0, "bytes": [226, 128, 168], "top_logprobs": top},
        {"token": "token_id:9", "logprob": -9999.0, "bytes": list(b"token_id:9"), "top_logprobs": top},
    ]
    text = (tmp_path / "out.jsonl").read_text()
    assert len(text.splitlines()) == 2 and "é" in text and by_id["a"]["choices"][0]["stop_reason"] == 9


def test_records_are_written_before_the_job_goes_on(tmp_path):
    sizes = []

    def on_record(record):
        assert (tmp_path / "out.jsonl").read_bytes().split(b"\n")[-2] == json.dumps(record).encode()
        sizes.append((tmp_path / "out.jsonl").stat().st_size)

    run(tmp_path, [{"prompt": f"{i}"} for i in range(20)], on_record=on_record)
    assert len(sizes) == 20 and sizes == sorted(set(sizes))


def test_requests_that_fail_are_error_records_and_others_finish(tmp_path):
    lines = [
        {"id": "ok", "prompt": "x"},
        {"id": "long", "prompt": "x" * 51},
        {"id": "empty", "prompt": ""},
        {"id": "no ids", "prompt_token_ids": []},
        {"id": "nan", "prompt_token_ids": [13]},
        {"id": "system", "messages": [{"role": "system", "content": "x"}]},
        {"id": "no messages", "messages": []},
        {"id": "also ok", "prompt": "y"},
    ]
    records, summary = run(tmp_path, lines)
    errors = {record["id"]: record["error"] for record in records if record["error"]}
    assert errors == {
        "long": {"code": "invalid_request", "message": "the prompt has 51 tokens, at most 50 fit", "line": 2},
        "empty": {
            "code": "invalid_request",
            "message": "the prompt has no tokens; at least 1 is needed",
            "line": 3,
        },
        "no ids": {
            "code": "invalid_request",
            "message": "the prompt has no tokens; at least 1 is needed",
            "line": 4,
        },
        "nan": {"code": "failed", "message": "logits are not finite", "line": 5},
        "system": {
            "code": "invalid_request",
            "message": "the chat template refused the messages: no system role",
            "line": 6,
        },
        "no messages": {
            "code": "invalid_request",
            "message": "messages=[] must be a list of at least 1 message",
            "line": 7,
        },
    }
    assert all(record["response"] is None for record in records if record["error"])
    assert {record["id"] for record in records if not record["error"]} == {"ok", "also ok"}
    assert (summary.requests, summary.errors, summary.exit_code, summary.prompt_tokens) == (8, 6, 1, 2)


# ------------------------------------------------------------------------------------ bad lines


def test_every_bad_line_is_an_error_record_with_its_number_and_the_rest_is_done(tmp_path):
    lines = [
        b"\xef\xbb\xbf" + json.dumps({"id": "bom", "prompt": "x"}).encode() + b"\n",
        b"\n",
        b"   \t \r\n",
        json.dumps({"id": "crlf", "prompt": "x"}).encode() + b"  \r\n",
        b'{"id": "cut", "prompt": "x\n',
        b"42\n",
        b"[1, 2]\n",
        b"null\n",
        b'"text"\n',
        b'{"id": "utf", "prompt": "\xff\xfe"}\n',
        b'{"id": "nan", "prompt": "x", "temperature": NaN}\n',
        b'{"id": "inf", "prompt": "x", "temperature": -Infinity}\n',
        b'{"id": "half", "prompt": "\\ud83d"}\n',
        b'{"id": "pair", "prompt": "\\ud83d\\ude00"}\n',
        b'{"id": "big", "prompt": "' + b"x" * (20 * 2**20) + b'"}\n',
        b"[" * 100_000 + b"\n",
        b'{"n": ' + b"9" * 5000 + b"}\n",
        b'{"url": "/v1/completions", "body": {"prompt": "x"}}\n',
        b"\xef\xbb\xbf{}\n",
        b"\x00\x00\n",
        json.dumps({"id": "last", "prompt": "x"}).encode(),
    ]
    records, summary = run(tmp_path, lines)
    assert sorted(record["id"] for record in records if not record["error"]) == [
        "bom",
        "crlf",
        "last",
        "pair",
    ]
    errors = {record["error"]["line"]: record for record in records if record["error"]}
    assert {line: record["error"]["code"] for line, record in errors.items()} == {
        5: "invalid_json", 6: "invalid_json", 7: "invalid_json", 8: "invalid_json", 9: "invalid_json",
        10: "invalid_utf8", 11: "invalid_json", 12: "invalid_json", 13: "invalid_json", 15: "line_too_long",
        16: "invalid_json", 17: "invalid_json", 18: "invalid_request", 19: "invalid_json", 20: "invalid_json",
    }  # fmt: skip
    assert all(record["id"] == record["custom_id"] == f"line-{line}" for line, record in errors.items())
    messages = {line: record["error"]["message"] for line, record in errors.items()}
    assert messages[6] == "the line is a int, it must be an object"
    assert messages[7] == "the line is a list, it must be an object"
    assert messages[11] == "not JSON: NaN" and messages[12] == "not JSON: -Infinity"
    assert messages[10].startswith("not UTF-8: invalid start byte at byte 25")
    assert messages[15] == f"the line is longer than {MAX_LINE_BYTES} bytes"
    assert (summary.requests, summary.errors, summary.exit_code) == (19, 15, 1)


def test_the_longest_line_is_still_read():
    start, end = b'{"id": "a", "prompt": "', b'"}'
    longest = start + b"x" * (MAX_LINE_BYTES - len(start) - len(end)) + end
    assert isinstance(parse(longest + b"\n"), BatchJob)
    assert isinstance(parse(longest), BatchJob)
    assert parse(longest + b" ").code == "line_too_long"


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_input_gives_an_empty_output_a_notice_and_exit_code_0(tmp_path, caplog, content):
    with caplog.at_level(logging.WARNING, logger="jpaged.offline"):
        records, summary = run(tmp_path, [content])
    assert records == [] and (tmp_path / "out.jsonl").read_bytes() == b""
    assert (summary.requests, summary.exit_code) == (0, 0)
    assert "has no requests" in caplog.text


def test_a_repeated_id_is_an_error_record_with_an_id_of_its_own(tmp_path):
    lines = [
        {"id": "a", "prompt": "x"},
        {"id": "a", "prompt": "y"},
        {"id": "line-4", "prompt": "z"},
        {"prompt": "nameless"},
        {"id": "a#line-6", "prompt": "z"},
        {"id": "a", "prompt": "x"},
        b"broken\n",
        {"id": "a", "n": 0, "prompt": "x"},
    ]
    records, summary = run(tmp_path, lines)
    found = {record["id"]: (record["custom_id"], (record["error"] or {}).get("code")) for record in records}
    assert found == {
        "a": ("a", None),
        "a#line-2": ("a", "duplicate_id"),
        "line-4": ("line-4", None),
        "line-4#line-4": ("line-4", None),
        "a#line-6": ("a#line-6", None),
        "a#line-6#line-6": ("a", "duplicate_id"),
        "line-7": ("line-7", "invalid_json"),
        "a#line-8": ("a", "duplicate_id"),
    }
    assert len(records) == len(lines) and summary.errors == 4


# ---------------------------------------------------------------------------------------- files


def test_an_output_that_exists_is_refused_unless_it_is_empty(tmp_path):
    sink = tmp_path / "out.jsonl"
    sink.write_bytes(b"")
    records, _ = run(tmp_path, [{"prompt": "x"}])
    assert len(records) == 1
    before = sink.read_bytes()
    with pytest.raises(ValueError, match="exists and is not empty: continue it with --resume"):
        run(tmp_path, [{"prompt": "x"}])
    assert sink.read_bytes() == before


def test_a_missing_directory_is_made_and_wrong_paths_are_named(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(dump([{"prompt": "x"}]))
    sink = tmp_path / "a" / "b" / "out.jsonl"
    assert run_batch(FakeLLM(), source, sink, use_tqdm=False).requests == 1
    assert sink.exists()
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl"):
        run_batch(FakeLLM(), tmp_path / "nothing.jsonl", tmp_path / "o", use_tqdm=False)
    assert not (tmp_path / "o").exists()
    with pytest.raises(ValueError, match="is not a file"):
        run_batch(FakeLLM(), source, tmp_path, use_tqdm=False)
    with pytest.raises(ValueError, match="is the input"):
        run_batch(FakeLLM(), source, source, use_tqdm=False, resume=True)
    with pytest.raises(ValueError, match="seed=-1 must be at least 0"):
        run_batch(FakeLLM(), source, tmp_path / "o", seed=-1, use_tqdm=False)
    with pytest.raises(ValueError, match="max_tokens=-1 must be at least 0"):
        run_batch(FakeLLM(), source, tmp_path / "o", max_tokens=-1, use_tqdm=False)


def test_progress_shows_requests_and_tokens_per_second(tmp_path, capsys):
    (tmp_path / "in.jsonl").write_bytes(dump([{"prompt": "x"}, b"\n", b"bad\n"]))
    run_batch(FakeLLM(), tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    shown = capsys.readouterr().err
    assert "2/2" in shown and "output tokens/s" in shown


# --------------------------------------------------------------------------------------- bounds


def test_no_more_than_twice_max_num_seqs_are_in_the_engine_and_lines_are_read_when_needed(tmp_path):
    llm = FakeLLM(max_num_seqs=3)
    records, _ = run(tmp_path, [{"prompt": f"{i}"} for i in range(50)], llm=llm)
    assert len(records) == 50 and llm.engine.peak == 6
    reads = []

    class Source(io.BytesIO):
        def readline(self, size=-1):
            reads.append(1)
            return super().readline(size)

    jobs = read_jobs(Source(dump([{"prompt": "x"}] * 10)))
    next(jobs)
    assert len(reads) == 1


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_stays_flat_over_100000_lines(tmp_path):
    source = tmp_path / "in.jsonl"
    with open(source, "w") as file:
        for i in range(100_000):
            file.write(f'{{"id": "request-{i:06d}", "prompt_token_ids": [{i % 11}], "max_tokens": 1}}\n')
    count = 0
    marks = {}

    def measure(record):
        nonlocal count
        count += 1
        if count in (10_000, 100_000):
            marks[count] = resident_bytes()

    llm = FakeLLM(max_num_seqs=32, max_steps=2)
    summary = run_batch(llm, source, tmp_path / "out.jsonl", use_tqdm=False, on_record=measure)
    assert (summary.requests, summary.errors, llm.engine.peak) == (100_000, 0, 64)
    # Only the set of ids grows, by about 2 MB; to keep the requests would take 100.
    assert marks[100_000] - marks[10_000] < 20e6


def test_the_id_set_holds_what_was_added_and_nothing_else():
    ids = IdSet()
    assert [ids.add(f"a{i}") for i in range(5000)] == [True] * 5000
    assert [ids.add(f"a{i}") for i in range(5000)] == [False] * 5000
    assert len(ids) == 5000
    assert all(f"a{i}" in ids for i in range(5000))
    assert not any(f"b{i}" in ids for i in range(5000))


# --------------------------------------------------------------------------------------- resume


LINES = [
    {"id": f"r{i}", "prompt": f"prompt {i}", "temperature": i % 2, "max_tokens": 1 + i % 8} for i in range(60)
]
LINES[7:7] = [b"broken\n", {"id": "r3", "prompt": "again"}, {"prompt": "x" * 60}]


def by_id(path):
    """Bytes of each record by id; no id twice."""
    records = {}
    for line in path.read_bytes().split(b"\n")[:-1]:
        record_id = json.loads(line)["id"]
        assert record_id not in records
        records[record_id] = line
    return records


@pytest.fixture
def uninterrupted(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(dump(LINES))
    run_batch(FakeLLM(), tmp_path / "in.jsonl", tmp_path / "whole.jsonl", use_tqdm=False)
    records = by_id(tmp_path / "whole.jsonl")
    assert len(records) == 63
    return records


def test_results_do_not_depend_on_what_runs_beside(tmp_path, uninterrupted):
    run_batch(FakeLLM(max_num_seqs=17), tmp_path / "in.jsonl", tmp_path / "o", use_tqdm=False)
    assert by_id(tmp_path / "o") == uninterrupted
    run_batch(FakeLLM(), tmp_path / "in.jsonl", tmp_path / "other", seed=1, use_tqdm=False)
    assert by_id(tmp_path / "other") != uninterrupted


@pytest.mark.parametrize("records", [0, 1, 30, 62, 63])
def test_resume_after_any_cut_gives_the_same_records(tmp_path, uninterrupted, records):
    whole = (tmp_path / "whole.jsonl").read_bytes().split(b"\n")
    kept = b"".join(line + b"\n" for line in whole[:records])
    torn = whole[records] if records < 63 else b""
    sink = tmp_path / "out.jsonl"
    for cut in sorted({0, 1, 2, len(torn) // 2, max(len(torn) - 1, 0), len(torn)}):
        sink.write_bytes(kept + torn[:cut])
        summary = run_batch(FakeLLM(), tmp_path / "in.jsonl", sink, resume=True, use_tqdm=False)
        assert by_id(sink) == uninterrupted
        assert sink.read_bytes().startswith(kept)
        assert (summary.resumed, summary.requests) == (records, 63 - records)
        assert summary.errors + summary.resumed_errors == 3 and summary.exit_code == 1


def test_resume_of_nothing_starts_and_resume_of_everything_does_nothing(tmp_path, uninterrupted):
    sink = tmp_path / "new.jsonl"
    assert run_batch(FakeLLM(), tmp_path / "in.jsonl", sink, resume=True, use_tqdm=False).requests == 63
    before = sink.read_bytes()
    llm = FakeLLM()
    assert run_batch(llm, tmp_path / "in.jsonl", sink, resume=True, use_tqdm=False).requests == 0
    assert llm.engine.steps == 0 and sink.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        b"my notes",
        b'{"prompt": "an input"}\n',
        b"[1]\n",
        b'{"id": "a", "torn\n{"id": "b"}\n',
        b"\n",
    ],
)
def test_resume_leaves_a_file_alone_that_is_no_output(tmp_path, content):
    (tmp_path / "out.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match="line 1 is not a record of a batch job; nothing was changed"):
        run(tmp_path, [{"prompt": "x"}], resume=True)
    assert (tmp_path / "out.jsonl").read_bytes() == content


def child(directory):
    """A job in a process of its own, slow enough to be killed in the middle."""
    llm = FakeLLM(delay_s=0.002)
    run_batch(llm, Path(directory) / "in.jsonl", Path(directory) / "out.jsonl", resume=True, use_tqdm=False)


CHILD = """
import sys, types
package = types.ModuleType("jpaged")  # without the rest of the package, which takes seconds to import
package.__path__ = [sys.argv[1] + "/jpaged"]
sys.modules["jpaged"] = package
sys.path.insert(0, sys.argv[1] + "/tests")
import test_offline
test_offline.child(sys.argv[2])
"""


def test_killed_again_and_again_it_ends_with_the_records_of_an_uninterrupted_run(tmp_path, uninterrupted):
    rng = random.Random(5)
    sink = tmp_path / "out.jsonl"
    kills = 0
    while True:
        process = subprocess.Popen([sys.executable, "-c", CHILD, str(ROOT), str(tmp_path)])
        goal = (sink.stat().st_size if sink.exists() else 0) + rng.randrange(1, 6000)
        while process.poll() is None and not (sink.exists() and sink.stat().st_size >= goal):
            time.sleep(0.0005)
        if kills < 5:
            process.send_signal(signal.SIGKILL)
            kills += 1
        if process.wait() == 0:
            break
    assert by_id(sink) == uninterrupted
    assert kills >= 2


# --------------------------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_ends_cleanly_and_resume_continues(tmp_path, uninterrupted):
    sink = tmp_path / "out.jsonl"
    llm = FakeLLM()
    written = []

    def on_record(record):
        written.append(record["id"])
        if len(written) == 20:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    summary = run_batch(llm, tmp_path / "in.jsonl", sink, use_tqdm=False, on_record=on_record)
    assert signal.getsignal(signal.SIGINT) is before
    assert summary.interrupted and summary.exit_code == 130
    assert "--resume continues" in summary.describe()
    assert llm.engine.requests == {} and 20 <= len(written) < 63
    assert by_id(sink) == {record_id: uninterrupted[record_id] for record_id in written}
    summary = run_batch(llm, tmp_path / "in.jsonl", sink, use_tqdm=False, resume=True)
    assert by_id(sink) == uninterrupted and not summary.interrupted


def test_a_second_ctrl_c_raises(tmp_path):
    llm = FakeLLM()

    def on_step():
        if llm.engine.steps < 3:
            os.kill(os.getpid(), signal.SIGINT)

    llm.engine.on_step = on_step
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, LINES, llm=llm)
    assert len(by_id(tmp_path / "out.jsonl")) < 63


def test_a_failing_step_leaves_the_engine_empty_and_the_file_good(tmp_path, uninterrupted):
    llm = FakeLLM()

    def on_step():
        if llm.engine.steps == 5:
            raise RuntimeError("device")

    llm.engine.on_step = on_step
    sink = tmp_path / "out.jsonl"
    with pytest.raises(RuntimeError, match="device"):
        run_batch(llm, tmp_path / "in.jsonl", sink, use_tqdm=False)
    assert llm.engine.requests == {} and 0 < len(by_id(sink)) < 63
    run_batch(llm, tmp_path / "in.jsonl", sink, use_tqdm=False, resume=True)
    assert by_id(sink) == uninterrupted


def test_it_runs_outside_the_main_thread(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(run(tmp_path, [{"prompt": "x"}])[1].requests))
    thread.start()
    thread.join()
    assert results == [1]


# --------------------------------------------------------------------------------------- script


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("generate_batch", ROOT / "scripts" / "generate_batch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    calls = []

    def make(model, **options):
        calls.append((model, options))
        return FakeLLM(max_num_seqs=options["max_num_seqs"] or 4)

    monkeypatch.setattr(module, "LLM", make)
    module.calls = calls
    return module


def test_the_script_runs_the_bundled_prompts_and_prints_answers_and_a_summary(script, tmp_path, capsys):
    sink = tmp_path / "out.jsonl"
    prompts = ROOT / "scripts" / "prompts.jsonl"
    arguments = ["--model", "m", "--input", str(prompts), "--output", str(sink), "--print"]
    # The fake's prompts are bytes and it takes at most 50 of them.
    lines = [json.loads(line) for line in prompts.read_text().splitlines()]
    fitting = [line["id"] for line in lines if len("".join(m["content"] for m in line["messages"])) <= 50]
    assert lines[0]["messages"] == [{"role": "user", "content": "What is the capital of France?"}]
    assert len(lines) == 8 and all(
        line["temperature"] == 0 and 64 <= line["max_tokens"] <= 96 for line in lines
    )
    assert script.main([*arguments, "--deterministic", "--dtype", "float32", "--max-num-seqs", "2"]) == 1
    records = {record_id: json.loads(raw) for record_id, raw in by_id(sink).items()}
    assert sorted(record_id for record_id in records if not records[record_id]["error"]) == sorted(fitting)
    shown = capsys.readouterr().out
    answer = records["capital"]["response"]["body"]["choices"][0]["message"]["content"]
    assert (
        f"[capital] {answer}\n" in shown and "output tokens/s" in shown and "KV waste         12.5%" in shown
    )
    assert script.calls == [
        (
            "m",
            {
                "dtype": "float32", "quantization": None, "kv_cache_dtype": "auto", "max_model_len": None,
                "max_num_seqs": 2, "max_num_batched_tokens": None, "kv_cache_memory_bytes": None,
                "deterministic": True, "seed": 0,
            },
        )
    ]  # fmt: skip


def test_the_scripts_exit_code_tells_what_happened(script, tmp_path, capsys, monkeypatch):
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    arguments = ["--model", "m", "--input", str(source), "--output", str(sink)]
    assert script.main(arguments) == 2
    assert script.calls == [] and "in.jsonl" in capsys.readouterr().err
    source.write_bytes(b"")
    assert script.main(arguments) == 0
    source.write_bytes(dump([{"prompt": "x"}]))
    assert script.main(arguments) == 0
    assert script.main(arguments) == 2
    assert "continue it with --resume" in capsys.readouterr().err
    source.write_bytes(dump([{"prompt": "x"}, b"bad\n"]))
    assert script.main([*arguments, "--resume"]) == 1
    assert script.main([*arguments, "--resume"]) == 1
    monkeypatch.setattr(script, "run_batch", lambda *args, **kwargs: BatchSummary(interrupted=True))
    assert script.main([*arguments, "--resume"]) == 130


def test_the_summary_counts_rates_from_what_was_produced():
    summary = BatchSummary(requests=3, errors=1, prompt_tokens=100, output_tokens=50, elapsed_s=2.0)
    assert summary.output_tokens_per_s == 25.0
    assert BatchSummary().output_tokens_per_s == 0.0
    assert summary.describe().splitlines() == [
        "requests         3 (1 errors)",
        "prompt tokens    100",
        "output tokens    50",
        "elapsed          2.00 s (compilation included)",
        "output tokens/s  25.0",
    ]
