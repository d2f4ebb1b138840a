"""Programs under other names: harmless ones, and those that lowering gives to what it introduces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from random import Random
from typing import Any

import tensor_comprehensions as tc
from tensor_comprehensions.compiler.compiled_kernel import PassContext
from tensor_comprehensions.compiler.cpu_passes import PASSES, with_original_names
from tensor_comprehensions.compiler.gpu_passes import GPU_PASSES, GpuPassContext
from tensor_comprehensions.core.internal_names import SEPARATOR
from tensor_comprehensions.loop_ir.names import Names
from tensor_comprehensions.loop_ir.nodes import Module
from tensor_comprehensions.options import CpuOptions, MappingOptions
from tensor_comprehensions.target import AVX512, parse_gpu_target
from tensor_comprehensions.tc_lang.binding.bind import bind
from tensor_comprehensions.tc_lang.builtins import CONSTANTS, is_builtin
from tensor_comprehensions.tc_lang.semantics.check import compile_source
from tensor_comprehensions.tc_lang.syntax import tree as syntax
from tensor_comprehensions.tc_lang.syntax.parse import parse_program
from tensor_comprehensions.tc_lang.syntax.printer import to_text
from tensor_comprehensions.tc_lang.transforms.canonical import _Renaming

SM90 = parse_gpu_target("cuda:sm_90")
Draw = Callable[[set[str]], str]
"""A name that is none of those taken."""


@dataclass(slots=True)
class _Drawn(_Renaming):
    draw: Draw = lambda taken: ""

    def _tensor(self, name: str) -> str:
        if name not in self.tensors:
            self.tensors[name] = self.draw({*self.tensors.values(), *self.locals.values(), *self.program})
        return self.tensors[name]

    def _local_name(self, name: str) -> str:
        if name not in self.locals:
            self.locals[name] = self.draw({*self.tensors.values(), *self.locals.values(), *self.program})
        return self.locals[name]

    def _callee(self, name: str) -> str:
        return name


def rename_program(source: str, draw: Draw, main: str) -> tuple[str, dict[str, str]]:
    """`source` with tensors, sizes, and indices as `draw` gives them; and those of the def `main` by the old names."""
    program: dict[str, syntax.Def] = {d.name: d for d in parse_program(source).defs}
    texts, names = [], {}
    for d in program.values():
        renaming = _Drawn(program, {n: n for n in program}, draw=draw)
        texts.append(to_text(renaming.definition(d)))
        if d.name == main:
            names = renaming.tensors
    return "\n".join(texts), names


def harmless(r: Random) -> Draw:
    """Names that occur nowhere else, in another order than they are drawn."""

    def draw(taken: set[str]) -> str:
        return next(n for n in (f"zq{r.randrange(10**6)}q" for _ in count()) if n not in taken)

    return draw


def hostile(r: Random) -> Draw:
    """Names that lowering gives, as a program could have them."""
    pool = minted_words()

    def draw(taken: set[str]) -> str:
        free = [word for word in pool if word not in taken]
        return r.choice(free) if free else harmless(r)(taken)

    return draw


SAMPLES: Sequence[tuple[str, dict[str, int]]] = (
    (
        "def f(float(M,K) A, float(N,K) B) -> (O) { O(i,j) +=! A(i,k) * B(j,k) O(i,j) = fmax(O(i,j), 0) }",
        {"M": 96, "N": 80, "K": 64},
    ),
    (
        "def f(float(Z,M,K) A, float(Z,N,K) B) -> (O) { O(i,j) +=! A(z,i,k) * B(z,j,k) }",
        {"M": 33, "N": 35, "K": 31, "Z": 9},
    ),
    ("def f(float(M,N) A, float(K) B) -> (O) { O(i,j,k) = A(i,j) * B(k) }", {"M": 30, "N": 40, "K": 50}),
    ("def f(float(M,N) A) -> (O) { O(i) +=! A(i,j) }", {"M": 300, "N": 4000}),
    ("def f(float(M,N) A) -> (O) { O(j) +=! A(i,j) }", {"M": 4000, "N": 3000}),
    ("def f(float(M,N) A) -> (O) { O(i,j) = A(j,i) + 1 }", {"M": 300, "N": 400}),
    ("def f(float(M,N) A) -> (O) { mx(i) max=! A(i,j) O(i,j) = A(i,j) - mx(i) }", {"M": 50, "N": 70}),
    ("def f(float(M,N) A, int64(K) I) -> (O) { O(i,j) = A(I(i),j) }", {"M": 50, "N": 70, "K": 999}),
    ("def f(half(M,N) A) -> (O) { O(i) +=! A(i,j) where i in 0:M }", {"M": 50, "N": 700}),
    ("def f(float(N) A) -> (float(N) O) { O(i) = O(N - 1 - i) + A(i) O(i) += A(i) }", {"N": 700}),
    (
        "def f(float(N,C,H) A, float(F,C,K) B) -> (O) { O(n,f,h) +=! A(n,c,h + k) * B(f,c,k) }",
        {"N": 4, "C": 16, "H": 34, "F": 32, "K": 3},
    ),
)
"""What lowering has most names for."""
WRITTEN = (
    "a0",
    "a1",
    "a2",
    "i0",
    "i1",
    "i2",
    "i3",
    "s0",
    "tx",
    "bx",
    "threadIdx",
    "float4",
    "restrict",
    "status",
    "int64_t",
)
"""What canonical programs and printed ones have."""
MAPPINGS = (
    MappingOptions(tile=(8, 16, 8), threads=(4, 4), shared_memory=True, private_memory=True),
    MappingOptions(threads=(32,), cooperative_reductions=True, split_k=4),
)


@cache
def minted_words() -> tuple[str, ...]:
    """The names, and the words in them, that lowering gives to what it introduces, spelled as identifiers."""
    found = dict.fromkeys(filter(_is_free, WRITTEN))
    for module in _lower_samples():
        for name in _names(module):
            whole = re.sub(r"\W", "_", name.strip(SEPARATOR))
            parts = [p for p in name.split(SEPARATOR) if p]
            for word in (whole, *parts, *("_".join(parts[k:]) for k in range(1, len(parts)))):
                if SEPARATOR in name and _is_free(word):
                    found[word] = None
    return tuple(found)


def _names(module: Module) -> Iterator[str]:
    yield from (b.name for b in (*module.arguments, *module.temporaries))
    for kernel in module.kernels:
        yield kernel.name
        yield from sorted(Names.of(kernel.body).taken)


def _is_free(word: str) -> bool:
    if not re.fullmatch(r"[A-Za-z_]\w*", word) or re.search(r"\d\d", word) or is_builtin(word) or word in CONSTANTS:
        return False
    try:
        parse_program(f"def f(float(N) {word}) -> (out) {{ out({word}) = 1 }}")
    except tc.TCError:
        return False
    return True


def _lower_samples() -> Iterator[Module]:
    """The samples after each pass, with the names of their programs where there are some."""
    for source, sizes in SAMPLES:
        (function,) = compile_source(source)
        bound = bind(function, sizes)
        for passes, job in (
            (PASSES, PassContext(CpuOptions(), AVX512)),
            (PASSES, PassContext(CpuOptions(use_microkernels=False, grain_size=1), AVX512)),
            *((GPU_PASSES, GpuPassContext(options, SM90)) for options in MAPPINGS),
        ):
            value: Any = bound
            for step in passes:
                value = step.run(value, job)
                if step.name in ("lower", "hoist"):
                    yield with_original_names(value, bound)
                if step.name == ("lower" if passes is GPU_PASSES else "hoist"):
                    break
