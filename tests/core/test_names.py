"""Names stay in the words of the field: no old name comes back, no public name means two things."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensor_comprehensions

PACKAGE = Path(tensor_comprehensions.__file__).parent
FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if not p.name.endswith("_pb2.py")]
NODES = {"tc_lang/syntax.py", "tc_lang/ir.py", "loop_ir/nodes.py", "tiles/specs.py"}
"""Trees of several levels: their nodes share names on purpose and are written with the name of the module."""
OLD_MODULES = frozenset(
    {
        "tc_lang/mistake",
        "tc_lang/numpy_eval",
        "dispatch/kernel_cache",
        "codegen/llvm/builder",
        "tc_lang/suggestions",
        "structured/planners/panel_extent",
        "autotuner/call",
        "autotuner/call_gpu",
        "autotuner/edits",
        "autotuner/frames",
        "autotuner/job",
        "autotuner/lookup",
        "autotuner/memory",
        "autotuner/oracle",
        "autotuner/processes",
        "autotuner/run",
        "autotuner/service",
        "autotuner/service_gpu",
        "autotuner/tune",
        "autotuner/tuner",
        "autotuner/zygote",
        "cache/code",
        "cache/entry",
        "cache/evict",
        "cache/exchange",
        "cache/files",
        "cache/programs",
        "cache/records",
        "cache/source",
        "cache/tuning",
        "caller",
        "calling/__init__",
        "calling/arguments",
        "calling/calls",
        "calling/describe",
        "calling/entries",
        "calling/gpu/__init__",
        "calling/gpu/arguments",
        "calling/gpu/kernels",
        "calling/gpu/lanes",
        "calling/gpu/library",
        "calling/gpu/plans",
        "calling/gpu/recall",
        "calling/kernels",
        "calling/lanes",
        "calling/recall",
        "calling/samples",
        "calling/sparse/files",
        "calling/sparse/fixed",
        "calling/sparse/kernel",
        "calling/sparse/kernels",
        "calling/sparse/lane",
        "calling/sparse/tensor",
        "calling/sparse/verify",
        "cli",
        "commands/__init__",
        "commands/cache",
        "commands/contract",
        "commands/sparse",
        "commands/tune",
        "sparse/notation",
        "tc_lang/gradients/stored",
        "torch_ext/sparse",
        "codegen/c",
        "codegen/c_dialect",
        "codegen/c_expressions",
        "codegen/c_integers",
        "codegen/c_statements",
        "codegen/c_vectors",
        "codegen/cuda",
        "codegen/gpu",
        "codegen/llvm",
        "codegen/llvm_arithmetic",
        "codegen/llvm_builder",
        "codegen/llvm_casts",
        "codegen/llvm_elementary",
        "codegen/llvm_expr",
        "codegen/llvm_fragments",
        "codegen/llvm_math",
        "codegen/llvm_memory",
        "codegen/llvm_ranges",
        "codegen/llvm_types",
        "codegen/llvm_usage",
        "codegen/opencl",
        "compiled",
        "compiler",
        "compiler_gpu",
        "compiler_sparse",
        "definitions",
        "dtypes",
        "einstein/__init__",
        "einstein/call",
        "einstein/definition",
        "einstein/equation",
        "einstein/operators",
        "einstein/order",
        "einstein/traced",
        "errors",
        "fluent",
        "graphs/__init__",
        "graphs/aten",
        "graphs/backend",
        "graphs/body",
        "graphs/choice",
        "graphs/products",
        "graphs/regions",
        "graphs/sized",
        "graphs/values",
        "graphs/windows",
        "guard",
        "inspection",
        "interrupts",
        "knobs",
        "later",
        "loop_ir/affine",
        "loop_ir/alike",
        "loop_ir/exchange",
        "loop_ir/fragments",
        "loop_ir/hoist",
        "loop_ir/interpret",
        "loop_ir/interpret_launch",
        "loop_ir/memory",
        "loop_ir/numbers",
        "loop_ir/promotion",
        "loop_ir/reductions",
        "loop_ir/rules",
        "loop_ir/simplify",
        "loop_ir/unroll",
        "loop_ir/vectorize",
        "loop_ir/widen",
        "math_functions",
        "module",
        "naming",
        "once",
        "polyhedral/affine",
        "polyhedral/checks",
        "polyhedral/clusters",
        "polyhedral/collapse",
        "polyhedral/emit",
        "polyhedral/gpu/banks",
        "polyhedral/gpu/check",
        "polyhedral/gpu/checks",
        "polyhedral/gpu/copies",
        "polyhedral/gpu/defaults",
        "polyhedral/gpu/footprint",
        "polyhedral/gpu/generate",
        "polyhedral/gpu/kernel",
        "polyhedral/gpu/mapping",
        "polyhedral/gpu/pipeline",
        "polyhedral/gpu/promote",
        "polyhedral/gpu/promotion",
        "polyhedral/gpu/reductions",
        "polyhedral/gpu/references",
        "polyhedral/gpu/registers",
        "polyhedral/gpu/separate",
        "polyhedral/gpu/spell",
        "polyhedral/gpu/stages",
        "polyhedral/gpu/statements",
        "polyhedral/gpu/strategy",
        "polyhedral/gpu/sync",
        "polyhedral/gpu/threads",
        "polyhedral/gpu/tree",
        "polyhedral/gpu/units",
        "polyhedral/gpu/unrolling",
        "polyhedral/gpu/vectors",
        "polyhedral/leaf",
        "polyhedral/legality",
        "polyhedral/lines",
        "polyhedral/locality",
        "polyhedral/movement",
        "polyhedral/nests",
        "polyhedral/prefetch",
        "polyhedral/promote",
        "polyhedral/reorder",
        "polyhedral/restricted",
        "polyhedral/rfactor",
        "polyhedral/schedule",
        "polyhedral/scop",
        "polyhedral/show",
        "polyhedral/split",
        "polyhedral/storage",
        "polyhedral/strategy",
        "polyhedral/tiles",
        "polyhedral/tiling",
        "processors",
        "runtime/boxed",
        "runtime/boxed_code",
        "runtime/cells",
        "runtime/cpu",
        "runtime/cubins",
        "runtime/cuda",
        "runtime/cuda_driver",
        "runtime/dispatch",
        "runtime/emulator",
        "runtime/faults",
        "runtime/guard_code",
        "runtime/host",
        "runtime/lane_code",
        "runtime/nvrtc",
        "runtime/pages",
        "runtime/process",
        "runtime/python_code",
        "sparse/problem",
        "strategies",
        "strides",
        "structured/affine",
        "structured/ahead",
        "structured/apply",
        "structured/candidates",
        "structured/chooser",
        "structured/contraction",
        "structured/copying",
        "structured/cost",
        "structured/crossed",
        "structured/describe",
        "structured/domain",
        "structured/estimate",
        "structured/expert",
        "structured/experts",
        "structured/facts",
        "structured/finish",
        "structured/fragment_kernel",
        "structured/fragments",
        "structured/insistent",
        "structured/length",
        "structured/microkernel",
        "structured/movement",
        "structured/movers",
        "structured/nest",
        "structured/normalise",
        "structured/pack",
        "structured/pairs",
        "structured/pipeline",
        "structured/ranking",
        "structured/recognise",
        "structured/registers",
        "structured/settle",
        "structured/sliding",
        "structured/strategy",
        "structured/sweep",
        "structured/terms",
        "structured/tile",
        "structured/translate",
        "structured/transpose",
        "structured/turned",
        "structured/unpack",
        "structured/unrolling",
        "structured/vector",
        "structured/windows",
        "tc_lang/arguments",
        "tc_lang/batched",
        "tc_lang/expressions",
        "tc_lang/formula",
        "tc_lang/function",
        "tc_lang/gradients/algebra",
        "tc_lang/gradients/factored",
        "tc_lang/gradients/keep",
        "tc_lang/gradients/shorten",
        "tc_lang/gradients/transposed",
        "tc_lang/gradients/versions",
        "tc_lang/gradients/windows",
        "tc_lang/gradients/write",
        "tc_lang/hints",
        "tc_lang/legalise",
        "tc_lang/library",
        "tc_lang/notes",
        "tc_lang/numeric",
        "tc_lang/prove",
        "tc_lang/shorthand",
        "tc_lang/show",
        "tc_lang/tables",
        "tc_lang/typed",
        "tc_lang/unparse",
        "torch_ext/batching",
        "torch_ext/casting",
        "torch_ext/native",
        "torch_ext/operators",
        "torch_ext/recording",
        "torch_ext/refusals",
        "torch_ext/shapes",
        "torch_ext/tracing",
        "translate",
    }
)
OLD_VARIABLES = ("TC_CACHE_KEY", "TC_CACHE_SIZE")
TWICE = frozenset(
    {
        "add",
        "select",
        "sub",
    }
)
"""Functions of several modules that do the same for different things."""
PARTICIPLES = frozenset({"embedding"})
"""At most 25: each takes a value and gives it back changed, or is the name of a torch operation."""
WORDS = frozenset(
    {
        "again",
        "ahead",
        "alike",
        "alone",
        "apart",
        "asked",
        "begun",
        "below",
        "beside",
        "cheapest",
        "crossing",
        "drawn",
        "ended",
        "found",
        "given",
        "gone",
        "greater",
        "greatest",
        "heaviest",
        "held",
        "here",
        "joined",
        "kept",
        "known",
        "left",
        "lesser",
        "light",
        "lost",
        "moved",
        "near",
        "noted",
        "placed",
        "plain",
        "sent",
        "settle",
        "settled",
        "shown",
        "shrunk",
        "suspect",
        "taken",
        "through",
        "together",
        "told",
        "turned",
        "unit",
        "unrecorded",
        "whole",
        "within",
        "work",
        "worn",
        "written",
    }
)
"""Participles without -ed and -ing, and adverbs, that were names of functions."""


BARE_WORDS = WORDS | frozenset(
    {
        "aligned",
        "alongside",
        "anew",
        "around",
        "at",
        "back",
        "beneath",
        "beyond",
        "built",
        "chosen",
        "compatible",
        "connected",
        "consistent",
        "contiguous",
        "crowded",
        "dense",
        "direct",
        "distinct",
        "done",
        "down",
        "drawn",
        "driven",
        "each",
        "else",
        "even",
        "everything",
        "everywhere",
        "exact",
        "exactly",
        "few",
        "first",
        "fit",
        "flat",
        "fresh",
        "frozen",
        "gone",
        "greedy",
        "grown",
        "heavy",
        "hidden",
        "initial",
        "injective",
        "inside",
        "instead",
        "into",
        "laid",
        "larger",
        "last",
        "lean",
        "least",
        "lent",
        "less",
        "linear",
        "local",
        "logical",
        "longer",
        "made",
        "meant",
        "met",
        "mine",
        "more",
        "most",
        "narrowest",
        "nearest",
        "next",
        "once",
        "only",
        "opaque",
        "others",
        "out",
        "outside",
        "over",
        "own",
        "paid",
        "past",
        "precise",
        "private",
        "put",
        "ran",
        "rather",
        "raw",
        "ready",
        "real",
        "resident",
        "said",
        "seen",
        "short",
        "shortest",
        "since",
        "single",
        "slow",
        "small",
        "smaller",
        "so",
        "some",
        "spent",
        "stepwise",
        "strict",
        "struck",
        "sunk",
        "swept",
        "then",
        "there",
        "torn",
        "under",
        "understood",
        "uniform",
        "unknown",
        "until",
        "upon",
        "useful",
        "usual",
        "valid",
        "weak",
        "what",
        "when",
        "where",
        "while",
        "wholly",
        "why",
        "wide",
        "with",
        "without",
        "won",
        "worse",
        "worst",
        "worth",
        "woven",
        "writable",
        "wrong",
        "wrote",
    }
)
"""Words that say neither an action nor an object, beside those in -ed and -ing."""
TILE_LEVEL = "gives a value of the same kind, as `sorted` does"
BARE_ALLOWED = {
    "composed": TILE_LEVEL,
    "divided": TILE_LEVEL,
    "each": "a word of the tile language",
    "elapsed": "the seconds since a start, as `torch.cuda.Event.elapsed_time`",
    "enlarged": TILE_LEVEL,
    "embedding": "the operation of torch",
    "fresh": "a name that nothing has yet, as compilers call it",
    "joined": TILE_LEVEL,
    "nested": "a rule of the grammar of layouts",
    "over": "a quotient, beside `plus`, `minus` and `times`",
    "parenthesized": "a rule of the grammar of the language",
    "picked": TILE_LEVEL,
    "real": "a rule of the grammar of the language",
    "reshaped": TILE_LEVEL,
    "ring": "a word of the tile language: a buffer of several stages",
    "shared": "a word of the tile language: a tensor in shared memory",
    "swizzled": TILE_LEVEL,
    "when": "a statement below a condition, as in Chisel",
    "where": "the operation of torch, in the tile language",
    "while": "the printer of a node of the loop IR, beside `_if` and `_let`",
}
"""At most 25 names of functions and methods that are a bare word, each with its reason."""


def public(path: Path) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_no_module_has_an_old_name() -> None:
    assert not [name_of(p) for p in FILES if name_of(p).removesuffix(".py") in OLD_MODULES]


def test_no_file_reads_an_old_variable() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert not [v for v in OLD_VARIABLES if re.search(rf"\b{v}\b", text)], name_of(path)


def test_a_public_name_means_one_thing() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        if name_of(path) not in NODES:
            for node in public(path):
                homes[node.name].add(name_of(path))
    twice = {name: sorted(where) for name, where in homes.items() if len(where) > 1 and name not in TWICE}
    assert not twice
    assert not {name for name in TWICE if len(homes[name]) < 2}, "no longer needed"


def test_public_functions_say_what_they_do() -> None:
    assert len(PARTICIPLES) <= 25
    bare = [
        f"{name_of(path)}: {node.name}"
        for path in FILES
        for node in public(path)
        if isinstance(node, ast.FunctionDef) and node.name not in PARTICIPLES
        if "_" not in node.name and (node.name in WORDS or re.fullmatch(r"[a-z]+(ed|ing)", node.name))
    ]
    assert not bare


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions, methods and functions inside of them; no properties, which may be nouns and adjectives."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not any(
            "property" in ast.unparse(decorator) for decorator in node.decorator_list
        ):
            yield node


def is_bare(name: str) -> bool:
    word = name.strip("_")
    return not name.startswith("__") and (word in BARE_WORDS or re.fullmatch(r"[a-z]+(ed|ing)", word) is not None)


def test_private_functions_and_methods_say_what_they_do() -> None:
    assert len(BARE_ALLOWED) <= 25
    names: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in functions(ast.parse(path.read_text(encoding="utf-8"))):
            if is_bare(node.name):
                names[node.name.strip("_")].append(f"{name_of(path)}:{node.lineno}: {node.name}")
    assert not [x for name, where in names.items() if name not in BARE_ALLOWED for x in where]
    assert not {name for name in BARE_ALLOWED if name not in names}, "no longer needed"


@pytest.mark.parametrize("name", ["_kept", "_added", "_without", "_racing", "chosen", "_at"])
def test_a_bare_word_is_found(name: str) -> None:
    assert is_bare(name)


@pytest.mark.parametrize(
    "name", ["_merge_equal_terms", "_is_scattered", "__len__", "_kept_labels", "footprint", "emit"]
)
def test_an_action_is_no_bare_word(name: str) -> None:
    assert not is_bare(name)


def test_neighboring_folders_share_no_module_name() -> None:
    """Folders of one folder, and a folder and those in it."""
    modules: dict[Path, set[str]] = defaultdict(set)
    for path in FILES:
        if path.name not in ("__init__.py", "__main__.py"):
            modules[path.parent].add(path.stem)
    for folder, names in modules.items():
        for other, others in modules.items():
            if folder < other and (folder.parent == other.parent or folder == other.parent):
                assert not names & others, f"{folder} and {other}"
