"""Machine code of NVIDIA's GPUs as text (SASS), by NVIDIA's disassembler: no GPU and no driver is needed.

The disassembler is found in the wheel `nvidia-cuda-nvdisasm`, where CUDA is installed, or on the path.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from ...core.errors import ArgumentError, InternalError
from .nvrtc import Cubin, find_cuda_folders

_NAME = "nvdisasm"


def disassemble(cubin: Cubin) -> str:
    """The instructions of all kernels.

    Raises ArgumentError if the disassembler is not installed, InternalError if it refuses the code.
    """
    tool = _find_disassembler()
    with tempfile.TemporaryDirectory(prefix="tc_sass_") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin.binary)
        done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InternalError(f"{_NAME} refuses our code for {cubin.architecture}: {done.stderr.strip()}")
    return done.stdout


def _find_disassembler() -> str:
    """The path of the disassembler. Raises ArgumentError, which says how to install it."""
    found = next((str(f / _NAME) for f in find_cuda_folders("bin") if (f / _NAME).exists()), None)
    found = found or shutil.which(_NAME)
    if found is None:
        raise ArgumentError(
            f"{_NAME}, which prints machine code, is not installed", suggestion="pip install nvidia-cuda-nvdisasm"
        )
    return found
