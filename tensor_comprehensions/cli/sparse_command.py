"""`tensorc sparse`: show, run, check and time an expression in index notation over sparse tensors."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..api import Op, define
from ..core.error_boundary import only_tc_errors
from ..core.errors import ArgumentError
from ..dispatch.arguments import TORCH_TYPES
from ..dispatch.signatures import declared_dims
from ..dispatch.sparse.interop import as_sparse
from ..dispatch.sparse.sparse_tensor import SparseTensor
from ..dispatch.sparse.tensor_files import read_tensor, write_tensor
from ..sparse.index_notation import notation_to_def
from ..target import GPUS
from ..tc_lang.binding.bind import bind
from ..tc_lang.formats import coo_format
from ..tc_lang.ir import Symbol

EMITTED = {"tc": "tc", "plan": "schedule", "loops": "loops", "c": "c", "llvm": "llvm", "asm": "asm"}
"""The kinds of text for `--emit`, with the names that `source` has for them."""
EMITTED_FOR_GPUS = {"tc": "tc", "plan": "schedule", "loops": "loops", "cuda": "cuda", "opencl": "opencl"}
"""The kinds of text for `--emit` with `--target`."""
DEFAULT_EMITTED = "tc,plan,loops"
DEFAULT_PATTERN = "uniform:0.1"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF_TOLERANCE = 1e-2
MAX_INSTANCES = 1 << 26
"""Maximum number of instances of a statement for `--verify`: the reference evaluator's arrays have this size."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `sparse` and its arguments."""
    parser = commands.add_parser(
        "sparse",
        help="show, run, check and time an expression over sparse tensors",
        description=__doc__,
        epilog="For example: tensorc sparse 'y(i) = b(i) - A(i,j)*x(j)' -f A:csr -d A:900,900 -g A:band:2 --verify",
    )
    parser.set_defaults(command=run_sparse_command)
    add = parser.add_argument
    add("expression", help="index notation, such as 'y(i) = A(i,j)*x(j)': sums are implied in each term")
    add("-f", dest="formats", action="append", default=[], metavar="A:FORMAT", help="the format of a tensor: A:csr")
    add("-d", dest="shapes", action="append", default=[], metavar="A:M,N", help="the sizes of an operand: A:5,5")
    add(
        "-t",
        dest="types",
        action="append",
        default=[],
        metavar="A:TYPE",
        help="the element type of a tensor (default float)",
    )
    add(
        "-i", dest="inputs", action="append", default=[], metavar="A:FILE", help="read a tensor from .mtx, .tns or .npz"
    )
    add(
        "-o", dest="outputs", action="append", default=[], metavar="y:FILE", help="write a result to .mtx, .tns or .npz"
    )
    add(
        "-g", dest="patterns", action="append", default=[], metavar="A:PATTERN",
        help=f"make a random tensor: uniform:DENSITY, band:WIDTH or power:DENSITY (default {DEFAULT_PATTERN})",
    )  # fmt: skip
    add(
        "--emit", default="", metavar="KINDS",
        help=f"print these, of {','.join(EMITTED)}; with --target, of {','.join(EMITTED_FOR_GPUS)}",
    )  # fmt: skip
    add("--target", metavar="TARGET", help=f"a GPU to compile for, which --verify emulates: {', '.join(GPUS)}")
    add("--time", type=int, default=0, metavar="N", help="run N times, and print the median")
    add("--verify", action="store_true", help="compare with the reference evaluator")


