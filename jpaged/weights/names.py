"""Where each tensor of a checkpoint goes in the parameter tree.

Owns the one declaration of names (`_MODEL` and `_LAYER`), used for Hugging Face and GGUF
checkpoints alike, and the geometry of the merged matrices: which elements of `wqkv` are the rows of
`q_proj`, and so on. Reads no file and converts no number.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from jpaged.config import ModelConfig
from jpaged.models.transformer import abstract_params

Format = Literal["hf", "gguf"]


@dataclasses.dataclass(frozen=True)
class Target:
    """The place of one source tensor.

    Attributes:
      field: name of the field in `Params` or `LayerParams`.
      layer: index of the layer, or `None` for a field of `Params`.
      leaf_shape: shape of the whole field.
      shape: the shape that the source tensor must have.
      view: maps the field's buffer to the part that the tensor fills, as a numpy view whose
        elements, read in C order, are the tensor's own. Its first axis cuts the tensor's rows into
        equal groups.
      compare: the tensor repeats what another one holds; it is compared with it, not stored.
    """

    field: str
    layer: int | None
    leaf_shape: tuple[int, ...]
    shape: tuple[int, ...]
    view: Callable[[np.ndarray], np.ndarray]
    compare: bool = False

    @property
    def leaf(self) -> str:
        """The field's path in the tree, such as `layers.3.wqkv`."""
        return self.field if self.layer is None else f"layers.{self.layer}.{self.field}"


def targets(config: ModelConfig, source: Format, *, rotary_interleaved: bool = False) -> dict[str, Target]:
    """Where every tensor of a checkpoint goes, by its name in the format of `source`.

    A checkpoint must have all of them, except those to be compared: where the output matrix is
    tied to the embedding, a checkpoint may repeat it, and then it must be equal.

    Args:
      config: the model.
      source: whose names.
      rotary_interleaved: whether the rows of each q and k head are stored with the two halves that
        rotary embedding pairs interleaved (0, D/2, 1, D/2 + 1, ..): GGUF files of the `llama`
        architecture, because llama.cpp rotates neighbours where Hugging Face rotates halves.
    """
    tree = abstract_params(config)
    found: dict[str, Target] = {}

    def add(entry: _Entry, layer: int | None, name: str) -> None:
        spec: Any = getattr(tree if layer is None else tree.layers[layer], entry.field)
        compare = entry.field == "lm_head" and spec is None
        field, spec = ("embed", tree.embed) if compare else (entry.field, spec)
        if spec is None:
            return
        view = functools.partial(entry.view, config=config, interleaved=rotary_interleaved)
        found[name] = Target(field, layer, spec.shape, _source_shape(spec.shape, view), view, compare)

    for entry in _MODEL:
        add(entry, None, getattr(entry, source))
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}." if source == "hf" else f"blk.{layer}."
        for entry in _LAYER:
            add(entry, layer, prefix + getattr(entry, source))
    return found


def is_ignored(name: str) -> bool:
    """Whether a tensor holds nothing that the configuration does not already say.

    Those are the rotary frequencies that old Llama checkpoints store beside the weights, and
    GGUF's `rope_freqs.weight`, which the configuration is made from.
    """
    return re.fullmatch(r"rope_freqs\.weight|model\.(.*\.)?rotary_emb\.inv_freq", name) is not None


