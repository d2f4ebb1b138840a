"""How the languages of the C family spell types, functions and pragmas: one table per dialect, no printing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, FLOAT64, INT64, UINT32, DType
from ...core.math_functions import FUNCTIONS, TF32
from ...loop_ir.instructions import (
    BIT_AND,
    BIT_OR,
    DOT_BFLOAT16,
    PAIR_BFLOAT16,
    POPCOUNT,
    SHIFT_LEFT,
    SHIFT_RIGHT,
    TF32_BITS,
    TRAILING_ZEROS,
)


@dataclass(frozen=True, slots=True)
class VectorType:
    """A vector type for loads and stores of several scalars at once.

    lanes: for each lane, the format of the expression that reads it from a value `{0}`.
    make: the format of the expression that makes a vector from its lanes.
    """

    name: str
    lanes: tuple[str, ...]
    make: str


@dataclass(frozen=True, slots=True)
class CDialect:
    """Spellings of one dialect.

    Attributes:
        name: the name of the language.
        types: the type of a scalar, by dtype name.
        math: how a function is called, by dtype name and function name.
        suffixes: the suffix of a literal, by dtype name. wide: the suffix of an integer that needs more than 32 bits.
        infinity, nan: the two literals that digits cannot spell.
        restrict: the qualifier of pointers that nothing else aliases.
        parallel, simd, unroll: the line before a loop, if any; `{}` takes clauses.
        assume: the line, before a loop that issues `wgmma`, that asserts a condition: that the loop runs at least once.
            Without it, the assembler serializes the products because control flow might skip the loop. Empty: none.
        critical: the line before a statement that one thread at a time may run.
        includes: headers, each with the words whose use in the text requires it.
        helpers: definitions by the name they define, printed when the text uses the name.
        reserved: names that nothing in the program may take.
        library: names that the printed function must not take either, because the language's library defines them.
        intrinsics: statements by the name of an intrinsic; `{}` take its operands (addresses of those that are not in
            registers), then its attributes.
        stack: the size in bytes up to which a private buffer is a local array.
        has_heap: whether there is a `malloc`.
        scalars: whether registers without dimensions are variables; else arrays of one element.
        small: the type of integers that are known to fit into 32 bits; empty: they are int64 like the others.
        widening: for storage-only types, by dtype name, the conversion to the type in which they compute.
        narrowing: the conversion to a storage-only type, by (source, target); others go through the accumulator type.
        extrema: names of the integer types for which the language's own min and max work.
        shared: the qualifier of memory that threads share. dynamic: the declaration of one buffer in dynamic shared
            memory, from the declaration of a pointer, the pointer's type, and the offset in bytes.
        check: the statement that records a failure, from the status, the number of the check and the value.
        spaces: the qualifier of pointers into a memory space, by the name of the space.
        vectors: the vector types by dtype name and lanes. vector_place: the lvalue of a vector in memory, from its
            qualified type and the address of its first scalar.
        atomics: by operator and dtype name, a statement on an address and a value.
        cached: a read through the read-only cache, from an address. uncached: types that cannot be read so.
    """

    types: Mapping[str, str]
    math: Mapping[str, Mapping[str, str]]
    suffixes: Mapping[str, str]
    infinity: str
    nan: str
    restrict: str
    parallel: str
    simd: str
    critical: str
    includes: tuple[tuple[str, tuple[str, ...]], ...]
    helpers: Mapping[str, str]
    reserved: frozenset[str]
    library: frozenset[str]
    intrinsics: Mapping[str, str]
    widening: Mapping[str, str]
    narrowing: Mapping[tuple[str, str], str]
    wide: str = "ll"
    unroll: str = ""
    assume: str = ""
    stack: int = 32768
    has_heap: bool = False
    scalars: bool = False
    small: str = ""
    extrema: frozenset[str] = frozenset()
    shared: str = ""
    dynamic: str = ""
    check: str = ""
    name: str = "C"
    spaces: Mapping[str, str] = field(default_factory=dict)
    vectors: Mapping[tuple[str, int], VectorType] = field(default_factory=dict)
    vector_place: str = ""
    atomics: Mapping[tuple[str, str], str] = field(default_factory=dict)
    cached: str = ""
    uncached: frozenset[str] = frozenset()

    def type(self, dtype: DType) -> str:
        return self.types[dtype.name]

    def is_storage_only(self, dtype: DType) -> bool:
        """Whether arithmetic on `dtype` converts to its accumulator and back."""
        return dtype.name in self.widening


_TF32 = "tf32_float32"


def helpers(types: Mapping[str, str], unsigned: Mapping[str, str], qualifier: str) -> dict[str, str]:
    """Definitions of the functions that C lacks, for each type that needs them; callees come before callers.

    Args:
        types: spellings by dtype name.
        unsigned: the spelling of the unsigned counterpart of each signed type, by the name of the signed type.
        qualifier: the words before each definition.
    """
    make = _Helper(types, unsigned, qualifier)
    table: dict[str, str] = {}
    for name in types:
        dtype = DTYPES[name]
        for op, sign in (("min", "<"), ("max", ">")):
            # NaN in either operand propagates, as in torch.
            chosen = f"a {sign} b || a != a" if dtype.is_float else f"a {sign} b"
            table[f"{op}_{name}"] = make.function(dtype, f"{op}_{name}", "a, b", f"return {chosen} ? a : b;")
        if dtype.is_integer:
            table |= {**make.floor_division(dtype), f"{name}_from_float": make.saturating_cast(dtype)}
    table |= make.bits()
    for dtype, suffix in ((FLOAT32, "f"), (FLOAT64, "")):
        name = f"rsqrt_{dtype.name}"
        table[name] = make.function(dtype, name, "a", f"return 1.0{suffix} / sqrt{suffix}(a);")
    bits, special = types[UINT32.name], "(a & 0x7f800000) == 0x7f800000"
    table[TF32_BITS] = make.function(
        UINT32, TF32_BITS, "a", f"return {special} ? a : (a + 0x1000) & 0xffffe000;  /* NaN and infinity stay */"
    )
    table[_TF32] = make.function(
        FLOAT32, _TF32, "a",
        f"const union {{ float value; {bits} bits; }} wide = {{a}};",
        f"const union {{ {bits} bits; float value; }} rounded = {{{TF32_BITS}(wide.bits)}};",
        "return rounded.value;",
    )  # fmt: skip
    return table


@dataclass(frozen=True, slots=True)
class _Helper:
    """Writes the definitions of helper functions."""

    types: Mapping[str, str]
    unsigned: Mapping[str, str]
    qualifier: str

    def floor_division(self, dtype: DType) -> dict[str, str]:
        """Division and remainder that round towards minus infinity; by zero both are 0 rather than a trap."""
        div, mod, spelling = f"floor_div_{dtype.name}", f"floor_mod_{dtype.name}", self.types[dtype.name]
        if not dtype.is_signed:
            return {
                div: self.function(dtype, div, "a, b", f"return b == 0 ? 0 : ({spelling})(a / b);"),
                mod: self.function(dtype, mod, "a, b", f"return b == 0 ? 0 : ({spelling})(a % b);"),
            }
        negated = f"({spelling})(0 - ({self.unsigned[dtype.name]})a)"
        return {
            div: self.function(
                dtype, div, "a, b",
                "if (b == 0) return 0;",
                f"if (b == -1) return {negated};  /* the quotient of the smallest value wraps */",
                f"return ({spelling})(a / b - (a % b != 0 && (a < 0) != (b < 0)));",
            ),
            mod: self.function(
                dtype, mod, "a, b",
                "if (b == 0 || b == -1) return 0;",
                f"const {spelling} r = a % b;",
                f"return ({spelling})(r != 0 && (r < 0) != (b < 0) ? r + b : r);",
            ),
        }  # fmt: skip

    def saturating_cast(self, dtype: DType) -> str:
        """A float-to-integer conversion that is defined where C's is not: NaN becomes 0, other values saturate.

        The limits are spelled so that no literal overflows its type.
        """
        limit = f"{2.0 ** (dtype.bits - dtype.is_signed):.1f}"
        lower = f"value <= -{limit}" if dtype.is_signed else "value <= 0.0"
        unsigned = self.unsigned.get(dtype.name, self.types[dtype.name])
        most = f"({self.types[dtype.name]})(({unsigned})-1{' / 2' if dtype.is_signed else ''})"
        least = f"({self.types[dtype.name]})(-{most} - 1)" if dtype.is_signed else "0"
        return self.function(
            dtype, f"{dtype.name}_from_float", "value",
            "if (value != value) return 0;",
            f"if ({lower}) return {least};",
            f"return value >= {limit} ? {most} : ({self.types[dtype.name]})value;",
            parameter="double",
        )  # fmt: skip

    def bits(self) -> dict[str, str]:
        """The 64-bit instructions of `Call` in idioms that compilers turn into single instructions."""
        wide = self.unsigned[INT64.name]
        signed, a = f"({self.types[INT64.name]})", f"({wide})a"
        odd, pairs, nibbles, ones = (f"({wide})0x{digits * 8}" for digits in ("55", "33", "0f", "01"))
        bodies = {
            BIT_AND: ("a, b", ("return a & b;",)),
            BIT_OR: ("a, b", ("return a | b;",)),
            SHIFT_LEFT: ("a, b", (f"return {signed}({a} << b);",)),
            SHIFT_RIGHT: ("a, b", (f"return {signed}({a} >> b);",)),
            POPCOUNT: ("a", (
                f"{wide} n = {a};",
                f"n -= n >> 1 & {odd};",
                f"n = (n & {pairs}) + (n >> 2 & {pairs});",
                f"n = (n + (n >> 4)) & {nibbles};",
                f"return {signed}(n * {ones} >> 56);",
            )),
            TRAILING_ZEROS: ("a", (f"return {POPCOUNT}(~a & {signed}({a} - 1));",)),
        }  # fmt: skip
        return {name: self.function(INT64, name, parameters, *body) for name, (parameters, body) in bodies.items()}

    def function(self, dtype: DType, name: str, parameters: str, *body: str, parameter: str = "") -> str:
        """The definition of a function that returns `dtype`. parameter: the C type of its parameters if it differs."""
        spelling = self.types[dtype.name]
        typed = ", ".join(f"{parameter or spelling} {p}" for p in parameters.split(", "))
        return "\n".join((f"{self.qualifier} {spelling} {name}({typed}) {{", *(f"    {line}" for line in body), "}"))


_BFLOAT16 = {
    "bfloat16_to_float": """static inline float bfloat16_to_float(uint16_t bits) {
    const union { uint32_t bits; float value; } wide = {(uint32_t)bits << 16};
    return wide.value;
}""",
    "bfloat16_from_float": """static inline uint16_t bfloat16_from_float(float value) {
    const union { float value; uint32_t bits; } wide = {value};
    if (value != value) return (uint16_t)(wide.bits >> 16 | 0x40);
    return (uint16_t)((wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16);  /* to nearest, ties to even */
}""",
    "bfloat16_from_double": """static inline uint16_t bfloat16_from_double(double value) {
    union { float value; uint32_t bits; } wide = {(float)value};
    if (wide.value == wide.value && wide.value != value) {  /* to odd, so that the second rounding is the only one */
        wide.bits -= fabs(wide.value) > fabs(value);
        wide.bits |= 1;
    }
    return bfloat16_from_float(wide.value);
}""",
    PAIR_BFLOAT16: """static inline uint32_t pair_bfloat16(uint16_t low, uint16_t high) {
    return (uint32_t)low | (uint32_t)high << 16;
}""",
    DOT_BFLOAT16: """static inline float dot_bfloat16(float total, uint32_t a, uint32_t b) {
    total += bfloat16_to_float((uint16_t)(a >> 16)) * bfloat16_to_float((uint16_t)(b >> 16));
    return total + bfloat16_to_float((uint16_t)a) * bfloat16_to_float((uint16_t)b);
}""",
}

_TYPES = {
    name: f"{name}_t" if dtype.is_integer else name for name, dtype in DTYPES.items()
} | {
    FLOAT16.name: "_Float16", BFLOAT16.name: "uint16_t", FLOAT32.name: "float", FLOAT64.name: "double",
}  # fmt: skip

_MATH = {
    FLOAT32.name: {name: f"{name}f" for name in FUNCTIONS} | {"rsqrt": "rsqrt_float32", TF32: _TF32},
    FLOAT64.name: {name: name for name in FUNCTIONS} | {"rsqrt": "rsqrt_float64"},
}

_KEYWORDS = """auto break case char const continue default do double else enum extern float for goto if inline int long
register restrict return short signed sizeof static struct switch typedef union unsigned void volatile while
_Bool _Complex _Imaginary _Float16 asm typeof bool true false malloc free NULL INFINITY NAN unix linux status"""

_LIBRARY = """main abort abs labs div ldiv exit atexit rand srand atoi atof atol calloc realloc system getenv qsort
bsearch j0 j1 jn y0 y1 yn gamma signgam scalb logb ilogb ldexp frexp modf nan remquo isnan isinf isfinite signbit
index rindex printf puts remove rename strlen memcpy memset memcmp memmove time clock select read write open close
pipe dup link"""

_HELPERS = {
    **_BFLOAT16,
    **helpers(
        {name: spelling for name, spelling in _TYPES.items() if name != BFLOAT16.name},
        {name: f"u{spelling}" for name, spelling in _TYPES.items() if name.startswith("int")},
        "static inline",
    ),
}

C99 = CDialect(
    types=_TYPES,
    math=_MATH,
    suffixes={"float16": "f", "bfloat16": "f", "float32": "f", "uint32": "u", "uint64": "ull"},
    infinity="INFINITY",
    nan="NAN",
    restrict="restrict",
    parallel="#pragma omp parallel for schedule(static){}",
    simd="#pragma omp simd{}",
    critical="#pragma omp critical",
    includes=(
        ("math.h", ("INFINITY", "NAN", *_MATH["float32"].values(), *_MATH["float64"].values())),
        ("stdbool.h", ("bool", "true", "false")),
        ("stdint.h", tuple(s for s in _TYPES.values() if s.endswith("_t"))),
        ("stdlib.h", ("malloc", "free", "NULL")),
    ),
    helpers=_HELPERS,
    reserved=frozenset(
        (*_KEYWORDS.split(), *FUNCTIONS, *(f"{f}f" for f in FUNCTIONS), *_TYPES.values(), *_HELPERS),
    ),
    library=frozenset(_LIBRARY.split()),
    has_heap=True,
    intrinsics={"prefetch": "__builtin_prefetch({}, {});"},
    widening={BFLOAT16.name: "bfloat16_to_float({})"},
    narrowing={
        (FLOAT32.name, BFLOAT16.name): "bfloat16_from_float({})",
        (FLOAT64.name, BFLOAT16.name): "bfloat16_from_double({})",
    },
)
