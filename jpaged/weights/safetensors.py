"""Checkpoints in the Hugging Face layout: a directory with `config.json` and safetensors files.

Owns the layout of the directory and of the files. Which tensor goes where is `names`'s business,
checks and conversion are `assemble`'s, matrices that are stored quantized `hf_quantized`'s.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from jpaged.config import ModelConfig
from jpaged.models.transformer import Params
from jpaged.weights import names
from jpaged.weights.assemble import SourceTensor, assemble
from jpaged.weights.hf_quantized import Scheme, read_scheme, stored_matrices

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""A directory without any of these has no tokenizer."""

_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}


@dataclasses.dataclass(frozen=True)
class HfCheckpoint:
    """A Hugging Face directory. Opening it reads `config.json`; weights are read when asked for.

    Attributes:
      scheme: how its matrices are quantized; `None` if they are floats.
    """

    path: Path
    config: ModelConfig
    scheme: Scheme | None = None

    @classmethod
    def open(cls, path: Path) -> HfCheckpoint:
        """Reads the configuration of the directory `path`.

        Raises:
          ValueError: the configuration is missing, broken or not supported.
        """
        found = _read_json(path / "config.json").get("quantization_config")
        return cls(path, read_config(path), read_scheme(found) if found else None)

    def load_params(self, dtype: str | None = None, quantization: str | None = None) -> Params:
        """The parameters in `dtype` (default: the checkpoint's). What is stored quantized stays so.

        Raises:
          ValueError: see `assemble` and `hf_quantized`; or `quantization` is asked of a checkpoint that is
            quantized already.
        """
        dtype = dtype or self.config.dtype
        targets = names.targets(self.config, "hf")
        found = tensors(self.path)
        if self.scheme is None:
            return assemble(self.config, dtype, found, targets, quantization)
        if quantization is not None:
            raise ValueError(
                f"{quantization=} is not supported for a checkpoint that is quantized already "
                f"(quant_method={self.scheme.method!r}); load it without"
            )
        return assemble(self.config, dtype, stored_matrices(found, targets, self.scheme), targets)

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The directory's tokenizer, or `None` if it has none. Remote code is never run."""
        return load_tokenizer(self.path)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a Hugging Face directory, or `None` if it has none."""
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def read_config(path: Path) -> ModelConfig:
    """The model's configuration; `generation_config.json` may add ids that end a sequence.

    Raises:
      ValueError: a file is missing or broken, or the model is not supported.
    """
    found = _read_json(path / "config.json")
    found.pop("quantization_config", None)  # `read_scheme` reads it: it says nothing about the model
    config = ModelConfig.from_hf(found)
    extra = path / "generation_config.json"
    if not extra.exists():
        return config
    ids = _read_json(extra).get("eos_token_id")
    if ids is None:
        return config
    merged = dict.fromkeys((*config.eos_token_ids, *(ids if isinstance(ids, list) else [ids])))
    return config.replace(eos_token_ids=tuple(merged))


def tensors(path: Path) -> list[SourceTensor]:
    """Every tensor of the checkpoint in directory `path`.

    Where there is an index it alone decides: each tensor is taken from the file that the index
    names for it, and what else lies in that file or in other files is not looked at. Without one,
    every `*.safetensors` file counts, and a tensor that two of them hold is listed twice.

    Raises:
      ValueError: there is no such file, a file is broken, or the index names a file or a tensor
        that is not there.
    """
    index = path / INDEX
    if not index.exists():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ValueError(
                f"{path} has no *.safetensors file; other weight formats are not read from a directory"
            )
        return [tensor for file in files for tensor in read_header(file)]
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map")
    found = []
    for file_name in sorted(set(weight_map.values())):
        if Path(file_name).name != file_name:
            raise ValueError(f"{index} names the file {file_name!r}; a plain file name is expected")
        if not (path / file_name).exists():
            raise ValueError(f"{index} names the file {file_name}, which is not there")
        here = {tensor.name: tensor for tensor in read_header(path / file_name)}
        wanted = sorted(name for name, file in weight_map.items() if file == file_name)
        missing = [name for name in wanted if name not in here]
        if missing:
            raise ValueError(f"{index} says that {file_name} holds {', '.join(missing[:8])}; it does not")
        found += [here[name] for name in wanted]
    return found


def read_header(file: Path) -> list[SourceTensor]:
    """The tensors of one safetensors file. The data stays in the file until it is asked for.

    Source: the format's description in the safetensors repository (`README.md`, "Format").

    Raises:
      ValueError: the file does not follow the format.
    """
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if not 2 <= length <= min(size - 8, 100_000_000):
            raise ValueError(f"{file} is not a safetensors file, or is cut off: header length {length}")
        header = _parse_json(f.read(length), file)
    header.pop("__metadata__", None)
    return [_tensor(file, 8 + length, size, name, entry) for name, entry in header.items()]


def _tensor(file: Path, data: int, size: int, name: str, entry: dict[str, Any]) -> SourceTensor:
    try:
        shape, (begin, end), dtype = tuple(entry["shape"]), entry["data_offsets"], _DTYPES.get(entry["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is broken at tensor {name}: {entry!r}") from error
    is_valid = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and begin <= end <= size - data
    if not is_valid or (dtype is not None and end - begin != math.prod(shape) * dtype.itemsize):
        raise ValueError(f"{file} is broken or cut off at tensor {name}: {entry!r}")

    def read(start: int, stop: int) -> np.ndarray:
        if dtype is None:
            raise ValueError(
                f"tensor {name} in {file.name} has dtype {entry['dtype']}; supported: {', '.join(_DTYPES)}"
            )
        row = math.prod(shape[1:])
        offset = data + begin + start * row * dtype.itemsize
        return np.fromfile(file, dtype, (stop - start) * row, offset=offset).reshape(stop - start, *shape[1:])

    return SourceTensor(name, shape, read, file.name)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise ValueError(f"{file} is missing")
    return _parse_json(file.read_bytes(), file)


def _parse_json(text: bytes, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file} is broken: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} is broken: a JSON object is expected")
    return value
