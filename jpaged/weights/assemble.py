"""Fills the parameter tree from the tensors of a checkpoint, each element exactly once.

Owns the checks (names, shapes, dtypes) and the conversion to the final dtype; a format only says
which tensors there are and how to read some rows of one. Knows no file format.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import ml_dtypes
import numpy as np

from jpaged.config import DTYPES, ModelConfig
from jpaged.models.transformer import MATRICES, Params, abstract_params
from jpaged.ops.quantized import QuantizedMatrix, quantize_matrix
from jpaged.weights import names
from jpaged.weights.names import Target

logger = logging.getLogger(__name__)

CHUNK_ELEMENTS = 1 << 21
"""Elements converted at a time, which bounds the memory taken beside the parameters."""


@dataclasses.dataclass(frozen=True)
class SourceTensor:
    """One tensor of a checkpoint.

    Attributes:
      name: its name in the checkpoint.
      shape: its shape, [out, in] for a matrix.
      read: `read(start, stop)` is the rows [start, stop); only floats can fill a leaf.
      origin: the file that holds it, for messages.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[int, int], np.ndarray]
    origin: str


@dataclasses.dataclass(frozen=True)
class HostMatrix:
    """A `QuantizedMatrix` in numpy arrays, without a dtype of products."""

    data: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None
    bits: int
    group: int
    order: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    """A matrix that a checkpoint holds quantized, and that stays so.

    Attributes:
      name: of the float tensor that it stands for.
      shape: of that tensor, [out, in].
      read: the matrix; its columns are the tensor's rows.
      origin: the file that holds it, for messages.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[], HostMatrix]
    origin: str


Source = SourceTensor | StoredMatrix


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of a `ModelConfig` dtype name.

    Raises:
      ValueError: the name is not one of them.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} must be one of {DTYPES}")
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def assemble(
    config: ModelConfig,
    dtype: str,
    tensors: Iterable[Source],
    targets: Mapping[str, Target],
    quantization: str | None = None,
) -> Params:
    """Parameters of `config` in `dtype`, on JAX's default device.

    Names and shapes are checked before anything is read. Tensors are read a few rows at a time
    straight into the buffer of their leaf, and a finished leaf is handed to JAX before the next is
    begun, so the host needs little more than the parameters themselves.

    Args:
      config: the model.
      dtype: of every parameter.
      tensors: what the checkpoint has. A matrix of a layer is quantized if all tensors that fill it are
        `StoredMatrix`s.
      targets: where each belongs, from `names.targets`.
      quantization: of the layers' matrices, each after it was filled in `dtype`; or `None`.

    Raises:
      ValueError: tensors are missing, unexpected, or there twice, one has a wrong shape, a tied
        output matrix differs from the embedding, a value does not fit `dtype`, `quantization` is not
        one that the model's shapes allow, a value to quantize is not finite, or quantized tensors do
        not make one quantized matrix.
    """
    out_dtype = numpy_dtype(dtype)
    abstract_params(config, dtype, quantization)  # refuses a shape or a name before anything is read
    by_leaf = _by_leaf(_checked(tensors, targets), targets)
    paths, tree = jax.tree_util.tree_flatten_with_path(abstract_params(config, dtype))
    leaves = []
    for path, spec in paths:
        sources = by_leaf[jax.tree_util.keystr(path, simple=True, separator=".")]
        stored = [source for source in sources if isinstance(source, StoredMatrix)]
        if stored:
            _check_stored(sources, targets)
            leaf = _merged(stored, targets, dtype)
        elif quantization is not None and path[-1].name in MATRICES:
            leaf = _quantized(sources, _filled(sources, targets, spec.shape, out_dtype), quantization)
        else:
            leaf = jax.device_put(_filled(sources, targets, spec.shape, out_dtype))
        leaves.append(jax.block_until_ready(leaf))
    logger.info("loaded %d parameters in %s", sum(math.prod(spec.shape) for _, spec in paths), dtype)
    return jax.tree_util.tree_unflatten(tree, leaves)


def _checked(tensors: Iterable[Source], targets: Mapping[str, Target]) -> list[Source]:
    """The tensors to use; raises unless each expected one is there exactly once, in its shape."""
    wanted = [tensor for tensor in tensors if not names.is_ignored(tensor.name)]
    count = Counter(tensor.name for tensor in wanted)
    faults = {
        "missing": sorted(name for name, t in targets.items() if not t.compare and name not in count),
        "unexpected": sorted(name for name in count if name not in targets),
        "there more than once": sorted(name for name, n in count.items() if n > 1),
    }
    text = [f"{len(found)} {what}: {_some(found)}" for what, found in faults.items() if found]
    if any(targets[name].field == "lm_head" for name in faults["missing"]):
        text.append("an output matrix is needed because tie_word_embeddings is false")
    if text:
        raise ValueError(f"the checkpoint's tensors do not fit the model: {'; '.join(text)}")
    for tensor in wanted:
        shape = targets[tensor.name].shape
        if tensor.shape != shape:
            raise ValueError(
                f"tensor {tensor.name} in {tensor.origin} has shape {tensor.shape}, the model needs {shape}"
            )
    return wanted


def _some(found: Sequence[str], limit: int = 8) -> str:
    rest = f", and {len(found) - limit} more" if len(found) > limit else ""
    return ", ".join(found[:limit]) + rest


def _by_leaf(tensors: Sequence[Source], targets: Mapping[str, Target]) -> dict[str, list[Source]]:
    """The tensors of each leaf, those to be compared last."""
    grouped: dict[str, list[Source]] = {}
    for tensor in sorted(tensors, key=lambda t: targets[t.name].compare):
        grouped.setdefault(targets[tensor.name].leaf, []).append(tensor)
    return grouped


def _check_stored(sources: Sequence[Source], targets: Mapping[str, Target]) -> None:
    """Raises unless a leaf with a quantized tensor may be quantized, and all its tensors are."""
    quantized = next(source for source in sources if isinstance(source, StoredMatrix))
    if targets[quantized.name].field not in MATRICES:
        raise ValueError(
            f"tensor {quantized.name} in {quantized.origin} is quantized; only the matrices of layers may be"
        )
    for source in sources:
        if not isinstance(source, StoredMatrix):
            raise ValueError(
                f"tensor {quantized.name} in {quantized.origin} is quantized, but {source.name} is not, and "
                "they are parts of one matrix here"
            )


def _merged(stored: Sequence[StoredMatrix], targets: Mapping[str, Target], dtype: str) -> QuantizedMatrix:
    """The quantized matrix whose columns the tensors fill."""
    buffers: dict[str, np.ndarray] = {}
    first: HostMatrix | None = None
    for matrix in stored:
        target, part = targets[matrix.name], matrix.read()
        first = part if first is None else first
        _check_alike(stored[0], first, matrix, part)
        for name in ("data", "scale", "zero"):
            rows = getattr(part, name)
            if rows is None:
                continue
            if name not in buffers:
                buffers[name] = np.empty((len(rows), target.leaf_shape[1]), rows.dtype)
            view = target.view(buffers[name])
            view[...] = rows.T.reshape(view.shape)
    assert first is not None
    zero, order = buffers.get("zero"), first.order
    return QuantizedMatrix(
        data=jax.device_put(buffers["data"]),
        scale=jax.device_put(buffers["scale"]),
        zero=jax.device_put(zero) if zero is not None and zero.any() else None,
        bits=first.bits,
        group=first.group,
        dtype=dtype,
        order=None if order is None else jax.device_put(order),
    )


def _check_alike(first: StoredMatrix, a: HostMatrix, other: StoredMatrix, b: HostMatrix) -> None:
    """Raises unless two matrices can be columns of one."""
    both = f"tensors {first.name} and {other.name} are parts of one matrix here, but"
    if a.scale.dtype != b.scale.dtype:
        raise ValueError(f"{both} have scales in {a.scale.dtype} and {b.scale.dtype}")
    in_order = np.arange(0)  # stands for no order, and equals none
    if not np.array_equal(in_order if a.order is None else a.order, in_order if b.order is None else b.order):
        raise ValueError(f"{both} sort their rows into groups differently (g_idx)")


def _quantized(sources: Sequence[Source], matrix: np.ndarray, quantization: str) -> QuantizedMatrix:
    try:
        return quantize_matrix(matrix, quantization)
    except ValueError as error:
        where = ", ".join(f"{source.name} in {source.origin}" for source in sources)
        raise ValueError(f"{where}: {error}") from error


def _filled(
    sources: Sequence[Source], targets: Mapping[str, Target], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    buffer = np.empty(shape, dtype)
    stored = [tensor.shape for tensor in sources if not targets[tensor.name].compare]
    assert sum(map(math.prod, stored)) == buffer.size, f"the declared tensors do not tile {shape}"
    for tensor in sources:
        assert isinstance(tensor, SourceTensor)
        target = targets[tensor.name]
        part = target.view(buffer)
        for group, values in _chunks(tensor, part, dtype):
            if not target.compare:
                group[...] = values
            elif not np.array_equal(group, values):
                raise ValueError(
                    f"tie_word_embeddings is true, but {tensor.name} in {tensor.origin} differs from the "
                    "embedding; a checkpoint with an output matrix of its own must set it to false"
                )
    return buffer


def _chunks(
    tensor: SourceTensor, part: np.ndarray, dtype: np.dtype
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Pieces of a tensor in `dtype`, each with the piece of `part` that it fills."""
    rows_per_group = tensor.shape[0] // part.shape[0]
    step = max(1, CHUNK_ELEMENTS // max(1, part.size // part.shape[0]))
    for start in range(0, part.shape[0], step):
        group = part[start : start + step]
        rows = tensor.read(start * rows_per_group, (start + len(group)) * rows_per_group)
        yield group, _cast(rows, dtype, tensor).reshape(group.shape)


def _cast(rows: np.ndarray, dtype: np.dtype, tensor: SourceTensor) -> np.ndarray:
    if np.issubdtype(rows.dtype, np.integer):
        raise ValueError(
            f"tensor {tensor.name} in {tensor.origin} has dtype {rows.dtype}, the model needs floats"
        )
    with np.errstate(over="ignore"):
        values = rows.astype(dtype, copy=False)
    if dtype == np.float16 and rows.dtype != dtype:
        if not np.array_equal(np.isinf(values), np.isinf(rows)):
            raise ValueError(
                f"tensor {tensor.name} has values beyond float16's range; use bfloat16 or float32"
            )
    return values
