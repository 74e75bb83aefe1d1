"""Matrices that a Hugging Face checkpoint holds quantized: GPTQ, AWQ, compressed-tensors (pack-quantized).

Owns the meaning of `quantization_config` and the layouts of the tensors that stand for one matrix; turns
them into a `HostMatrix`, whose integers, scales and zero points are those of the file. Layouts as
AutoGPTQ, GPTQModel, AutoAWQ and compressed-tensors write them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jpaged.config import check_int
from jpaged.ops.quantized import pack_int4
from jpaged.weights.assemble import HostMatrix, Source, SourceTensor, StoredMatrix
from jpaged.weights.names import Target

METHODS = ("gptq", "awq", "compressed-tensors")

BITS = (4, 8)

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of its eight columns each 4 bits of an AWQ word hold, from the lowest bits on."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the matrices of a checkpoint are quantized. Which ones are is seen by their tensors.

    Attributes:
      method: one of `METHODS`.
      bits: of a value, 4 or 8.
      group_size: input rows that share a scale; -1: all of them.
      has_order: whether the tensor `g_idx` must say which group a row belongs to.
      zeros_less_one: zero points are stored less one (the first GPTQ format).
      symmetric: no zero points are stored; the zero is half of the range.
    """

    method: str
    bits: int
    group_size: int
    has_order: bool = False
    zeros_less_one: bool = False
    symmetric: bool = False


