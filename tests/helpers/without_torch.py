"""A decode node as a process in which torch ends whoever imports it: what it does before it loads anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.models import prepared_tiny

__all__ = ["decode_without_torch"]

_ROOT = Path(__file__).parents[2]


def decode_without_torch(directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run `kvrelay decode` with a tiny model. The last line is "torch is imported", unless it ends before that."""
    model = prepared_tiny()
    (directory / "torch.py").write_text("raise SystemExit('torch is imported')")
    paths = (directory, *(_ROOT / part for part in (".", "proto", "kernels")))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-P", "-m", "cli.main", "decode", "--model", str(model.path)]
    command += ["--model-dir", str(model.path.parent / "cache"), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=30)
