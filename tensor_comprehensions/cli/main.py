"""`tensorc`: show the code of a def at every stage, run one, and describe the machine and the installation."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import llvmlite.binding as llvm
import torch

from ..api import Op, define
from ..cache.file_format import MAX_PAYLOAD_BYTES
from ..cache.safe_io import read_bounded
from ..compiler.cpu_passes import KINDS
from ..compiler.gpu_passes import GPU_KINDS
from ..core.errors import ArgumentError, TCError
from ..dispatch.arguments import parse_sizes
from ..dispatch.cache_entry import CacheEntry
from ..dispatch.random_inputs import sample_arguments
from ..explain.kernel_report import Report
from ..options import CpuOptions
from ..runtime.cpu import host_symbols
from ..runtime.cpu.host import host
from ..runtime.cuda import nvrtc
from ..runtime.cuda.cupy_api import cuda_api
from ..runtime.emulate import emulator
from ..runtime.fastpath import availability
from ..structured.language.primitives import parse_schedule
from ..target import GPUS
from . import bench_contraction, sparse_command
from . import cache_commands as caching
from . import explain_command as explaining
from . import tune_command as tuning

DEFAULT_KINDS = ("ranges", "schedule", "loops", "c")
DEFAULT_GPU_KINDS = ("ranges", "schedule", "loops", "cuda")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 2 for a user error, 1 for other failures."""
    options = _parser().parse_args(arguments)
    try:
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except TCError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has closed the pipe
        sys.stdout = None
        return 0
    except OSError as error:  # for example, the disk is full
        print(f"cannot go on: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tensorc", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="print ranges, schedule, loops and code of a def")
    show.set_defaults(command=_show)
    _add_def(show)
    kinds = tuple(dict.fromkeys((*KINDS, *GPU_KINDS)))
    default = ", ".join(DEFAULT_KINDS)
    show.add_argument(
        "--emit", action="append", choices=kinds, help=f"kind of text to print (repeatable; default: {default})"
    )
    show.add_argument(
        "--target", metavar="TARGET", help=f"a GPU to compile for, with its default mapping: {', '.join(GPUS)}"
    )
    explaining.add_explain_parser(commands, _add_def, _explain)
    run = commands.add_parser("run", help="run a def on random tensors, check and time it")
    run.set_defaults(command=_run)
    _add_def(run)
    run.add_argument("--repeat", type=int, default=20, help="number of timed runs (default 20)")
    run.add_argument("--no-check", action="store_true", help="do not compare with the reference evaluator")
    bench_contraction.add_contract_parser(commands)
    sparse_command.add_parser(commands)
    caching.add_cache_parser(commands, _add_def, _get_cache_entry)
    tuning.add_tune_parser(commands)
    doctor = commands.add_parser("doctor", help="describe the machine and the installation, and compile a def")
    doctor.set_defaults(command=_diagnose_installation)
    return parser


