"""A node as a process in which torch ends whoever imports it: what it does before it loads anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from engine.core.model_store import record_prepared, resolve

__all__ = ["run_without_torch"]

_ROOT = Path(__file__).parents[2]
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


def run_without_torch(directory: Path, role: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a node with a model of no weights. The last line is "torch is imported", unless it ends earlier."""
    model, cache = directory / "weightless", directory / "cache"
    for folder in (model, cache):
        folder.mkdir()
    (model / "config.json").write_text(json.dumps(_CONFIG))
    record_prepared(resolve(str(model)), cache, model)
    (directory / "torch.py").write_text("raise SystemExit('torch is imported')")
    paths = (directory, *(_ROOT / part for part in (".", "proto", "kernels")))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-P", "-m", "cli.main", role, "--model", str(model)]
    command += ["--model-dir", str(cache), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=30)
