"""CUDA C++ to machine code for a named architecture, by NVIDIA's run-time compiler: no GPU and no driver is needed.

The compiler is found in the wheels `nvidia-cuda-nvrtc` and `nvidia-cuda-runtime` (extra `[cuda]`), or where CUDA is
installed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ...core.errors import ArgumentError, InternalError

INSTALL_CUDA = "pip install 'tensor-comprehensions[cuda]'"
_ROOTS = ("/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda")


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources of a kernel, as the assembler reports them.

    Attributes:
        registers: 32-bit registers per thread. shared: declared bytes per block. local: bytes of the stack frame.
        spill_stores, spill_loads: bytes moved for lack of registers.
    """

    registers: int
    shared: int
    local: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code for one architecture, with the resources of each kernel by name."""

    architecture: str
    binary: bytes
    resources: dict[str, Resources]


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The compiler's library, the folders of the headers that it reads, and its version."""

    path: Path
    headers: tuple[Path, ...]
    version: tuple[int, int]

    @property
    def library(self) -> ctypes.CDLL:
        return _load_library(self.path)

    def check(self, code: int) -> None:
        if code:
            self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise InternalError(f"NVRTC: {self.library.nvrtcGetErrorString(code).decode()}")

    def options(self, architecture: str) -> list[str]:
        includes = [f"--include-path={folder}" for folder in self.headers]
        return [f"--gpu-architecture={architecture}", "--std=c++17", "--ptxas-options=-v", "-default-device", *includes]


def compile_text(source: str, architecture: str, *, name: str = "kernel.cu", more: Sequence[str] = ()) -> Cubin:
    """Compile CUDA C++ for an architecture such as "sm_90". more: options besides the default ones.

    Raises:
        ArgumentError: NVRTC is not installed, or does not know the architecture.
        InternalError: it refuses the source, which is quoted.
    """
    with _compile_program(source, architecture, name, more) as (tools, program):
        resources = dict(_resources(_read_program_text(tools, program, "ProgramLog")))
        return Cubin(architecture, _read_program_bytes(tools, program, "CUBIN"), resources)


def compile_with_lines(source: str, architecture: str) -> tuple[str, Cubin]:
    """PTX whose line tables name the lines of `source`, and the machine code made from it; raises as `compile_text`.

    The line tables change no instruction: a test compares the machine code.
    """
    with _compile_program(source, architecture, "kernel.cu", ("-lineinfo",)) as (tools, program):
        resources = dict(_resources(_read_program_text(tools, program, "ProgramLog")))
        binary = _read_program_bytes(tools, program, "CUBIN")
        return _read_program_text(tools, program, "PTX"), Cubin(architecture, binary, resources)


@contextmanager
def _compile_program(
    source: str, architecture: str, name: str, more: Sequence[str]
) -> Iterator[tuple[Toolchain, ctypes.c_void_p]]:
    """A compiled program, which exists inside the block; raises as `compile_text`."""
    tools = find_toolchain()
    known = architectures(tools)
    number = int(re.sub(r"\D", "", architecture) or 0)
    if number not in known:
        raise ArgumentError(
            f"this NVRTC ({tools.version[0]}.{tools.version[1]}) does not compile for {architecture}",
            expected=", ".join(f"sm_{n}" for n in known),
        )
    program = ctypes.c_void_p()
    lib = tools.library
    tools.check(lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None))
    try:
        options = [o.encode() for o in (*tools.options(architecture), *more)]
        code = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if code:
            log = _read_program_text(tools, program, "ProgramLog")
            raise InternalError(f"NVRTC refuses our code:\n{log}\n{_number_lines(source)}")
        yield tools, program
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def is_nvrtc_available() -> bool:
    """Whether the compiler is found."""
    try:
        find_toolchain()
    except ArgumentError:
        return False
    return True


