"""Checkpoints in one GGUF file, as llama.cpp reads them.

Owns the file's layout, the meaning of its metadata as a `ModelConfig`, and the dequantization of
its tensors (done by the `gguf` package). The tokenizer inside is `tokenizer_gguf`'s business, names
are `names`'s, checks and conversion `assemble`'s.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from jpaged.config import AS_STORED, ModelConfig, RopeConfig, check_int
from jpaged.models.transformer import MATRICES, Params
from jpaged.ops.layers import rope_frequencies
from jpaged.weights import names
from jpaged.weights.assemble import HostMatrix, Source, SourceTensor, StoredMatrix, assemble
from jpaged.weights.names import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TENSOR_TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
"""The tensor types that are read; every other one is refused by name."""

STORED_TYPES = ("Q4_0", "Q4_1", "Q8_0")
"""The types that `quantization="gguf"` keeps as they are."""

BLOCK = 32
"""Values of a row that share a scale in each of `STORED_TYPES`."""

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`general.architecture` -> the family. Mistral models are stored as `llama`."""


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. `shape` is the usual one, rows first; `type_id` is ggml's number."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """The head of a file: metadata by key, tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


@dataclasses.dataclass(frozen=True)
class GgufCheckpoint:
    """A GGUF file. Opening it reads its head; weights are read when asked for."""

    file: GgufFile
    config: ModelConfig

    @classmethod
    def open(cls, path: Path) -> GgufCheckpoint:
        """Reads the head of the file `path`.

        Raises:
          ValueError: the file is broken or cut off, or the model is not supported.
          ImportError: the `gguf` package is not installed.
        """
        _package()  # the tensors need it, so say so before anything is done
        file = read_file(path)
        return cls(file, read_config(file))

    def load_params(self, dtype: str | None = None, quantization: str | None = None) -> Params:
        """The parameters in `dtype` (default: bfloat16), dequantized unless `quantization` is given.

        `quantization="gguf"` keeps the layers' matrices as the file has them where it can: see `stored`.

        Raises:
          ValueError: see `assemble` and `stored`.
        """
        dtype = dtype or self.config.dtype
        targets = names.targets(
            self.config, "gguf", rotary_interleaved=self.file.metadata["general.architecture"] == "llama"
        )
        if quantization == AS_STORED:
            return assemble(self.config, dtype, stored(self.file, targets), targets)
        return assemble(self.config, dtype, tensors(self.file), targets, quantization)

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer that the file describes, or `None` if it describes none."""
        from jpaged.weights.tokenizer_gguf import build_tokenizer

        return build_tokenizer(self.file.metadata)


# ---------------------------------------------------------------------------------------------
# The file. Source: the format's specification, `docs/gguf.md` in the ggml repository.


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

MAX_NESTING = 8
"""Arrays within arrays that metadata may hold."""

MAX_AXES = 4
"""Of a tensor, as in ggml."""


def read_file(path: Path) -> GgufFile:
    """Reads the head of a GGUF file (version 2 or 3, little-endian).

    Raises:
      ValueError: the file is not one, is broken or cut off, or is one part of a split model; the message
        names the file, and what of its head is broken.
    """
    with path.open("rb") as f:
        if f.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        head, place = _Head(f, path.stat().st_size - 4), "its start"
        try:
            version, num_tensors, num_keys = head.unpack("IQQ")
            if version not in (2, 3):
                raise ValueError(
                    f"GGUF version {version} is not supported (or the file is big-endian); supported: 2, 3"
                )
            metadata = {}
            for _ in range(num_keys):
                place = f"the key after {place}"
                key = head.string()
                place = key
                (type_id,) = head.unpack("I")
                metadata[key] = head.value(type_id)
            place = "the list of its tensors"
            heads = [head.tensor() for _ in range(num_tensors)]
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is broken or cut off at {place}: {error!r}") from error
        end = f.tell()
    alignment, parts = metadata.get("general.alignment", 32), metadata.get("split.count", 1)
    check_int(f"{path}: general.alignment", alignment, low=1)
    check_int(f"{path}: split.count", parts, low=0)
    if parts > 1:
        raise ValueError(f"{path} is one of {parts} parts; merge them into one file first")
    data = -(-end // alignment) * alignment
    found = {t.name: dataclasses.replace(t, offset=data + t.offset) for t in heads}
    if len(found) != len(heads):
        raise ValueError(f"{path} holds a tensor of the same name twice")
    return GgufFile(path, metadata, found)


class _Head:
    """Reads a file's head piece by piece, and nothing that would end beyond the file.

    What is broken raises `struct.error`, `KeyError` or `UnicodeDecodeError`.
    """

    def __init__(self, file: BinaryIO, left: int) -> None:
        self._file, self._left = file, left

    def _take(self, size: int) -> bytes:
        if size > self._left:
            raise struct.error(f"{size} bytes are needed, {self._left} are left")
        self._left -= size
        return self._file.read(size)

    def unpack(self, codes: str) -> tuple[Any, ...]:
        return struct.unpack("<" + codes, self._take(struct.calcsize("<" + codes)))

    def string(self) -> str:
        (size,) = self.unpack("Q")
        return self._take(size).decode()

    def value(self, type_id: int, depth: int = 0) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            return self.unpack(_SCALARS[type_id])[0]
        if depth == MAX_NESTING:
            raise struct.error(f"arrays are nested deeper than {MAX_NESTING}")
        item, count = self.unpack("IQ")
        if item in _SCALARS:
            code = _SCALARS[item]
            content = self._take(count * struct.calcsize("<" + code))
            return list(struct.unpack(f"<{count}{code}", content))
        return [self.value(item, depth + 1) for _ in range(count)]

    def tensor(self) -> GgufTensor:
        name = self.string()
        (axes,) = self.unpack("I")
        if not 1 <= axes <= MAX_AXES:
            raise struct.error(f"tensor {name} has {axes} axes, must have 1 to {MAX_AXES}")
        shape = self.unpack(f"{axes}Q")
        return GgufTensor(name, shape[::-1], *self.unpack("IQ"))


# ---------------------------------------------------------------------------------------------
# Tensors


def tensors(file: GgufFile) -> list[SourceTensor]:
    """Every tensor of the file, dequantized to float32 when it is read.

    Raises:
      ValueError: a tensor's type is not supported, or the file is cut off.
      ImportError: the `gguf` package is not installed.
    """
    size = file.path.stat().st_size
    return [_source(file, tensor, size) for tensor in file.tensors.values()]


def stored(file: GgufFile, targets: Mapping[str, Target]) -> list[Source]:
    """Every tensor of the file; matrices of layers as they are stored, where all parts of one allow it.

    A matrix stays quantized if the tensors that fill it (q, k and v; gate and up) have one and the same type
    of `STORED_TYPES`; any other is dequantized, and the log names its tensors.

    Raises:
      ValueError: no matrix of the file stays quantized; or see `tensors`.
    """
    kinds: dict[str, set[str]] = {}
    for name, target in targets.items():
        if target.field in MATRICES and len(target.leaf_shape) == 2 and name in file.tensors:
            kinds.setdefault(target.leaf, set()).add(_type_name(file.tensors[name]))
    kept = {leaf for leaf, types in kinds.items() if len(types) == 1 and types <= set(STORED_TYPES)}
    if not kept:
        found = ", ".join(sorted(set().union(*kinds.values())))
        raise ValueError(
            f"quantization={AS_STORED!r}: no matrix of {file.path.name} is wholly one of "
            f"{', '.join(STORED_TYPES)}; its types: {found}"
        )
    sources: list[Source] = []
    for source in tensors(file):
        leaf = targets[source.name].leaf if source.name in targets else ""
        if leaf in kept:
            read = functools.partial(_read_stored, file, file.tensors[source.name])
            sources.append(StoredMatrix(source.name, source.shape, read, source.origin))
            continue
        if leaf in kinds:
            logger.info("%s (%s) is dequantized", source.name, _type_name(file.tensors[source.name]))
        sources.append(source)
    return sources


def _type_name(tensor: GgufTensor) -> str:
    known = {member.value: member.name for member in _package().GGMLQuantizationType}
    return known.get(tensor.type_id, str(tensor.type_id))


def _read_stored(file: GgufFile, tensor: GgufTensor) -> HostMatrix:
    """A tensor of one of `STORED_TYPES`; columns are the tensor's rows.

    A block's 16 bytes of 4-bit values are laid out as `QuantizedMatrix` has them: the first half of its
    values in the low bits.
    """
    kind = _type_name(tensor)
    columns, rows = tensor.shape
    groups = rows // BLOCK
    head, values = {"Q4_0": (2, 16), "Q4_1": (4, 16), "Q8_0": (2, 32)}[kind]
    size = columns * groups * (head + values)
    raw = np.fromfile(file.path, np.uint8, size, offset=tensor.offset).reshape(columns, groups, head + values)
    heads = np.ascontiguousarray(raw[..., :head]).view("<f2")  # [columns, groups, 1 or 2]
    data, scale, zero = raw[..., head:], heads[..., 0], None
    if kind == "Q4_0":
        zero = np.full(scale.shape, 8, np.uint8)
    elif kind == "Q4_1":
        data, scale, zero = _without_minimum(data, scale.astype(np.float32), heads[..., 1].astype(np.float32))
    else:
        data = data.view(np.int8)
    return HostMatrix(
        data=data.reshape(columns, -1).T,
        scale=scale.T,
        zero=None if zero is None else zero.T,
        bits=8 if kind == "Q8_0" else 4,
        group=BLOCK,
    )


def _without_minimum(
    data: np.ndarray, scale: np.ndarray, minimum: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`q * scale + minimum` as `(q - zero) * scale`; a block without a scale holds its minimum alone."""
    flat = scale == 0
    data = np.where(flat[..., None], np.uint8(0), data)
    zero = -minimum / np.where(flat, np.float32(1), scale)
    return data, np.where(flat, minimum, scale), np.where(flat, np.float32(-1), zero)


