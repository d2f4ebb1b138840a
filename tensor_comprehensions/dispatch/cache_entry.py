"""`op.cache_entry`: the cached kernel and measurements of a call, and the injection of hand-written kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..cache import measurement_store
from ..cache import stored_kernels as cache
from ..cache.key import Key, make_key
from ..cache.measurement_store import Measurement
from ..cache.store import INJECTED, KERNEL, Store
from ..cache.stored_kernels import StoredKernel
from ..core.errors import ArgumentError, CacheError, InternalError
from ..options import CpuOptions
from ..runtime.cpu import object_code
from ..target import CpuTarget
from ..tc_lang.ir import BoundFunction, Function
from .call_steps import Arguments, allocate_output, copy_initial_values, evaluate_reference
from .inline_cache import plain_launcher
from .persistent_kernel_cache import deserialize_kernel, kernel_key

TOLERANCE = 1e-3
"""Largest error of an injected kernel's results, relative to the largest element of the reference."""


@dataclass(frozen=True, slots=True, eq=False)
class CacheEntry:
    """The cache entry of a def, sizes, layouts, options and machine.

    Attributes:
        key: the key of the kernel.
        tuning_key: the key of the measurements.
        store: the cache.
    """

    key: Key
    tuning_key: Key
    store: Store
    _function: Function
    _bound: BoundFunction
    _arguments: Arguments
    _options: CpuOptions
    _target: CpuTarget
    _forget: Callable[[], None]

    @property
    def kernel(self) -> StoredKernel | None:
        """The compiled code and its metadata; None if the cache has none."""
        return cache.find_kernel(self.store, self.key)

    @property
    def path(self) -> Path | None:
        """The file for the compiled code, which need not exist; None if the cache is off."""
        if self.store.mode == "off":
            return None
        by_hand = self.store.path(cache.kernel_entry_name(self.key, INJECTED))
        return by_hand if by_hand.exists() else self.store.path(cache.kernel_entry_name(self.key))

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Options that were measured for these sizes on this machine, the fastest first."""
        return measurement_store.recall_measurements(self.store, self.tuning_key)

    def __repr__(self) -> str:
        found = self.kernel
        what = "no kernel" if found is None else f"{len(found.data)} bytes of code"
        if found is not None and found.metadata.get("injected"):
            what += ", put there by hand"
        return f"<cache entry {self.key.digest[:12]}: {what}, {len(self.measurements)} measurements>"

    def explain(self) -> str:
        """The parts of the key, and whether a kernel is stored; if not, how the nearest one differs."""
        lines = [f"{name:<31}{text}" for name, text in self.key.parts]
        near = cache.nearest_kernel_key(self.store, self.key)
        if self.kernel is not None:
            lines.append("there is a kernel for this key")
        elif near is None:
            lines.append("there is no kernel of this def for this machine")
        else:
            lines.append("there is no kernel for this key; the nearest has another")
            lines += [f"  {name:<29}{near[name] or 'nothing'}" for name in self.key.difference(near)]
        return "\n".join(lines)

    def inject(self, text: str, temporaries: Sequence[int] = (), *, check: bool = True) -> None:
        """Replace the kernel of this key by hand-written assembly, in this cache only.

        It stays until it is removed, or until a part of the key changes, such as the version of this package.

        Args:
            text: LLVM assembly with the entry `i64 @tc_entry(ptr)`, as `kernel.source("llvm")` shows it.
            temporaries: bytes of each temporary that it gets after the arguments.
            check: run it on the tensors passed to `cache_entry`, and compare with the reference evaluator.

        Raises:
            ArgumentError: LLVM rejects the text, or the results are wrong.
            CacheError: the kernel cannot be stored.
        """
        if not isinstance(text, str):
            raise ArgumentError("the kernel is not a text", expected="LLVM assembly", found=type(text).__name__)
        if self.store.mode != "readwrite":
            raise CacheError("a kernel is put into a cache that cannot be written", suggestion="set TC_CACHE=readwrite")
        facts = {"temporaries": list(temporaries), "sites": [], "kernels": 1, "schedule": None, "injected": True}
        code = StoredKernel(self.key, *_assemble_text(text, self._target, facts))
        if check:
            self._check(code)
        if not cache.store_kernel(self.store, code, INJECTED):
            raise CacheError(f"the kernel cannot be kept in {self.store.root}")
        self._forget()

    def remove(self) -> bool:
        """Remove the kernel of this key, also an injected one. Returns False if there was none."""
        removed = [self.store.remove(cache.kernel_entry_name(self.key, layer)) for layer in (INJECTED, KERNEL)]
        self._forget()
        return any(removed)

    def _check(self, code: StoredKernel) -> None:
        """Check that the code computes the def. Raises ArgumentError."""
        compiled = deserialize_kernel(code, self._function, self._bound, self._options, self._target)
        outputs = tuple(allocate_output(self._bound, name) for name in self._bound.returns)
        for x in outputs:
            x.fill_(torch.nan if x.is_floating_point() else 85)  # so that unwritten elements show
        copy_initial_values(self._bound, self._arguments, outputs)
        plain_launcher(compiled).run(*self._arguments.inputs, *outputs)
        for name, mine, right in zip(
            self._bound.returns, outputs, evaluate_reference(self._bound, self._arguments), strict=True
        ):
            mine, right = mine.double(), right.double()
            scale = max(1.0, float(right.nan_to_num(0, 0, 0).abs().max())) if right.numel() else 1.0
            if not torch.allclose(mine, right, rtol=0, atol=TOLERANCE * scale, equal_nan=True):
                raise ArgumentError(
                    f"the kernel computes another '{name}' than {self._bound.name} says",
                    suggestion="check=False keeps it all the same",
                )


def cache_entry_of(
    function: Function,
    bound: BoundFunction,
    arguments: Arguments,
    options: CpuOptions,
    target: CpuTarget,
    store: Store,
    forget: Callable[[], None],
) -> CacheEntry:
    """The entry for a bound def. Raises ArgumentError if the options have no key, because they hold a function."""
    key = kernel_key(function, bound, options, target)
    if key is None:
        raise ArgumentError("these options have no key", suggestion="pass the schedule that the heuristic returns")
    tuning_key = make_key(function, bound, target, threads=torch.get_num_threads())
    return CacheEntry(key, tuning_key, store, function, bound, arguments, options, target, forget)


def _assemble_text(text: str, target: CpuTarget, facts: dict[str, object]) -> tuple[dict[str, object], bytes]:
    if "@tc_entry" not in text:
        raise ArgumentError("the text does not define the entry", expected="define i64 @tc_entry(ptr %arguments)")
    try:
        code = object_code.assemble(text, target)
    except InternalError as error:
        raise ArgumentError(str(error).replace("what we emitted", "the text")) from error
    return {**facts, "symbols": list(code.symbols)}, code.data
