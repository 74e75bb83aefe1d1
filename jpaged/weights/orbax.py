"""Checkpoints in jpaged's own layout: parameters as an Orbax checkpoint, as the engine wants them.

Owns the directory: `jpaged.json` (the configuration and the format's version), `params/` (written
by Orbax) and `tokenizer/` (as transformers saves one; absent if there was none). Restoring needs no
conversion, and no more than Orbax and transformers.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jpaged.config import ModelConfig, RopeConfig
from jpaged.models.transformer import Params, abstract_params
from jpaged.ops.quantized import QuantizedMatrix
from jpaged.weights.assemble import numpy_dtype
from jpaged.weights.safetensors import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

METADATA = "jpaged.json"
"""The file that makes a directory one of ours."""

VERSION = 1


@dataclasses.dataclass(frozen=True)
class OrbaxCheckpoint:
    """A directory that `save` wrote. Opening it reads `jpaged.json` only."""

    path: Path
    config: ModelConfig

    @classmethod
    def open(cls, path: Path) -> OrbaxCheckpoint:
        """Reads the configuration of the directory `path`.

        Raises:
          ValueError: `jpaged.json` is broken or was written by another version of the format.
        """
        try:
            saved = json.loads((path / METADATA).read_bytes())
            version = saved["version"]
            if version != VERSION:
                raise ValueError(f"{version=} is not supported; supported: {VERSION}")
            return cls(path.resolve(), _config(saved["config"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path / METADATA} cannot be read: {error}") from error

    def load_params(self, dtype: str | None = None, quantization: str | None = None) -> Params:
        """The parameters in `dtype` (default: as they were saved).

        Raises:
          ValueError: what is stored does not have the tree and shapes that the configuration needs, or
            `quantization` is asked for: all matrices are restored at once here.
        """
        if quantization is not None:
            raise ValueError(
                f"{quantization=} is not supported for a converted checkpoint; load the original"
            )
        dtype = dtype or self.config.dtype
        wanted = abstract_params(self.config, numpy_dtype(dtype))
        with _checkpointer() as checkpointer:
            stored = checkpointer.metadata(self.path / "params").item_metadata.tree
            _check(stored, wanted)
            sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            target = jax.tree.map(
                lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding), wanted
            )
            return checkpointer.restore(self.path / "params", target)

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer that was saved, or `None` if there was none."""
        return load_tokenizer(self.path / "tokenizer")


def save(
    path: Path, config: ModelConfig, params: Params, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Writes a checkpoint directory, which must not exist yet or be empty.

    The configuration is written with the dtype that `params` have. `jpaged.json` comes last, so a
    directory that was not finished is not taken for a checkpoint.

    Raises:
      ValueError: there is something at `path`, `params` do not fit `config`, or they are quantized.
    """
    path = path.resolve()
    if any(isinstance(w, QuantizedMatrix) for layer in params.layers for w in vars(layer).values()):
        raise ValueError("params are quantized, which is not saved; only floats are")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"output={str(path)!r} must be an empty directory or not exist")
    dtype = params.embed.dtype.name
    wanted = abstract_params(config, numpy_dtype(dtype))
    if jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) != jax.tree.map(
        lambda spec: (spec.shape, spec.dtype), wanted
    ):
        raise ValueError("params do not have the tree, shapes and dtypes that config declares")
    path.mkdir(parents=True, exist_ok=True)
    with _checkpointer() as checkpointer:
        checkpointer.save(path / "params", params)
    if tokenizer is not None:
        tokenizer.save_pretrained(path / "tokenizer")
    saved = {"version": VERSION, "config": dataclasses.asdict(config.replace(dtype=dtype))}
    (path / METADATA).write_text(json.dumps(saved, indent=2) + "\n")


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp

    return ocp.StandardCheckpointer()


def _config(saved: dict[str, Any]) -> ModelConfig:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()
    }
    return ModelConfig(**fields | {"rope": RopeConfig(**saved["rope"])})


def _check(stored: Any, wanted: Params) -> None:
    """Raises unless the stored arrays have the paths and shapes of `wanted`."""
    have = {_name(path): tuple(array.shape) for path, array in _leaves(stored)}
    need = {_name(path): tuple(spec.shape) for path, spec in _leaves(wanted)}
    faults = [
        f"{name} is {have.get(name, 'absent')}, needs {need.get(name, 'to be absent')}"
        for name in sorted(have.keys() | need.keys())
        if have.get(name) != need.get(name)
    ]
    if faults:
        raise ValueError(f"stored parameters do not fit the model: {'; '.join(faults[:8])}")


def _leaves(tree: Any) -> Any:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "shape"))[0]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