def _source(file: GgufFile, tensor: GgufTensor, file_size: int) -> SourceTensor:
    package = _package()
    name = _type_name(tensor)
    if name not in TENSOR_TYPES:
        raise ValueError(f"tensor {tensor.name} has type {name}; supported: {', '.join(TENSOR_TYPES)}")
    kind = package.GGMLQuantizationType(tensor.type_id)
    block, block_bytes = package.GGML_QUANT_SIZES[kind]
    if tensor.shape[-1] % block:
        raise ValueError(
            f"tensor {tensor.name} has rows of {tensor.shape[-1]}, not a multiple of {name}'s {block}"
        )
    row_bytes = tensor.shape[-1] // block * block_bytes
    rows = math.prod(tensor.shape[:-1])
    if tensor.offset + rows * row_bytes > file_size:
        raise ValueError(f"{file.path} is cut off: tensor {tensor.name} ends beyond it")

    def read(start: int, stop: int) -> np.ndarray:
        if len(tensor.shape) == 1:  # vectors are short: read whole
            return _dequantize(package, file.path, tensor.offset, kind, (1, row_bytes))[0, start:stop]
        offset = tensor.offset + start * row_bytes
        return _dequantize(package, file.path, offset, kind, (stop - start, row_bytes))

    return SourceTensor(tensor.name, tensor.shape, read, file.path.name)