def _add_def(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a file with TC defs; - for standard input")
    parser.add_argument("--def", dest="name", metavar="NAME", help="the def to use (default: the first)")
    parser.add_argument(
        "--sizes", default="", metavar="M=..,K=..",
        help="values of the size names, and of parameters that are numbers; * for a kernel for all values",
    )  # fmt: skip

    group = parser.add_argument_group("how to lower, instead of the choice made from the sizes")
    for f in fields(CpuOptions):
        flag = f"--{f.name.replace('_', '-')}"
        if f.name == "schedule":
            example = "tile(m=8, n=32) >> pack(B='n1')"
            group.add_argument(
                flag, default="", metavar="SCHEDULE", help=f"schedule of contractions, such as {example!r}"
            )
        elif isinstance(f.default, bool):
            group.add_argument(flag, dest=f.name, action=argparse.BooleanOptionalAction, default=f.default)
        else:
            group.add_argument(
                flag, dest=f.name, type=_option_type(f.default), default=f.default, metavar=f.name.upper(),
                help=f"such as {', '.join(_format_choice(c) for c in f.metadata['choices'])}",
            )  # fmt: skip


def _option_type(default: object) -> Callable[[str], object]:
    if isinstance(default, tuple):
        return lambda text: tuple(int(n) for n in text.split(",") if n)
    return type(default)


def _format_choice(choice: object) -> str:
    return ",".join(map(str, choice)) or "nothing" if isinstance(choice, tuple) else str(choice)


def _make_cpu_options(arguments: argparse.Namespace) -> CpuOptions | None:
    """The options of the command line; None if all are the defaults, which defs with sparse operands require."""
    given = {f.name: getattr(arguments, f.name) for f in fields(CpuOptions)}
    found = CpuOptions(**given | {"schedule": parse_schedule(arguments.schedule) if arguments.schedule else None})
    return None if found == CpuOptions() else found


EXAMPLE_ROWS = 100
"""The value in a run of a size that is `*` on the command line."""


def _parse_sizes_option(options: argparse.Namespace) -> tuple[dict[str, float], frozenset[str]]:
    """The values of sizes and numbers, and the names of sizes given as `*`, which are dynamic."""
    parts = [part.strip() for part in options.sizes.split(",")]
    every = frozenset(part[:-2].strip() for part in parts if part.endswith("=*"))
    values = parse_sizes(",".join(part for part in parts if not part.endswith("=*")))
    return values | dict.fromkeys(sorted(every), EXAMPLE_ROWS), every


def _compile(op: Op, options: argparse.Namespace, target: str | None = None) -> tuple[Any, list[Any], dict[str, Any]]:
    """The kernel for the CPU, or for a GPU as `target`; random inputs, and initial values for it."""
    values, every = _parse_sizes_option(options)
    arguments, initial = _draw_arguments(op, values)
    how: dict[str, Any] = {"options": _make_cpu_options(options)} if target is None else {"target": target}
    if not every:
        return op.compile(*arguments, **how, **initial), arguments, initial
    kernel = op.compile(*arguments, **how, dynamic=every, **initial)
    if every - set(getattr(kernel.compiled, "dynamic_sizes", ())):
        names = " and ".join(sorted(every))
        raise ArgumentError(f"no kernel of {op} is for all values of {names}", suggestion="TC_LOGS=cache says why")
    return kernel, arguments, initial


# --- show and run -----------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    op = _op(options)
    kernel, _, _ = _compile(op, options, options.target)
    default = DEFAULT_KINDS if options.target is None else DEFAULT_GPU_KINDS
    kinds = tuple(kind for kind in default if kind in kernel.compiled.source_kinds())
    kinds = tuple(options.emit or kinds)
    for kind in kinds:
        text = kernel.source(kind)
        print(f"# {kind}\n{text.rstrip()}\n" if len(kinds) > 1 else text.rstrip())
    return 0


def _explain(options: argparse.Namespace) -> Report:
    op = _op(options)
    arguments, initial = _draw_arguments(op, parse_sizes(options.sizes))
    if options.target is not None:
        return op.explain(
            *arguments, target=options.target, measure=options.measure, journal=options.journal, **initial
        )
    return op.explain(
        *arguments, options=_make_cpu_options(options), measure=options.measure, journal=options.journal, **initial
    )


def _run(options: argparse.Namespace) -> int:
    op = _op(options)
    kernel, arguments, initial = _compile(op, options)
    print(f"compiled in {kernel.compile_seconds * 1e3:.0f} ms")
    times = []
    for _ in range(max(1, options.repeat)):
        start = perf_counter()
        result = kernel(*arguments, **initial)
        times.append(perf_counter() - start)
    print(f"median of {len(times)} runs: {median(times) * 1e3:.4f} ms on {torch.get_num_threads()} threads")
    if options.no_check:
        return 0
    wrong = _compute_max_relative_error(result, op.reference(*arguments, **initial))
    print(f"largest difference from the reference, relative to its largest value: {wrong:.1e}")
    return 0 if wrong < 1e-3 else 1


def _get_cache_entry(options: argparse.Namespace) -> CacheEntry:
    op = _op(options)
    arguments, initial = _draw_arguments(op, parse_sizes(options.sizes))
    return op.cache_entry(*arguments, options=_make_cpu_options(options), **initial)


def _compute_max_relative_error(ours: Any, reference: Any) -> float:
    """The largest difference between two results or tuples of results, relative to the largest reference value or 1."""
    first, second = (x if isinstance(x, tuple) else (x,) for x in (ours, reference))
    worst = 0.0
    for x, y in zip(first, second, strict=True):
        a, b = (t.to_dense().double() for t in (x, y))  # a strided tensor stays itself
        if b.numel():
            worst = max(worst, (a - b).abs().max().item() / max(1.0, b.abs().max().item()))
    return worst


def _read_text(path: Path) -> str:
    return read_bounded(path, MAX_PAYLOAD_BYTES, pipes=True).decode("utf-8-sig")


def _op(options: argparse.Namespace) -> Op:
    try:
        text = sys.stdin.read() if options.file == "-" else _read_text(Path(options.file))
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or an invalid name
        raise ArgumentError(f"cannot read {options.file}: {error}") from error
    library = define(text)
    if options.name:
        return library[options.name]
    if not len(library):
        raise ArgumentError(f"{options.file} has no def")
    return next(iter(library))


def _draw_arguments(op: Op, values: dict[str, float]) -> tuple[list[Any], dict[str, Any]]:
    """Random inputs of these sizes, and initial values of in/out outputs by name."""
    return sample_arguments(op.function, values)


# --- doctor -----------------------------------------------------------------------------------------------------


def _diagnose_installation(_: argparse.Namespace) -> int:
    for name, value in _collect_environment_facts():
        print(f"{name:<22}{value}")
    works = _kernel_works()
    print(f"{'a def compiles':<22}{'yes' if works else 'NO'}")
    return 0 if works else 1


def _collect_environment_facts() -> Iterator[tuple[str, str]]:
    target = host()
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for package in ("tensor-comprehensions", "torch", "islpy", "llvmlite", "numpy", "lark"):
        yield package, version(package)
    yield "LLVM", ".".join(map(str, llvm.llvm_version_info))
    yield "processor", f"{target.name}, {os.cpu_count()} logical cores"
    yield "vectors", f"{target.vector_registers} registers of {target.vector_bits} bits"
    yield "data caches", ", ".join(f"{size >> 10} KiB" for size in target.cache)
    yield "threads", f"{torch.get_num_threads()} (torch.set_num_threads)"
    functions = host_symbols.vector_functions()
    yield "vector mathematics", f"{len(functions)} functions of SLEEF, from torch's library"
    decision = availability.decide_fast_path()
    yield "fast path of calls", f"{'on' if decision.available else 'OFF'}: {decision.reason}"
    yield "CUDA devices", str(torch.cuda.device_count()) if torch.cuda.is_available() else "none"
    yield "CUDA compiler", _describe_nvrtc()
    yield "CUDA launches", _describe_launch_support()
    yield "CUDA on the CPU", "kernel.emulate works" if emulator.is_emulator_available() else "needs g++"
    compiler = shutil.which("cc") or shutil.which("g++") or shutil.which("clang")
    yield "C compiler", f"{compiler or 'none'} (not needed; torch.compile wants one)"


def _describe_nvrtc() -> str:
    if not nvrtc.is_nvrtc_available():
        return "none: CUDA text can be made and emulated, not compiled"
    return "NVRTC {}.{}".format(*nvrtc.find_toolchain().version)


def _describe_launch_support() -> str:
    try:
        cuda_api()
    except ArgumentError as error:
        return f"none: {error.message}"
    return "by CuPy"


def _kernel_works() -> bool:
    op = define("def double_plus(float(N) x) -> (y) { y(i) = 2 * x(i) + i }").double_plus
    x = torch.arange(1000, dtype=torch.float32)
    return torch.equal(op(x), 3 * x)


if __name__ == "__main__":
    sys.exit(main())