def run_sparse_command(options: argparse.Namespace) -> int:
    """Make the operands, then run the requested actions. Returns 1 if the result is wrong, else 0."""
    formats, types = _parse_name_value_pairs(options.formats, "-f"), _parse_name_value_pairs(options.types, "-t")
    op = define(notation_to_def("expression", options.expression, types), formats=formats)["expression"]
    outputs = _parse_name_value_pairs(options.outputs, "-o")
    _check_names(outputs, op.function.returns, "-o", "result")
    kinds = _choose_emitted_kinds(options)
    operands = make_operands(
        op, formats, *(_parse_name_value_pairs(getattr(options, n), f) for n, f in _OPERANDS.items())
    )
    run_op: Callable[..., Any] = op
    if kinds or options.target:
        kernel: Any = op.compile(*operands, target=options.target)
        run_op = kernel.emulate if options.target else op
        for kind in kinds:
            text = kernel.source(_source_kinds(options)[kind]).rstrip()
            print(f"# {kind}\n{text}\n" if len(kinds) > 1 else text)
    if options.time:
        _time(op, operands, options.time)
    if outputs:
        result = run_op(*operands)
        for path in outputs.values():
            _write(path, result)
    return 0 if not options.verify or _verify(op, run_op, operands) else 1


def _source_kinds(options: argparse.Namespace) -> Mapping[str, str]:
    return EMITTED_FOR_GPUS if options.target else EMITTED


_OPERANDS = {"shapes": "-d", "inputs": "-i", "patterns": "-g"}


def _choose_emitted_kinds(options: argparse.Namespace) -> list[str]:
    """The kinds to print: those requested, or the default if nothing else was requested either."""
    asked = options.time or options.verify or options.outputs
    kinds = [k.strip() for k in (options.emit or ("" if asked else DEFAULT_EMITTED)).split(",") if k.strip()]
    if options.target and options.time:
        raise ArgumentError("--time is for CPUs", suggestion="leave --target or --time out")
    for kind in kinds:
        if kind not in _source_kinds(options):
            is_for_gpus = kind in EMITTED_FOR_GPUS
            raise ArgumentError(
                f"--emit has {kind!r}", expected=", ".join(_source_kinds(options)),
                suggestion="name a GPU: --target cuda:sm_90" if is_for_gpus else "",
            )  # fmt: skip
    return kinds


def _parse_name_value_pairs(parts: Sequence[str], flag: str) -> dict[str, str]:
    """Parse `["A:csr", ...]` into a dict."""
    found: dict[str, str] = {}
    for part in parts:
        name, colon, value = part.partition(":")
        if not (colon and name.strip() and value.strip()):
            raise ArgumentError(f"{flag} has {part!r}", expected="NAME:VALUE")
        found[name.strip()] = value.strip()
    return found


def _check_names(given: Mapping[str, object], known: Sequence[str], flag: str, what: str) -> None:
    for name in given:
        if name not in known:
            raise ArgumentError(f"{flag} names {name!r}, which is not {what}", expected=", ".join(known))


# --- operands ----------------------------------------------------------------------------------------------------


@only_tc_errors
def make_operands(
    op: Op, formats: Mapping[str, str], shapes: Mapping[str, str], files: Mapping[str, str], patterns: Mapping[str, str]
) -> list[Any]:
    """The operands of a call: read from files, or random; sizes come from `shapes` and from the files.

    Raises:
        ArgumentError: a file, a shape or a pattern is wrong, or a size is not known.
    """
    parameters = op.function.parameters
    for given, flag in ((shapes, "-d"), (files, "-i"), (patterns, "-g")):
        _check_names(given, [p.name for p in parameters], flag, "operand")
    known = {name: _parse_shape(name, text) for name, text in shapes.items()}
    read = {name: _read(path, known.get(name)) for name, path in files.items()}
    sizes: dict[str, int] = {}
    for p in parameters:
        shape = read[p.name].shape if p.name in read else known.get(p.name)
        if shape is not None:
            _add_sizes(p, shape, sizes)
    generator = torch.Generator().manual_seed(0)
    made: list[Any] = []
    for p in parameters:
        source = read.get(p.name)
        format = formats.get(p.name)
        if source is None and (format is not None or p.name in patterns):
            source = make_pattern(patterns.get(p.name, DEFAULT_PATTERN), _resolve_shape(p, sizes), p, generator)
        if source is None:
            made.append(_draw_nonzero_values(p, _resolve_shape(p, sizes), generator))
            continue
        source = source.with_values(source.values.to(TORCH_TYPES[p.dtype]))
        made.append(source.to_dense() if format is None else source.to(format))
    return made