def read_scheme(config: Mapping[str, Any]) -> Scheme:
    """The scheme that a `quantization_config` describes.

    Raises:
      ValueError: it is not one of those above; the message names field, value and what is supported.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config={config!r} must be a mapping")
    method = str(config.get("quant_method", "")).lower()
    if method not in METHODS:
        _refuse("quant_method", config.get("quant_method"), ", ".join(METHODS))
    return {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors}[method](config)


def _gptq(config: Mapping[str, Any]) -> Scheme:
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    _allow("checkpoint_format", str(layout).lower(), ("gptq", "gptq_v2"))
    _allow("is_marlin_format", config.get("is_marlin_format", False), (False,))
    for field in ("adapter", "rotation"):  # each changes what the matrices compute
        if config.get(field):
            _refuse(field, config[field], "none")
    for pattern in _mapping(
        "dynamic", config.get("dynamic")
    ):  # "-:" leaves a module alone, which its tensors say too
        if not str(pattern).startswith("-:"):
            _refuse("dynamic", config["dynamic"], "one scheme for all quantized modules")
    return Scheme(
        "gptq",
        _allow("bits", config.get("bits"), BITS),
        _group_size(config.get("group_size"), config.get("bits")),
        has_order=_flag("desc_act", config.get("desc_act", False)),
        zeros_less_one=str(layout).lower() == "gptq",
    )


def _awq(config: Mapping[str, Any]) -> Scheme:
    version = config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm"
    _allow("version", str(version).lower(), ("gemm",))
    if config.get("backend") == "llm-awq":
        _refuse("backend", "llm-awq", "checkpoints of AutoAWQ")
    _allow("zero_point", config.get("zero_point", True), (True,))
    bits = _allow("bits", config.get("bits", config.get("w_bit", 4)), (4,))
    return Scheme("awq", bits, _group_size(config.get("group_size", config.get("q_group_size")), bits))


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    _allow("format", config.get("format"), ("pack-quantized",))
    _allow("quantization_status", config.get("quantization_status") or "compressed", ("compressed", "frozen"))
    _allow("kv_cache_scheme", config.get("kv_cache_scheme"), (None,))
    sparsity = _mapping("sparsity_config", config.get("sparsity_config"))
    _allow("sparsity_config.format", sparsity.get("format", "dense"), ("dense",))
    if config.get("transform_config"):
        _refuse("transform_config", config["transform_config"], "none")
    groups = _mapping("config_groups", config.get("config_groups"))
    if len(groups) != 1:
        _refuse("config_groups", list(groups), "one scheme for all quantized modules")
    ((name, group),) = groups.items()
    group = _mapping(f"config_groups.{name}", group)
    prefix = f"config_groups.{name}."
    for field in ("input_activations", "output_activations"):
        _allow(prefix + field, group.get(field), (None,))
    _allow(prefix + "format", group.get("format") or "pack-quantized", ("pack-quantized",))
    weights, prefix = _mapping(prefix + "weights", group.get("weights")), prefix + "weights."
    _allow(prefix + "type", weights.get("type", "int"), ("int",))
    _allow(prefix + "dynamic", weights.get("dynamic", False), (False,))
    bits = _allow(prefix + "num_bits", weights.get("num_bits"), BITS)
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("channel" if size in (None, -1) else "group")
    _allow(prefix + "strategy", strategy, ("group", "channel"))
    if strategy == "channel":
        size = _allow(prefix + "group_size", -1 if size is None else size, (-1,))
    return Scheme(
        "compressed-tensors",
        bits,
        _group_size(size, bits),
        has_order=weights.get("actorder") in ("group", "dynamic", True),
        symmetric=_flag(prefix + "symmetric", weights.get("symmetric", True)),
    )


def _group_size(value: Any, bits: int | None) -> int:
    if value == -1:
        return -1
    check_int("quantization_config.group_size", value, low=1)
    if bits == 4 and value % 2:
        _refuse("group_size", value, "even numbers, or -1 for all rows")
    return value


def _mapping(field: str, value: Any) -> Mapping[str, Any]:
    """A field that holds fields; none where it is `None`."""
    if value is not None and not isinstance(value, Mapping):
        _refuse(field, value, "a mapping")
    return value or {}


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(field, value, "true and false")
    return value


def _allow(field: str, value: Any, choices: Sequence[Any]) -> Any:
    if value not in choices:
        _refuse(field, value, ", ".join(map(str, choices)))
    return choices[choices.index(value)]


def _refuse(field: str, value: Any, supported: str) -> None:
    raise ValueError(f"quantization_config.{field}={value!r} is not supported; supported: {supported}")


# ---------------------------------------------------------------------------------------------
# Tensors


def stored_matrices(
    tensors: Iterable[SourceTensor], targets: Mapping[str, Target], scheme: Scheme
) -> list[Source]:
    """The tensors of a checkpoint, with those that stand for one matrix put together.

    Args:
      tensors: what the checkpoint has.
      targets: where float tensors go, by name.
      scheme: how matrices are quantized.

    Raises:
      ValueError: a part of a matrix is missing or there twice, or has a shape that does not fit; the message
        names it.
    """
    parts: dict[str, dict[str, SourceTensor]] = {}
    rest: list[Source] = []
    known = _parts(scheme, 0, 0, 1)
    for tensor in tensors:
        module, _, part = tensor.name.rpartition(".")
        target = targets.get(f"{module}.weight")
        if part not in known or target is None or len(target.shape) != 2:
            rest.append(tensor)
            continue
        first = parts.setdefault(module, {}).setdefault(part, tensor)
        if first is not tensor:
            raise ValueError(
                f"tensor {tensor.name} is there more than once: in {first.origin} and {tensor.origin}"
            )
    # AutoGPTQ gave each module a bias once, of zeros where the model has none.
    unused = {f"{module}.bias" for module in parts if f"{module}.bias" not in targets}
    rest = [tensor for tensor in rest if tensor.name not in unused or _is_nonzero(tensor)]
    return rest + [
        _stored_matrix(module, found, targets[f"{module}.weight"].shape, scheme)
        for module, found in parts.items()
    ]


def _is_nonzero(tensor: Source) -> bool:
    if not isinstance(tensor, SourceTensor) or len(tensor.shape) != 1:
        return True
    return bool(tensor.read(0, tensor.shape[0]).any())


def _stored_matrix(
    module: str, parts: Mapping[str, SourceTensor], shape: tuple[int, ...], scheme: Scheme
) -> StoredMatrix:
    columns, rows = shape
    group = rows if scheme.group_size == -1 else scheme.group_size
    if rows % group:
        raise ValueError(f"{module} has {rows} input rows, not a multiple of group_size={group}")
    per_word = 32 // scheme.bits
    for name, size in (("input rows", rows), ("output columns", columns)):
        if size % per_word:
            raise ValueError(f"{module} has {size} {name}, not a multiple of {per_word}")
    origin = next(iter(parts.values())).origin
    for part, (wanted, is_needed) in _parts(scheme, rows, columns, group).items():
        tensor = parts.get(part)
        if tensor is None and is_needed:
            raise ValueError(f"tensor {module}.{part} is missing beside the others in {origin}")
        if tensor is not None and tensor.shape != wanted:
            raise ValueError(
                f"tensor {tensor.name} in {tensor.origin} has shape {tensor.shape}, the model with "
                f"bits={scheme.bits} and group_size={scheme.group_size} needs {wanted}"
            )
    read = functools.partial(_read, parts, scheme, shape, group)
    return StoredMatrix(f"{module}.weight", shape, read, origin)


def _parts(scheme: Scheme, rows: int, columns: int, group: int) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Shape of each tensor of a matrix, and whether it must be there."""
    groups, per_word = rows // group, 32 // scheme.bits
    shapes: dict[str, tuple[tuple[int, ...], bool]]
    if scheme.method == "compressed-tensors":
        shapes = {
            "weight_packed": ((columns, rows // per_word), True),
            "weight_scale": ((columns, groups), True),
            "weight_g_idx": ((rows,), scheme.has_order),
            "weight_shape": ((2,), True),
        }
        zero_point = ((columns // per_word, groups), True)
        return shapes if scheme.symmetric else shapes | {"weight_zero_point": zero_point}
    packed = (rows // per_word, columns) if scheme.method == "gptq" else (rows, columns // per_word)
    shapes = {
        "qweight": (packed, True),
        "qzeros": ((groups, columns // per_word), True),
        "scales": ((groups, columns), True),
    }
    return shapes | ({"g_idx": ((rows,), scheme.has_order)} if scheme.method == "gptq" else {})


def _read(
    parts: Mapping[str, SourceTensor], scheme: Scheme, shape: tuple[int, ...], group: int
) -> HostMatrix:
    columns, rows = shape
    bits, groups = scheme.bits, rows // group
    read = functools.partial(_array, parts)
    zeros: np.ndarray | None = None
    if scheme.method == "gptq":
        values = _unpacked(read("qweight").T, bits).T
        zeros = _unpacked(_plus_one(read("qzeros"), bits) if scheme.zeros_less_one else read("qzeros"), bits)
        scale = read("scales")
    elif scheme.method == "awq":
        values = _unpacked(read("qweight"), bits, AWQ_COLUMNS)
        zeros, scale = _unpacked(read("qzeros"), bits, AWQ_COLUMNS), read("scales")
    else:
        if tuple(read("weight_shape")) != shape:
            tensor = parts["weight_shape"]
            raise ValueError(
                f"tensor {tensor.name} in {tensor.origin} is {read('weight_shape')}, the model needs {shape}"
            )
        values, scale = _unpacked(read("weight_packed"), bits).T, read("weight_scale").T
        if not scheme.symmetric:
            zeros = _unpacked(read("weight_zero_point").T, bits)
    if zeros is None:
        zeros = np.full((groups, columns), 1 << bits - 1, np.uint8)
    order = _order(parts, scheme, groups, group)
    if order is not None:
        values = values[order]
    if scale.dtype != np.float16:
        scale = scale.astype(np.float32)
    if bits == 4:
        data, zero = pack_int4(values, group), zeros
    else:
        data, zero = (values ^ 0x80).view(np.int8), zeros.astype(np.float32) - 128
    return HostMatrix(data, scale, zero, bits, group, order)


def _array(parts: Mapping[str, SourceTensor], part: str) -> np.ndarray:
    tensor = parts[part]
    array = tensor.read(0, tensor.shape[0])
    is_scale, is_integer = part.endswith(("scales", "scale")), np.issubdtype(array.dtype, np.integer)
    if is_scale == is_integer or (part in _PACKED and array.dtype != np.int32):
        wanted = "a float" if is_scale else "int32"
        raise ValueError(f"tensor {tensor.name} in {tensor.origin} has dtype {array.dtype}, must be {wanted}")
    return array


_PACKED = ("qweight", "qzeros", "weight_packed", "weight_zero_point")


def _unpacked(words: np.ndarray, bits: int, columns: Sequence[int] | None = None) -> np.ndarray:
    """uint8 values of int32 words [R, C], 32 / bits of each word beside each other.

    Args:
      columns: where each value of a word goes, from the lowest bits on; by default in that order.
    """
    count = 32 // bits
    words = words.view(np.uint32)
    values = np.empty((*words.shape, count), np.uint8)
    for place, column in enumerate(columns or range(count)):
        values[..., column] = words >> np.uint32(bits * place) & np.uint32((1 << bits) - 1)
    return values.reshape(len(words), -1)


def _plus_one(words: np.ndarray, bits: int) -> np.ndarray:
    """Packed zero points, each one more.

    Whole words are added, because writers of the first GPTQ format subtract whole words: a zero point of 0
    borrows from its neighbour, and so gets it back.
    """
    ones = sum(1 << place for place in range(0, 32, bits))
    return (words.view(np.uint32) + np.uint32(ones)).view(np.int32)


def _order(parts: Mapping[str, SourceTensor], scheme: Scheme, groups: int, group: int) -> np.ndarray | None:
    """Input rows in the order of their groups; `None` where they are in that order already."""
    name = "g_idx" if scheme.method == "gptq" else "weight_g_idx"
    if name not in parts:
        return None
    index = _array(parts, name)
    # Without activation order GPTQ files may hold zeros there, and compressed-tensors -1 for "not set".
    is_unset = scheme.method == "compressed-tensors" and (index < 0).all()
    if is_unset or (not scheme.has_order and not index.any()):
        return None
    order = np.argsort(index, kind="stable").astype(np.int32)
    if not np.array_equal(index[order], np.repeat(np.arange(groups), group)):
        tensor = parts[name]
        raise ValueError(
            f"tensor {tensor.name} in {tensor.origin} does not put {group} rows into each of {groups} groups"
        )
    return None if np.array_equal(order, np.arange(len(order))) else order
