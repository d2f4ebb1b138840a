"""Kernels out of the cache: what an earlier process compiled is loaded, not compiled again.

Always holds: a kernel that is found does what the compiler would make now, since its key has everything that the
compiler looks at. A kernel that somebody put there by hand does what they say it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from logging import DEBUG
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .. import knobs
from ..cache import code as cache
from ..cache import source
from ..cache.code import Code
from ..cache.key import Key, NotAKey, make_key
from ..cache.store import Store, current
from ..compiled import Compilation, Compiled
from ..errors import CannotLower
from ..inspection import logger
from ..later import later
from ..options import CpuOptions
from ..runtime import cpu
from ..runtime.cpu import ObjectCode
from ..target import Target
from ..tc_lang.function import BoundFunction, Function

if TYPE_CHECKING:
    from .. import compiler
    from ..loop_ir import nodes
    from ..loop_ir.nodes import CheckSite
    from ..structured import pipeline
else:
    compiler, nodes, pipeline = later("compiler"), later("loop_ir.nodes"), later("structured.pipeline")

C = TypeVar("C", bound=Compilation)


@dataclass(frozen=True, slots=True)
class Recipe(Generic[C]):
    """How a kernel is made, what of it is kept, and how it is made from that again.

    restore: raises CannotLower, or what wrong facts raise, where that cannot be.
    """

    name: str
    make: Callable[[], C]
    content: Callable[[C], tuple[Mapping[str, Any], bytes]]
    restore: Callable[[Code], C]


def recalled(store: Store, key: Key | None, recipe: Recipe[C]) -> C:
    """The kernel with this key, from the cache or made now; without a key it is made."""
    if key is not None and not _is_observed():
        found = _found(store, key, recipe)
        if found is not None:
            return found
    made = recipe.make()
    if key is not None:
        _keep(store, key, recipe, made)
    return made


def kernel(function: Function, bound: BoundFunction, options: CpuOptions, target: Target) -> Compiled:
    """The kernel of a bound def, from the cache or compiled now.

    Raises ArgumentError where the strategy of the options does not apply.
    """
    store = current()
    key = None if store.mode == "off" else key_of(function, bound, options, target)
    if key is None and store.mode != "off":  # there is a function among the options: what it returns can be a key
        options = compiler.settle(bound, options, target)
        key = key_of(function, bound, options, target)
    recipe = Recipe(
        bound.name,
        lambda: compiler.compile_function(bound, function.source, compiler.settle(bound, options, target), target),
        lambda made: (facts_of(made), made.code.data),
        lambda code: restored(code, function, bound, options, target),
    )
    return recalled(store, key, recipe)


def key_of(function: Function, bound: BoundFunction, options: CpuOptions, target: Target) -> Key | None:
    """The key of a kernel; None where its options have none."""
    try:
        return make_key(function, bound, target, options=options, flags=cpu.flags())
    except NotAKey as reason:
        logger("cache").debug("%s: has no key: %s", bound.name, reason)
        return None


def _is_observed() -> bool:
    """Does somebody want to see the kernel being made?"""
    topics = ("schedule", "loops", "code")
    k = knobs.current()
    return k.verify or bool(k.dump) or any(logger(topic).isEnabledFor(DEBUG) for topic in topics)


def _found(store: Store, key: Key, recipe: Recipe[C]) -> C | None:
    start = perf_counter()
    code = cache.find(store, key)
    if code is None:
        if logger("cache").isEnabledFor(DEBUG):
            logger("cache").debug("%s: not on disk%s", recipe.name, _why(store, key))
        return None
    try:
        made = recipe.restore(code)
    except (CannotLower, KeyError, TypeError, ValueError, IndexError) as error:
        store.tell(f"the entry {code.key.digest} cannot be used: {error}")
        return None
    seconds = perf_counter() - start
    logger("cache").debug("%s: found on disk, loaded in %.1f ms", recipe.name, seconds * 1e3)
    return replace(made, seconds=((FOUND, seconds),))


FOUND = "found"
"""The name of the only pass of a kernel that was in the cache."""


def was_found(compiled: Compilation) -> bool:
    """Was a kernel in the cache?"""
    return compiled.seconds[0][0] == FOUND


def _why(store: Store, key: Key) -> str:
    near = cache.nearest(store, key)
    return "" if near is None else f": the nearest differs in {', '.join(key.difference(near))}"


# --- kernels as entries ------------------------------------------------------------------------------------------


def _keep(store: Store, key: Key, recipe: Recipe[C], made: C) -> None:
    try:
        source.check_unchanged()
    except source.Unreadable as reason:
        logger("cache").debug("%s: not kept: %s", recipe.name, reason)
        return
    if cache.keep(store, Code(key, *recipe.content(made))):
        logger("cache").debug("%s: kept on disk as %s", recipe.name, key.digest[:12])


def facts_of(compiled: Compiled) -> Mapping[str, Any]:
    """What a kernel needs beside its machine code; tensors by their places, since names are not part of a key."""
    return {
        "symbols": compiled.code.symbols,
        "temporaries": compiled.temporaries,
        "sites": written_sites(compiled.sites, compiled.bound),
        "kernels": compiled.kernels,
        "strategy": _written(compiled.options.strategy),
    }


def restored(code: Code, function: Function, bound: BoundFunction, options: CpuOptions, target: Target) -> Compiled:
    """The kernel of an entry, loaded. Raises CannotLower where it cannot be, or another error for wrong facts."""
    facts = code.facts
    machine_code = ObjectCode(code.data, tuple(map(str, facts["symbols"])))
    strategy = facts["strategy"]
    if strategy is not None:
        options = replace(options, strategy=tuple((str(name), pipeline.parse(text)) for name, text in strategy))
    return Compiled(
        bound, function.source, options, target, (), machine_code, cpu.load_object(machine_code),
        tuple(map(int, facts["temporaries"])), read_sites(facts["sites"], bound), int(facts["kernels"]),
    )  # fmt: skip


def written_sites(sites: Sequence[CheckSite], bound: BoundFunction) -> list[tuple[int, int, int, int]]:
    """The sites of checks, for JSON."""
    places = {t.name: n for n, t in enumerate(bound.tensors)}
    return [(places[s.tensor], s.dimension, s.extent, s.origin) for s in sites]


def read_sites(facts: Any, bound: BoundFunction) -> tuple[CheckSite, ...]:
    """What `written_sites` wrote."""
    return tuple(
        nodes.CheckSite(bound.tensors[place].name, int(dimension), int(extent), int(origin))
        for place, dimension, extent, origin in facts
    )


def _written(strategy: Any) -> list[tuple[str, str]] | None:
    """A settled strategy: pairs of names and pipelines."""
    return None if strategy is None else [(name, repr(pipeline)) for name, pipeline in strategy]