def _parse_shape(name: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ArgumentError(f"-d has {name}:{text}", expected="sizes, separated by commas: A:5,5")
    return tuple(int(part) for part in parts)


def _read(path: str, shape: tuple[int, ...] | None) -> SparseTensor:
    """The tensor in a file. shape: the shape for files that do not contain one; None: derive it from the elements."""
    t = read_tensor(path)
    if shape is None or shape == t.shape:
        return t
    if Path(path).suffix != ".tns" or len(shape) != t.ndim:
        raise ArgumentError(f"{path} has other sizes", expected=str(shape), found=str(t.shape))
    return SparseTensor.from_coordinates(t.coordinates(), t.values.reshape(-1), shape, coo_format(t.ndim))


def _add_sizes(p: Symbol, shape: Sequence[int], sizes: dict[str, int]) -> None:
    if len(shape) != p.rank:
        raise ArgumentError(f"'{p.name}' has {p.rank} dimensions", found=f"{len(shape)} sizes")
    for d, (name, n) in enumerate(zip(declared_dims(p), shape, strict=True)):
        if sizes.setdefault(name, n) != n:
            raise ArgumentError(
                f"dimension {d} of '{p.name}' has another size", expected=str(sizes[name]), found=str(n)
            )


def _resolve_shape(p: Symbol, sizes: Mapping[str, int]) -> tuple[int, ...]:
    if missing := [d for d, name in enumerate(declared_dims(p)) if name not in sizes]:
        example = ",".join(str(sizes.get(name, 100)) for name in declared_dims(p))
        raise ArgumentError(
            f"the size of dimension {missing[0]} of '{p.name}' is not known", suggestion=f"add -d {p.name}:{example}"
        )
    return tuple(sizes[name] for name in declared_dims(p))


def _draw_nonzero_values(p: Symbol, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random values that are not 0: floats from 0.1 to 1.1, integers from 1 to 4, bools that are true."""
    if p.dtype.is_bool:
        return torch.ones(shape, dtype=torch.bool)
    if p.dtype.is_float:
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
    else:
        drawn = torch.randint(1, 5, shape, generator=generator)
    return drawn.to(TORCH_TYPES[p.dtype])


def make_pattern(text: str, shape: tuple[int, ...], p: Symbol, generator: torch.Generator) -> SparseTensor:
    """A random tensor with a pattern such as `uniform:0.1`: a name of `PATTERNS` and its number."""
    kind, _, number = text.partition(":")
    if not shape:
        raise ArgumentError(f"'{p.name}' is a number, and has no pattern", found=text)
    if kind not in PATTERNS:
        raise ArgumentError(f"-g has the pattern {kind!r}", expected=", ".join(f"{name}:NUMBER" for name in PATTERNS))
    try:
        amount = float(number)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < float("inf"):
        raise ArgumentError(f"-g has {text!r}", expected=f"{kind}:NUMBER, of at least 0")
    where = PATTERNS[kind](shape, amount, generator) if prod(shape) else torch.zeros((len(shape), 0), dtype=torch.int64)
    return SparseTensor.from_coordinates(
        where, _draw_nonzero_values(p, where.shape[1:], generator), shape, coo_format(len(shape))
    )


def _draw_uniform(shape: tuple[int, ...], density: float, generator: torch.Generator) -> Tensor:
    """The coordinates of a fraction `density` of all elements, at random; sparse ones may repeat."""
    count = min(prod(shape), round(density * prod(shape)))
    if 4 * count > prod(shape):
        flat = torch.randperm(prod(shape), generator=generator)[:count]
    else:
        flat = torch.randint(prod(shape), (count,), generator=generator)
    return _unravel(flat, shape)


def _unravel(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    rows = []
    for n in reversed(shape):
        rows.append(flat % n)
        flat = flat // n
    return torch.stack(rows[::-1]) if rows else torch.zeros((0, len(flat)), dtype=torch.int64)


def _list_band_coordinates(shape: tuple[int, ...], width: float, _: torch.Generator) -> Tensor:
    """The coordinates at most `width` away from the diagonal."""
    if len(shape) != 2:
        raise ArgumentError("the pattern 'band' is for matrices", found=f"{len(shape)} dimensions")
    rows = torch.arange(shape[0])
    offsets = torch.arange(-int(width), int(width) + 1)
    where = torch.stack((rows.repeat_interleave(len(offsets)), (rows[:, None] + offsets).reshape(-1)))
    return where[:, (where[1] >= 0) & (where[1] < shape[1])]


def _draw_power_law(shape: tuple[int, ...], density: float, generator: torch.Generator) -> Tensor:
    """Random coordinates of a fraction `density` of all elements; row n has a share proportional to 1 / (n + 1)."""
    weights = 1 / torch.arange(1, shape[0] + 1, dtype=torch.float64)
    below = prod(shape[1:])
    counts = (weights / weights.sum() * density * prod(shape)).round().clamp(max=below).long()
    rows = torch.arange(shape[0]).repeat_interleave(counts)
    inside = torch.randint(below, (len(rows),), generator=generator)
    return _unravel((rows * below + inside), shape)


PATTERNS: Mapping[str, Callable[[tuple[int, ...], float, torch.Generator], Tensor]] = {
    "uniform": _draw_uniform, "band": _list_band_coordinates, "power": _draw_power_law,
}  # fmt: skip
"""Ways to choose the pattern of a random tensor."""


# --- results -----------------------------------------------------------------------------------------------------


@only_tc_errors
def _time(op: Op, operands: Sequence[Any], rounds: int) -> None:
    op(*operands)
    times = []
    for _ in range(rounds):
        start = perf_counter()
        op(*operands)
        times.append(perf_counter() - start)
    print(f"median of {rounds} runs: {median(times) * 1e3:.4f} ms on {torch.get_num_threads()} threads")


@only_tc_errors
def _write(path: str, result: Any) -> None:
    if isinstance(result, Tensor):
        result = as_sparse(result, coo_format(result.ndim) if result.ndim else "dense")
    write_tensor(path, result)
    print(f"wrote {path}")


@only_tc_errors
def _verify(op: Op, run_op: Callable[..., Any], operands: Sequence[Any]) -> bool:
    """Whether the values and the pattern of the result agree with the reference evaluator."""
    sizes = {
        n: size
        for p, x in zip(op.function.parameters, operands, strict=True)
        for n, size in zip(declared_dims(p), x.shape, strict=True)
    }
    bound = bind(op.function, sizes, {n: int(x) for n, x in _collect_scalar_operands(op, operands).items()})
    instances = max(prod(i.extent for i in s.indices) for s in bound.statements)
    if instances > MAX_INSTANCES:
        raise ArgumentError(
            f"--verify would look at {instances} instances of a statement", expected=f"at most {MAX_INSTANCES}",
            suggestion="verify with smaller sizes",
        )  # fmt: skip
    found, expected = run_op(*operands), op.reference(*operands)
    difference = _compute_max_relative_error(_to_dense(found), _to_dense(expected))
    print(f"largest difference from the reference, relative to its largest value: {difference:.1e}")
    same = not isinstance(found, SparseTensor) or torch.equal(found.coordinates(), expected.coordinates())
    if not same:
        print("the stored places differ from those of the reference")
    return same and difference <= TOLERANCE.get(
        expected.dtype, HALF_TOLERANCE if expected.dtype.is_floating_point else 0
    )


def _collect_scalar_operands(op: Op, operands: Sequence[Any]) -> dict[str, Tensor]:
    named = {p.name: x for p, x in zip(op.function.parameters, operands, strict=True)}
    return {name: named[name] for name in op.function.scalars}


def _to_dense(x: Tensor | SparseTensor) -> Tensor:
    return (x.to_dense() if isinstance(x, SparseTensor) else x).double()


def _compute_max_relative_error(found: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    scale = max(1.0, expected.abs().max().item())
    return (found - expected).abs().max().item() / scale
