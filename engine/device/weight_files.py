"""Safetensors files by their headers: whole, and of the shapes that the configuration says. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.core.errors import InvalidField
from engine.core.model_store import ModelRefused, PreparedModel, read_json

__all__ = ["check_weights", "tensor_shapes"]

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in a directory's safetensors files. Raises ModelRefused when a file is not whole."""
    shapes = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as tensors:  # checks the header against the size of the file
                shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelRefused(f"{file} is no safetensors file, or cut off: {error}") from error
    return shapes


def check_weights(path: Path, model: PreparedModel) -> None:
    """Raise ModelRefused when the weights of the directory `path` are not of the configuration that `model` is.

    Looks at what a wrong configuration changes, and at nothing that a file may leave out: loading finds all else.
    """
    index = path / "model.safetensors.index.json"
    listed = read_json(index).get("weight_map")
    for file in sorted(set(listed.values())) if isinstance(listed, dict) else ():
        if not (path / file).is_file():
            raise ModelRefused(f"{index} lists {file}, which is not there")
    shapes = tensor_shapes(path)
    config = read_json(path / "config.json")
    layers = {int(found[1]) for name in shapes if (found := _LAYER.match(name))}
    if layers and (len(layers), max(layers) + 1) != (model.layers, model.layers):
        raise _refusal(path, "num_hidden_layers", model.layers, f"{max(layers) + 1}, as the weights have")
    attention = "model.layers.0.self_attn"
    for name, axis, fields, expected in (
        ("model.embed_tokens.weight", 0, "vocab_size", model.vocab_size),
        ("lm_head.weight", 0, "vocab_size", model.vocab_size),
        ("model.embed_tokens.weight", 1, "hidden_size", config.get("hidden_size")),
        ("model.layers.0.mlp.gate_proj.weight", 0, "intermediate_size", config.get("intermediate_size")),
        (f"{attention}.q_proj.weight", 0, "num_attention_heads * head_dim", model.heads * model.head_dim),
        (f"{attention}.k_proj.weight", 0, "num_key_value_heads * head_dim", model.kv_heads * model.head_dim),
    ):
        found_shape = shapes.get(name)
        if found_shape is not None and (len(found_shape) != 2 or found_shape[axis] != expected):
            raise _refusal(path, fields, expected, f"what fits the weights, where {name} is {list(found_shape)}")


def _refusal(path: Path, field: str, value: object, limit: str) -> ModelRefused:
    return ModelRefused(f"{path / 'config.json'}: {InvalidField(field, value, limit)}")
