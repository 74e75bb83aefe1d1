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
from jpaged.models.transformer import QUANTIZED_FIELDS, Params, abstract_params
from jpaged.ops.quantized import quantize_matrix
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
      read: `read(start, stop)` is the rows [start, stop) in a floating dtype.
      origin: the file that holds it, for messages.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[int, int], np.ndarray]
    origin: str


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
    tensors: Iterable[SourceTensor],
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
      tensors: what the checkpoint has.
      targets: where each belongs, from `names.targets`.
      quantization: of the layers' matrices, each after it was filled in `dtype`; or `None`.

    Raises:
      ValueError: tensors are missing, unexpected, or there twice, one has a wrong shape, a tied
        output matrix differs from the embedding, a value does not fit `dtype`, or `quantization` is not
        one that the model's shapes allow.
    """
    out_dtype = numpy_dtype(dtype)
    abstract_params(config, dtype, quantization)  # refuses a shape or a name before anything is read
    by_leaf = _by_leaf(_checked(tensors, targets), targets)
    paths, tree = jax.tree_util.tree_flatten_with_path(abstract_params(config, dtype))
    leaves = []
    for path, spec in paths:
        sources = by_leaf[jax.tree_util.keystr(path, simple=True, separator=".")]
        buffer = _filled(sources, targets, spec.shape, out_dtype)
        if quantization is not None and path[-1].name in QUANTIZED_FIELDS:
            leaf = quantize_matrix(buffer, quantization)
        else:
            leaf = jax.device_put(buffer)
        leaves.append(jax.block_until_ready(leaf))
        del buffer  # before the next one is made
    logger.info("loaded %d parameters in %s", sum(math.prod(spec.shape) for _, spec in paths), dtype)
    return jax.tree_util.tree_unflatten(tree, leaves)


def _checked(tensors: Iterable[SourceTensor], targets: Mapping[str, Target]) -> list[SourceTensor]:
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


def _by_leaf(tensors: Sequence[SourceTensor], targets: Mapping[str, Target]) -> dict[str, list[SourceTensor]]:
    """The tensors of each leaf, those to be compared last."""
    grouped: dict[str, list[SourceTensor]] = {}
    for tensor in sorted(tensors, key=lambda t: targets[t.name].compare):
        grouped.setdefault(targets[tensor.name].leaf, []).append(tensor)
    return grouped


def _filled(
    sources: Sequence[SourceTensor], targets: Mapping[str, Target], shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    buffer = np.empty(shape, dtype)
    stored = [tensor.shape for tensor in sources if not targets[tensor.name].compare]
    assert sum(map(math.prod, stored)) == buffer.size, f"the declared tensors do not tile {shape}"
    for tensor in sources:
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
    with np.errstate(over="ignore"):
        values = rows.astype(dtype, copy=False)
    if dtype == np.float16 and rows.dtype != dtype:
        if not np.array_equal(np.isinf(values), np.isinf(rows)):
            raise ValueError(
                f"tensor {tensor.name} has values beyond float16's range; use bfloat16 or float32"
            )
    return values
