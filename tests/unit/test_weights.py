import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.model_store import ModelRefused
from engine.device.weights import load_model, weight_bytes
from tests.helpers.models import build_model, prepared, prepared_tiny


def load(path: Path, **options: Any) -> torch.nn.Module:
    settings: dict[str, Any] = {"dtype": "float32", "max_context": 256, "report": lambda _: None}
    return load_model(prepared(path), **(settings | options))


def test_says_what_it_loads() -> None:
    said: list[str] = []
    model = load_model(prepared_tiny("qwen3"), dtype="float16", max_context=256, report=said.append)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    assert len(said) == 2
    assert "tiny-qwen3" in said[0]
    assert "Qwen3ForCausalLM: 3 layers, 0.2 M parameters, float16 on cpu" in said[1]


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_are_what_loading_takes(tmp_path: Path, tied: bool) -> None:
    path = build_model(tmp_path / "m", tie_word_embeddings=tied)
    assert weight_bytes(path, "float32") == sum(parameter.nbytes for parameter in load(path).parameters())
    assert weight_bytes(path, "float16") == weight_bytes(path, "float32") // 2


def test_refuses_what_is_beyond_the_budget() -> None:
    path = prepared_tiny("llama").path
    size = weight_bytes(path, "float32")
    load(path, memory_budget=size)
    with pytest.raises(ModelRefused, match="more than the budget"):
        load(path, memory_budget=size - 1)


def test_refuses_a_context_the_model_was_not_trained_for() -> None:
    with pytest.raises(ModelRefused, match="trained for 4096 tokens; asked to serve 4097"):
        load(prepared_tiny("llama").path, max_context=4097)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("mistral", {}), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1})],
)
def test_refuses_a_sliding_window_only_where_it_matters(
    tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    path = build_model(tmp_path / "m", architecture, sliding_window=128, **settings)
    load(path, max_context=128)
    with pytest.raises(ModelRefused, match=r"last 128 tokens only.*asked for 129"):
        load(path, max_context=129)


def test_a_sliding_window_that_is_switched_off_is_no_obstacle(tmp_path: Path) -> None:
    load(build_model(tmp_path / "off", "qwen2", sliding_window=128, use_sliding_window=False))
    load(build_model(tmp_path / "above", "qwen3", sliding_window=128, use_sliding_window=True, max_window_layers=3))


def test_refuses_positions_that_depend_on_the_batch(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    path = build_model(tmp_path / "m", rope_parameters=rope)
    with pytest.raises(ModelRefused, match="dynamic"):
        load(path)


def test_refuses_weights_with_holes(tmp_path: Path) -> None:
    """transformers alone would fill them with random numbers and say so in a log line."""
    path = build_model(tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelRefused, match=r"missing_keys: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(path)


def test_refuses_other_architectures(tmp_path: Path) -> None:
    path = build_model(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["GptOssForCausalLM"]}))
    with pytest.raises(ModelRefused, match="GptOssForCausalLM is not supported; these are: LlamaForCausalLM, "):
        load(path)


def test_a_model_that_does_not_load_is_refused(tmp_path: Path) -> None:
    """What preparation cannot see: transformers raises whatever it likes."""
    path = build_model(tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"hidden_act": "of-the-future"}))
    with pytest.raises(ModelRefused, match=r"m cannot be loaded: .*of-the-future"):
        load(path)
