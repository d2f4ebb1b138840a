"""Divide a def into products for tensor cores and the rest, lower each part, and join them into one module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeAlias

from ...core.decisions import close_book
from ...core.errors import ArgumentError, CannotLower, InternalError
from ...core.internal_names import internal_name
from ...loop_ir.nodes import Buffer, Check, CheckSite, Kernel, Module, Stmt, Type
from ...loop_ir.origins import with_origin
from ...loop_ir.rewrite import map_stmt
from ...machine import GPU_LAUNCH_SECONDS
from ...options import TileOptions
from ...polyhedral.gpu import lower_gpu
from ...polyhedral.scop.collapse import collapse
from ...polyhedral.scop.rfactor import SplitPoint, in_two_stages, is_divisible
from ...target import GpuTarget
from ...tc_lang.ir import BoundFunction, BoundStatement, Role
from ...tc_lang.transforms.extract_statements import extract_statements_as_def, tensors_of_statements
from ...tc_lang.transforms.unit_dims import without_unit_dims
from .. import specs
from ..check.shared_accesses import with_buffers
from ..lower.lower_tiles import format_tiles, lower_program
from ..lower.tensor_core_products import ROUNDED
from .choose_tiles import choose_tiles
from .forward_definitions import forward_definitions
from .lower_product import lower_product
from .product_cost import ProductPrice
from .product_region import ProductRegion
from .product_tiles import ProductOrder, ProductTiles, order_indices
from .recognize_products import DefPiece, RefusedProduct, recognize_products


@dataclass(frozen=True, slots=True)
class TiledRegion:
    """A region with its chosen tiles, and their predicted cost."""

    region: ProductRegion
    order: ProductOrder
    tiles: ProductTiles
    price: ProductPrice

    def __str__(self) -> str:
        tile, warps = (" x ".join(map(str, sizes)) for sizes in (self.tiles.tile, self.tiles.warps))
        clusters = f" in clusters of {self.tiles.cluster}" if self.tiles.cluster > 1 else ""
        return (
            f"{self.region.text} on tensor cores: {self.price.blocks} blocks of {tile}{clusters}, {warps} warps, "
            f"{self.tiles.stages} stages; limited by {self.price.limiter}"
        )


TiledPiece: TypeAlias = TiledRegion | BoundFunction


@dataclass(frozen=True, slots=True)
class DividedDef:
    """A def divided into regions, and defs for the polyhedral mapper, which run in order.

    Attributes:
        function: the whole def, with as few dimensions as possible.
        refused: sums of products that cannot run on tensor cores.
        cycles: the predicted cycles of all pieces.
    """

    function: BoundFunction
    pieces: tuple[TiledPiece, ...]
    refused: tuple[RefusedProduct, ...]
    cycles: float

    @property
    def regions(self) -> tuple[TiledRegion, ...]:
        return tuple(p for p in self.pieces if isinstance(p, TiledRegion))


def divide_def(function: BoundFunction, options: TileOptions, target: GpuTarget) -> DividedDef:
    """The fastest predicted division of `function` (legalized), perhaps with split-K.

    Raises:
        CannotLower: no product can run on tensor cores; the message has the reason for each.
    """
    if not target.tensor_ops:
        raise CannotLower(f"{target.name} has no tensor cores that tile kernels use")
    function = forward_definitions(collapse(without_unit_dims(function)))
    whole = _choose_division(function, options, target)
    if options.split == 1 or (not options.split and any(r.region.chain for r in whole.regions)):
        return whole
    best = None if options.split else whole
    for parts in (options.split,) if options.split else _tried_parts(whole, target):
        with close_book():  # a trial, not a choice
            split = in_two_stages(function, lambda s, parts=parts: _split_point(whole, s, parts))  # type: ignore[misc]
        if len(split.tensors) == len(function.tensors):
            continue
        divided = _choose_division(split, options, target)
        if best is None or divided.cycles < SPLIT_PAYS * best.cycles:
            best = divided
    if best is None:
        raise CannotLower(f"no sum has {options.split} parts of whole tiles")
    return best


SPLIT_PAYS = 0.9
"""The maximum relative time at which more parts pay: they need memory and another kernel."""
PART_TERMS = 64
"""The terms of each part are a multiple of this, so that parts have whole tiles and aligned addresses."""
MAX_PARTS = 32


def _tried_parts(whole: DividedDef, target: GpuTarget) -> Iterator[int]:
    """The numbers of parts to try for split-K: powers of two, up to about two blocks per SM."""
    fewest = min(r.price.blocks for r in whole.regions)
    parts = 2
    while parts <= MAX_PARTS and parts * fewest <= 2 * target.num_sms:
        yield parts
        parts *= 2


def _split_point(whole: DividedDef, s: BoundStatement, parts: int) -> SplitPoint | None:
    """The longest reduction index and `parts`, if `s` is a region's sum and parts have whole tiles; else None."""
    regions = [r.region.contraction for r in whole.regions if len(r.region.pairs) == 1]
    updates = [c.statements[c.update] for c in regions]
    if s not in updates or not is_divisible(s):
        return None
    index = max(s.reduction_indices, key=lambda i: i.extent)
    return (index, parts) if index.extent % (parts * PART_TERMS) == 0 else None