def _dequantize(package: Any, path: Path, offset: int, kind: Any, shape: tuple[int, int]) -> np.ndarray:
    raw = np.fromfile(path, np.uint8, math.prod(shape), offset=offset).reshape(shape)
    if kind.name in ("F32", "F16"):
        return raw.view(np.float32 if kind.name == "F32" else np.float16)
    return package.quants.dequantize(raw, kind)


@functools.cache
def _package() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise ImportError('GGUF files need the gguf package: pip install "jpaged[gguf]"') from error
    return gguf


# ---------------------------------------------------------------------------------------------
# Configuration


_HARMLESS = {
    "vocab_size",  # the embedding's rows count
    "rope.scaling.finetuned",
    "attention.layer_norm_epsilon",
    "attention.causal",
}
"""Keys that say nothing the forward pass needs, beside those that `read_config` takes."""


class _Keys:
    """The metadata under `{architecture}.`, remembering which keys were asked for."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        prefix = architecture + "."
        self._values = {
            key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
        }
        self._prefix = prefix
        self._path = file.path
        self._asked = set(_HARMLESS)

    def get(self, name: str, default: Any = None) -> Any:
        self._asked.add(name)
        return self._values.get(name, default)

    def required(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ValueError(f"the GGUF file has no {self._prefix}{name}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1; required where there is no default."""
        value = self.required(name) if default is None else self.get(name, default)
        check_int(f"{self._path}: {self._prefix}{name}", value, low=1)
        return value

    def per_layer(self, name: str, default: int | None = None) -> int:
        """As `integer`, possibly given once for each layer."""
        value = self.get(name)
        if not isinstance(value, list):
            return self.integer(name, default)
        self.refuse(name, unless=bool(value) and all(item == value[0] for item in value))
        check_int(f"{self._path}: {self._prefix}{name}[0]", value[0], low=1)
        return value[0]

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; required where there is no default."""
        value = self.required(name) if default is None else self.get(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ValueError(f"{self._path}: {self._prefix}{name}={value!r} must be a finite number")
        return float(value)

    def refuse(self, name: str, *, unless: bool) -> None:
        if self.get(name) is not None and not unless:
            raise ValueError(f"GGUF metadata {self._prefix}{name}={self.get(name)!r} is not supported")

    def refuse_the_rest(self) -> None:
        """Raises for keys that nothing asked for: an unknown feature is never ignored."""
        rest = sorted(self._values.keys() - self._asked)
        if rest:
            raise ValueError(
                f"GGUF metadata {', '.join(self._prefix + key for key in rest)} is not supported"
            )


def read_config(file: GgufFile) -> ModelConfig:
    """The model's configuration. The checkpoint's dtype counts as bfloat16, whatever is quantized.

    Raises:
      ValueError: a required key is missing, or the file describes something that is not supported;
        the message names the key.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: general.architecture={architecture!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    keys = _Keys(file, architecture)
    hidden = keys.integer("embedding_length")
    heads = keys.per_layer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    keys.refuse("attention.value_length", unless=keys.get("attention.value_length") == head_dim)
    keys.refuse("rope.dimension_count", unless=keys.get("rope.dimension_count") == head_dim)
    for name in ("expert_count", "expert_used_count", "attention.sliding_window"):
        keys.refuse(name, unless=keys.get(name) == 0)
    config = ModelConfig(
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=keys.per_layer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=heads,
        num_kv_heads=keys.per_layer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=keys.integer("context_length"),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, keys, head_dim),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        dtype="bfloat16",
        eos_token_ids=_token_ids(file, "eos", "eot", "eom"),  # the end of a text, a turn, a message
        bos_token_id=next(iter(_token_ids(file, "bos")), None),
        architecture=ARCHITECTURES[architecture],
    )
    keys.refuse_the_rest()
    return config


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError("the GGUF file has no tensor token_embd.weight")
    return embedding.shape[0]


