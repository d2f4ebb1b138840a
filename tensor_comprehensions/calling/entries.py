"""`op.cache_entry`: what the cache has for calls like one, and a kernel of one's own in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..cache import code as cache
from ..cache import tuning
from ..cache.code import Code
from ..cache.key import Key, make_key
from ..cache.store import INJECTED, KERNEL, Store
from ..cache.tuning import Measurement
from ..errors import ArgumentError, CacheError, InternalError
from ..options import CpuOptions
from ..runtime import cpu
from ..target import Target
from ..tc_lang.function import BoundFunction, Function
from .calls import Arguments, allocate, evaluate, fill_initial
from .lanes import plain_launcher
from .recall import key_of, restored

TOLERANCE = 1e-3
"""How far, relative to the largest element, the results of a kernel put there by hand may be from the reference."""


@dataclass(frozen=True, slots=True, eq=False)
class CacheEntry:
    """What the cache has for one def, sizes, layouts, options and machine.

    Attributes:
        key: of the kernel. tuning_key: of the measurements.
        store: the cache.
    """

    key: Key
    tuning_key: Key
    store: Store
    _function: Function
    _bound: BoundFunction
    _arguments: Arguments
    _options: CpuOptions
    _target: Target
    _forget: Callable[[], None]

    @property
    def kernel(self) -> Code | None:
        """The compiled code and the facts about it; None where there is none."""
        return cache.find(self.store, self.key)

    @property
    def path(self) -> Path | None:
        """The file with the compiled code; None where the cache is off."""
        if self.store.mode == "off":
            return None
        by_hand = self.store.path(cache.name_of(self.key, INJECTED))
        return by_hand if by_hand.exists() else self.store.path(cache.name_of(self.key))

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Options that were measured for these sizes on this machine, the fastest first."""
        return tuning.recall(self.store, self.tuning_key)

    def __repr__(self) -> str:
        found = self.kernel
        what = "no kernel" if found is None else f"{len(found.data)} bytes of code"
        if found is not None and found.facts.get("injected"):
            what += ", put there by hand"
        return f"<cache entry {self.key.digest[:12]}: {what}, {len(self.measurements)} measurements>"

    def explain(self) -> str:
        """The parts of the key, and whether there is a kernel; if not, in what the nearest one differs."""
        lines = [f"{name:<31}{text}" for name, text in self.key.parts]
        near = cache.nearest(self.store, self.key)
        if self.kernel is not None:
            lines.append("there is a kernel for this key")
        elif near is None:
            lines.append("there is no kernel of this def for this machine")
        else:
            lines.append("there is no kernel for this key; the nearest has another")
            lines += [f"  {name:<29}{near[name] or 'nothing'}" for name in self.key.difference(near)]
        return "\n".join(lines)

    def inject(self, text: str, temporaries: Sequence[int] = (), *, check: bool = True) -> None:
        """Use a kernel written by hand from now on, in this cache only.

        It stays until it is removed, or until a part of the key changes, such as the version of this package.

        Args:
            text: LLVM assembly with the entry `i64 @tc_entry(ptr)`, as `kernel.source("llvm")` shows it.
            temporaries: bytes of the memory that it gets after the arguments.
            check: run it on the tensors that the entry was asked for and compare with the reference evaluator.

        Raises ArgumentError where LLVM refuses the text or the results are wrong, CacheError where it cannot be kept.
        """
        if not isinstance(text, str):
            raise ArgumentError("the kernel is no text", expected="LLVM assembly", found=type(text).__name__)
        if self.store.mode != "write":
            raise CacheError("a kernel is put into a cache that cannot be written", suggestion="set TC_CACHE=write")
        facts = {"temporaries": list(temporaries), "sites": [], "kernels": 1, "strategy": None, "injected": True}
        code = Code(self.key, *_assembled(text, self._target, facts))
        if check:
            self._check(code)
        if not cache.keep(self.store, code, INJECTED):
            raise CacheError(f"the kernel cannot be kept in {self.store.root}")
        self._forget()

    def remove(self) -> bool:
        """Forget the kernel of this key, also one put there by hand; False where there was none."""
        removed = [self.store.remove(cache.name_of(self.key, layer)) for layer in (INJECTED, KERNEL)]
        self._forget()
        return any(removed)

    def _check(self, code: Code) -> None:
        """Does the code compute what the def says? Raises ArgumentError."""
        compiled = restored(code, self._function, self._bound, self._options, self._target)
        outputs = tuple(allocate(self._bound, name) for name in self._bound.returns)
        for x in outputs:
            x.fill_(torch.nan if x.is_floating_point() else 85)  # what is not written shows
        fill_initial(self._bound, self._arguments, outputs)
        plain_launcher(compiled).run(*self._arguments.inputs, *outputs)
        for name, mine, right in zip(self._bound.returns, outputs, evaluate(self._bound, self._arguments), strict=True):
            mine, right = mine.double(), right.double()
            scale = max(1.0, float(right.nan_to_num(0, 0, 0).abs().max())) if right.numel() else 1.0
            if not torch.allclose(mine, right, rtol=0, atol=TOLERANCE * scale, equal_nan=True):
                raise ArgumentError(
                    f"the kernel computes another '{name}' than {self._bound.name} says",
                    suggestion="check=False keeps it all the same",
                )


def entry_of(
    function: Function,
    bound: BoundFunction,
    arguments: Arguments,
    options: CpuOptions,
    target: Target,
    store: Store,
    forget: Callable[[], None],
) -> CacheEntry:
    """The entry for a bound def. Raises ArgumentError where the options are a function, which has no key."""
    key = key_of(function, bound, options, target)
    if key is None:
        raise ArgumentError("these options have no key", suggestion="pass the pipeline that the expert returns")
    tuning_key = make_key(function, bound, target, threads=torch.get_num_threads())
    return CacheEntry(key, tuning_key, store, function, bound, arguments, options, target, forget)


def _assembled(text: str, target: Target, facts: dict[str, object]) -> tuple[dict[str, object], bytes]:
    if "@tc_entry" not in text:
        raise ArgumentError("the text does not define the entry", expected="define i64 @tc_entry(ptr %arguments)")
    try:
        code = cpu.assemble(text, target)
    except InternalError as error:
        raise ArgumentError(str(error).replace("what we emitted", "the text")) from error
    return {**facts, "symbols": list(code.symbols)}, code.data
