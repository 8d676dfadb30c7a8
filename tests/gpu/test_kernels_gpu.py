"""The Triton kernels compiled and run on a CUDA device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.mark.gpu
@pytest.mark.timeout(480)
def test_kernels_agree_with_the_torch_implementation() -> None:
    # In a process of its own, since here another test may have set Triton to interpret.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check-only"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