def _token_ids(file: GgufFile, *names: str) -> tuple[int, ...]:
    """Ids of the special tokens `names`, as far as the file has them."""
    found = {}
    for name in names:
        key = f"tokenizer.ggml.{name}_token_id"
        if key in file.metadata:
            check_int(f"{file.path}: {key}", file.metadata[key])
            found[file.metadata[key]] = True
    return tuple(found)


def _rope(file: GgufFile, keys: _Keys, head_dim: int) -> RopeConfig:
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.get("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", 0.0)
    original = keys.integer("context_length")
    if keys.get("rope.scaling.original_context_length"):  # 0: not set
        original = keys.integer("rope.scaling.original_context_length")
    keys.refuse("rope.scale_linear", unless=keys.get("rope.scale_linear") == 1.0)
    base = RopeConfig(theta=theta, original_max_position=original)
    if "rope_freqs.weight" in file.tensors:
        keys.refuse("rope.scaling.type", unless=kind == "none")
        return _llama3_rope(file, base, head_dim)
    if kind == "none":
        keys.refuse("rope.scaling.factor", unless=factor in (0.0, 1.0))
        return base
    keys.refuse("rope.scaling.type", unless=kind in ("linear", "yarn"))
    if factor <= 0:
        raise ValueError(f"GGUF rope scaling {kind!r} needs a factor above 0, not {factor}")
    scaled = dataclasses.replace(base, kind=kind, factor=factor)
    return _yarn(keys, scaled) if kind == "yarn" else scaled


def _yarn(keys: _Keys, base: RopeConfig) -> RopeConfig:
    """llama.cpp multiplies the usual attention factor by its own; the rest are the usual names."""
    keys.refuse("rope.scaling.yarn_ext_factor", unless=keys.get("rope.scaling.yarn_ext_factor") == 1.0)
    keys.refuse(
        "rope.scaling.yarn_log_multiplier", unless=keys.get("rope.scaling.yarn_log_multiplier") == 0.0
    )
    scale = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
    return dataclasses.replace(
        base,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=None if scale == 1.0 else scale * (0.1 * math.log(base.factor) + 1.0),
    )


def _llama3_rope(file: GgufFile, base: RopeConfig, head_dim: int) -> RopeConfig:
    """The `llama3` rope whose frequencies the tensor `rope_freqs.weight` describes.

    The tensor holds what each default frequency is divided by. Only parameters that give the same
    divisors again are accepted: the largest divisor is the factor, and the original length is found
    by trial among the powers of two, with the published low and high frequency factors 1 and 4.

    Raises:
      ValueError: no parameters give these divisors.
    """
    (source,) = [t for t in tensors(file) if t.name == "rope_freqs.weight"]
    divisors = source.read(0, source.shape[0]).astype(np.float64)
    plain = rope_frequencies(base, head_dim)[0]
    if divisors.shape == plain.shape:
        if np.all(divisors == 1):
            return base
        factor = float(divisors.max())
        for original in (base.original_max_position, *(2**n for n in range(9, 21))):
            rope = dataclasses.replace(base, kind="llama3", factor=factor, original_max_position=original)
            scaled = rope_frequencies(rope, head_dim)[0].astype(np.float64)
            if np.allclose(plain / scaled, divisors, rtol=1e-5):
                return rope
    raise ValueError("GGUF tensor rope_freqs.weight is not a llama3 rope scaling; others are not supported")