@functools.cache
def find_toolchain() -> Toolchain:
    """Find the compiler. Raises ArgumentError, which says how to install it."""
    found = [
        path
        for folder in find_cuda_folders("lib")
        for path in sorted(folder.glob("libnvrtc.so.*"), key=lambda p: (len(p.name), p.name))
    ]
    if not found:
        raise ArgumentError("NVRTC, which compiles CUDA, is not installed", suggestion=INSTALL_CUDA)
    path = preferred_library(found, torch.version.cuda)
    version = _version_beside(path) or _version_of(_load_library(path))
    headers = [f for f in find_cuda_folders("include") if (f / "cuda_fp16.h").exists()]
    return Toolchain(path, tuple(sorted(headers, key=lambda f: cuda_release(f) != version[0])[:1]), version)


@functools.cache
def _load_library(path: Path) -> ctypes.CDLL:
    """Load the library, but only to compile: it has 100 megabytes."""
    for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)  # so that the compiler finds it
    return ctypes.CDLL(str(path))


def _version_beside(path: Path) -> tuple[int, int] | None:
    """The version of NVRTC at `path`, from the file name of its builtins library; None if that is ambiguous."""
    names = [p.name for p in path.parent.glob("libnvrtc-builtins.so.*")]
    versions = {(int(m[1]), int(m[2])) for n in names if (m := re.fullmatch(r".*\.so\.(\d+)\.(\d+)(\.\d+)*", n))}
    mine = {v for v in versions if path.name.partition(".so.")[2].partition(".")[0] == str(v[0])}
    return mine.pop() if len(mine) == 1 else None


def _version_of(library: ctypes.CDLL) -> tuple[int, int]:
    version = (ctypes.c_int(), ctypes.c_int())
    library.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    return version[0].value, version[1].value


def preferred_library(paths: Sequence[Path], cuda: str | None) -> Path:
    """Of several libraries, the one of torch's release of CUDA, whose code the driver can load; else the first.

    cuda: that release, "12.8"; None if torch is for CPUs.
    """
    wanted = None if cuda is None else f".so.{cuda.partition('.')[0]}"
    return next((p for p in paths if wanted is not None and wanted in p.name), paths[0])


def cuda_release(headers: Path) -> int:
    """The major release of CUDA of a folder of headers; 0 if unknown."""
    header = headers / "cuda.h"
    found = re.search(r"#define CUDA_VERSION (\d+)", header.read_text(errors="replace")) if header.exists() else None
    return int(found[1]) // 1000 if found else 0


def architectures(tools: Toolchain) -> tuple[int, ...]:
    """The numbers of the architectures that NVRTC compiles for."""
    count = ctypes.c_int()
    tools.check(tools.library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    numbers = (ctypes.c_int * count.value)()
    tools.check(tools.library.nvrtcGetSupportedArchs(numbers))
    return tuple(numbers)


def find_cuda_folders(kind: str) -> Iterator[Path]:
    """Where libraries ("lib"), headers ("include") or programs ("bin") may be: wheels first, then installed CUDA."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from (p for p in sorted(Path(root).glob(f"*/{kind}"), reverse=True) if p.is_dir())
    for place in _ROOTS:
        for name in (kind, f"{kind}64", f"targets/x86_64-linux/{kind}"):
            if (folder := Path(place, name)).is_dir():
                yield folder


def _read_program_bytes(tools: Toolchain, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    tools.check(getattr(tools.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    tools.check(getattr(tools.library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _read_program_text(tools: Toolchain, program: ctypes.c_void_p, what: str) -> str:
    return _read_program_bytes(tools, program, what).rstrip(b"\0").decode(errors="replace")


def _resources(log: str) -> Iterator[tuple[str, Resources]]:
    """Yield the name and the resources of each kernel in the log of the assembler."""
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part.partition("'")[0]
        yield (
            name,
            Resources(
                registers=_parse_number(r"Used (\d+) registers", part),
                shared=_parse_number(r"(\d+) bytes smem", part),
                local=_parse_number(r"(\d+) bytes stack frame", part),
                spill_stores=_parse_number(r"(\d+) bytes spill stores", part),
                spill_loads=_parse_number(r"(\d+) bytes spill loads", part),
            ),
        )


def _parse_number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _number_lines(source: str) -> str:
    lines: Sequence[str] = source.splitlines()
    return "\n".join(f"{n:4}  {line}" for n, line in enumerate(lines, 1))