def _choose_division(function: BoundFunction, options: TileOptions, target: GpuTarget) -> DividedDef:
    """The division with, or without, chains of products as single regions, whichever is predicted to be faster."""
    found, reasons = [], []
    for chains in (False, True):
        pieces, refused = recognize_products(function, tf32=options.products == ROUNDED, chains=chains)
        if chains and not any(isinstance(p, ProductRegion) and p.chain for p in pieces):
            break
        try:
            found.append(_choose_pieces(function, pieces, refused, options, target))
        except CannotLower as reason:
            reasons.append(reason)
    if not found:
        raise reasons[0]
    return min(found, key=lambda d: d.cycles)


def _choose_pieces(
    function: BoundFunction, pieces: Sequence[DefPiece], refused: tuple[RefusedProduct, ...], options: TileOptions,
    target: GpuTarget,
) -> DividedDef:  # fmt: skip
    """The division into `pieces`, with tiles for each region and the predicted cycles."""
    if not any(isinstance(p, ProductRegion) for p in pieces):
        raise CannotLower("; ".join(map(str, refused)) or "it has no sums of products")
    touched = [tensors_of_statements(p.statements if isinstance(p, ProductRegion) else p) for p in pieces]
    buffers = buffers_of(function)
    found: list[TiledPiece] = []
    cycles = 0.0
    for n, piece in enumerate(pieces):
        if isinstance(piece, ProductRegion):
            found.append(best := _choose_region(piece, buffers, options, target))
            cycles += best.price.cycles + GPU_LAUNCH_SECONDS * target.clock
        else:
            rest = extract_statements_as_def(
                function, internal_name(function.name, n), piece, touched[:n], touched[n + 1 :]
            )
            found.append(rest)
            cycles += lower_gpu.estimate_cycles(rest, target, collapsed=True)
    return DividedDef(function, tuple(found), refused, cycles)


def _choose_region(
    region: ProductRegion, buffers: Mapping[str, Buffer], options: TileOptions, target: GpuTarget
) -> TiledRegion:
    """The region with its tiles; its factors are exchanged if that is predicted to be faster."""
    found: list[TiledRegion] = []
    reasons: list[CannotLower] = []
    for one in (region, *([region.exchange_sides()] if _may_exchange(region, options, target) else [])):
        order = order_indices(one, buffers)
        try:
            found.append(TiledRegion(one, order, *choose_tiles(one, order, options, target)))
        except CannotLower as reason:
            reasons.append(reason)
    if not found:
        raise reasons[0]
    return min(found, key=lambda r: r.price.cycles)


def _may_exchange(region: ProductRegion, options: TileOptions, target: GpuTarget) -> bool:
    """Whether to try exchanging the factors: only the right one is computed, and wgmma supports that only for the left.

    Not if `options` give a tile, whose rows and columns would be exchanged, too.
    """
    pair, *more = region.pairs
    single = not more and not pair.others and region.chain is None and not options.tile and target.group_ops > 0
    return single and pair.right.element is None and pair.left.element is not None