def _source_shape(leaf_shape: tuple[int, ...], view: Callable[[np.ndarray], np.ndarray]) -> tuple[int, ...]:
    """Matrices of a checkpoint are [out, in], vectors [out]."""
    part = view(np.empty(leaf_shape, np.bool_))  # never touched, so it takes no memory
    return (part.size // part.shape[-1], part.shape[-1]) if len(leaf_shape) == 2 else (part.size,)


# ---------------------------------------------------------------------------------------------
# Geometry. Letters as in `jpaged.ops`; F is the MLP's inner width.


def _whole(buffer: np.ndarray, config: ModelConfig, interleaved: bool) -> np.ndarray:
    return buffer


def _transposed(buffer: np.ndarray, config: ModelConfig, interleaved: bool) -> np.ndarray:
    return buffer.T


def _query(buffer: np.ndarray, config: ModelConfig, interleaved: bool) -> np.ndarray:
    return _heads(buffer, config, slice(0, config.group_size), interleaved)


def _key(buffer: np.ndarray, config: ModelConfig, interleaved: bool) -> np.ndarray:
    return _heads(buffer, config, slice(-2, -1), interleaved)


def _value(buffer: np.ndarray, config: ModelConfig, interleaved: bool) -> np.ndarray:
    return _heads(buffer, config, slice(-1, None), False)


def _heads(buffer: np.ndarray, config: ModelConfig, heads: slice, interleaved: bool) -> np.ndarray:
    """Some of the G + 2 heads of each KV group: [K, heads, 2, D/2, E], or without E for a bias."""
    K, G, D = config.num_kv_heads, config.group_size, config.head_dim
    groups = buffer.reshape(*buffer.shape[:-1], K, G + 2, 2, D // 2)
    part = groups[..., heads, :, :]
    if interleaved:
        part = part.swapaxes(-1, -2)
    return np.moveaxis(part, 0, -1) if buffer.ndim == 2 else part


def _gate(buffer: np.ndarray, config: ModelConfig, interleaved: bool) -> np.ndarray:
    return buffer[..., : config.intermediate_size].T  # [F, E] or [F]


def _up(buffer: np.ndarray, config: ModelConfig, interleaved: bool) -> np.ndarray:
    return buffer[..., config.intermediate_size :].T  # [F, E] or [F]


# ---------------------------------------------------------------------------------------------
# Names


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A field, the two names of a tensor that fills it or a part of it, and which part."""

    field: str
    hf: str
    gguf: str
    view: Callable[..., np.ndarray] = _whole


_MODEL = (
    _Entry("embed", "model.embed_tokens.weight", "token_embd.weight"),
    _Entry("final_norm", "model.norm.weight", "output_norm.weight"),
    _Entry("lm_head", "lm_head.weight", "output.weight"),
)

_LAYER = (
    _Entry("attn_norm", "input_layernorm.weight", "attn_norm.weight"),
    _Entry("wqkv", "self_attn.q_proj.weight", "attn_q.weight", _query),
    _Entry("wqkv", "self_attn.k_proj.weight", "attn_k.weight", _key),
    _Entry("wqkv", "self_attn.v_proj.weight", "attn_v.weight", _value),
    _Entry("bqkv", "self_attn.q_proj.bias", "attn_q.bias", _query),
    _Entry("bqkv", "self_attn.k_proj.bias", "attn_k.bias", _key),
    _Entry("bqkv", "self_attn.v_proj.bias", "attn_v.bias", _value),
    _Entry("q_norm", "self_attn.q_norm.weight", "attn_q_norm.weight"),
    _Entry("k_norm", "self_attn.k_norm.weight", "attn_k_norm.weight"),
    _Entry("wo", "self_attn.o_proj.weight", "attn_output.weight", _transposed),
    _Entry("bo", "self_attn.o_proj.bias", "attn_output.bias"),
    _Entry("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight"),
    _Entry("w_gate_up", "mlp.gate_proj.weight", "ffn_gate.weight", _gate),
    _Entry("w_gate_up", "mlp.up_proj.weight", "ffn_up.weight", _up),
    _Entry("b_gate_up", "mlp.gate_proj.bias", "ffn_gate.bias", _gate),
    _Entry("b_gate_up", "mlp.up_proj.bias", "ffn_up.bias", _up),
    _Entry("w_down", "mlp.down_proj.weight", "ffn_down.weight", _transposed),
    _Entry("b_down", "mlp.down_proj.bias", "ffn_down.bias"),
)
