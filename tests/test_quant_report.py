"""The quality report on a tiny model: nothing is found where nothing is quantized, and more where more is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny_config, tiny_params

SCRIPT = Path(__file__).parents[1] / "scripts" / "quant_report.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("quant_report", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compare(script):
    config = tiny_config(max_position_embeddings=128)
    params = tiny_params(config)
    ids = np.random.default_rng(0).integers(3, 301, 700).tolist()

    def run(kv_cache_dtype: str) -> dict:
        return script.compare(config, params, params, ids, kv_cache_dtype, window=96)

    return run


def test_a_run_agrees_with_itself(compare):
    report = compare("auto")
    assert report["tokens"] == 7 * 95
    assert report["perplexity"] == report["reference_perplexity"] > 1
    assert report["kl"] == pytest.approx(0, abs=1e-6) and report["top1_agreement"] == 100
    assert report["greedy_divergence"] == [64] * 8
    assert report["worst_attention_error"] == 0
    assert report["kv_bytes_saved_percent"] == report["weight_bytes_saved_percent"] == 0


def test_fewer_bits_differ_more_and_save_more(compare):
    int8, int4 = compare("int8"), compare("int4")
    assert 0 < int8["kl"] < int4["kl"] < 0.1
    assert 0 < int8["worst_attention_error"] < int4["worst_attention_error"] < 0.2
    assert int4["top1_agreement"] <= int8["top1_agreement"] < 100.1
    assert 50 < int8["kv_bytes_saved_percent"] < int4["kv_bytes_saved_percent"] < 90
    assert int8["worst_layer"] in (0, 1) and int8["worst_kv_head"] in (0, 1)


def test_windows_and_arguments_that_cannot_be_are_refused(script, capsys):
    with pytest.raises(ValueError, match="the text has 70 tokens, at least window=80 are needed"):
        script.compare(tiny_config(), None, None, [5] * 70, "int8", window=80)
    for window, limit in ((1, "at least 2"), (513, "at most 512")):
        with pytest.raises(ValueError, match=f"window={window} must be {limit}"):
            script.compare(tiny_config(), None, None, [5] * 700, "int8", window=window)
    assert script.main(["--model", "/nowhere"]) == 2
    assert script.main(["--model", "/nowhere", "--max-tokens", "-1"]) == 2
    assert "error: max_tokens=-1 must be at least 1" in capsys.readouterr().err