def lower_divided(divided: DividedDef, target: GpuTarget) -> Module:
    """The module with the kernels of all pieces, in order."""
    function = divided.function
    buffers = buffers_of(function)
    kernels: list[Kernel] = []
    sites: list[CheckSite] = []
    temporaries: dict[str, Buffer] = {}
    for piece in divided.pieces:
        if isinstance(piece, TiledRegion):
            module = lower_program(region_program(piece, buffers, function.name, target))
            names = tuple(s.name for s in piece.region.statements)
            module = replace(module, kernels=tuple(replace(k, body=with_origin(k.body, names)) for k in module.kernels))
        else:
            module = lower_gpu.lower_gpu(piece, None, target, collapsed=True)
        others = set(buffers) - {b.name for b in module.temporaries} | set(temporaries)
        own = {b.name: _fresh_buffer(b, others) for b in module.temporaries}
        temporaries |= {b.name: b for b in own.values()}
        temporaries |= {b.name: b for b in module.arguments if function.tensor(b.name).role is Role.TEMPORARY}
        for kernel in module.kernels:
            single = len(divided.pieces) == len(module.kernels) == 1
            name = function.name if single else internal_name(function.name, len(kernels))
            kernels.append(_renumber_sites(_rename_temporaries(kernel, own), len(sites), name))
        sites += module.sites
    arguments = tuple(buffers[t.name] for t in function.tensors if t.role is not Role.TEMPORARY)
    written = tuple(t.name for t in function.tensors if t.role in (Role.OUTPUT, Role.INOUT))
    return Module(function.name, arguments, tuple(temporaries.values()), tuple(kernels), tuple(sites), written)


def region_program(piece: TiledRegion, buffers: dict[str, Buffer], name: str, target: GpuTarget) -> specs.Program:
    """The tile program of a region. Faults in it are bugs of the package, hence InternalErrors."""
    try:
        return lower_product(piece.region, piece.order, piece.tiles, buffers, name, target)
    except ArgumentError as error:
        raise InternalError(f"{piece}: {error}") from error


def format_divided(divided: DividedDef, target: GpuTarget) -> str:
    """Print the decomposition of each region in the notation of the paper; other pieces become comments."""
    buffers, texts = buffers_of(divided.function), []
    for n, piece in enumerate(divided.pieces):
        if isinstance(piece, TiledRegion):
            texts.append(
                f"// {piece}\n{format_tiles(region_program(piece, buffers, internal_name('region', n), target))}"
            )
        else:
            targets = ", ".join(dict.fromkeys(s.target for s in piece.statements))
            texts.append(f"// {targets}: mapped by the polyhedral lowering\n")
    return "\n".join(texts)


def explain_divided(divided: DividedDef, target: GpuTarget) -> str:
    """Describe the tiles of products on tensor cores, and the mapped schedules of other pieces."""
    lines = [f"on tensor cores: {divided.cycles / target.clock * 1e6:.1f} us"]
    lines += [f"no region: {r}" for r in divided.refused]
    for piece in divided.pieces:
        if isinstance(piece, TiledRegion):
            lines.append(f"kernel: {piece}")
        else:
            lines.append(lower_gpu.explain_gpu(piece, None, target, collapsed=True))
    return "\n".join(lines)


def buffers_of(function: BoundFunction) -> dict[str, Buffer]:
    """The buffer of each tensor, by its name."""
    return {t.name: Buffer(t.name, Type(t.dtype), t.shape, t.strides) for t in function.tensors}


def _fresh_buffer(b: Buffer, taken: set[str]) -> Buffer:
    """`b` with a name that is not in `taken`."""
    names = (b.name if n == 0 else internal_name(b.name, n) for n in count())
    return replace(b, name=next(name for name in names if name not in taken))


def _rename_temporaries(kernel: Kernel, own: Mapping[str, Buffer]) -> Kernel:
    """The kernel of a piece, with its temporaries renamed as `own` says."""
    changed = {name: b for name, b in own.items() if name != b.name}
    readonly = tuple(own[name].name if name in own else name for name in kernel.readonly)
    return replace(kernel, body=with_buffers(kernel.body, changed), readonly=readonly) if changed else kernel


def _renumber_sites(kernel: Kernel, first: int, name: str) -> Kernel:
    """The kernel as `name`, with the sites of its checks shifted by `first`."""

    def shift_site(s: Stmt) -> Stmt:
        s = map_stmt(s, lambda e: e, shift_site)
        return replace(s, site=s.site + first) if isinstance(s, Check) else s

    return replace(kernel, name=name, body=shift_site(kernel.body) if first else kernel.body)
