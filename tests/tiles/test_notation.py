"""The notation of tensors and headers, both ways, and a caret under every mistake."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensor_comprehensions import tiles as t
from tensor_comprehensions.core.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, INT8, INT32
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.loop_ir.nodes import Space

law = settings(deadline=None)
KERNELS = (
    "C:[M,N].fp16 <- A:[M,K].fp16, B:[N,K].fp16",
    "Y:[N,D].fp16 <- X:[N,D].fp16, g:[D].fp16, b:[D].fp16",
    "H:[B,U].fp16, C:[B,U].fp32 <- x:[B,I].fp16, h:[B,U].fp16, c:[B,U].fp32, W:[4,U,I].fp16, R:[4,U,U].fp16",
    "C:[M,N].int32 <- A:[M,K].int8, B:[N,K].int8, scale:[].fp32",
)


@pytest.mark.parametrize("text", KERNELS)
def test_headers_print_as_they_are_written(text: str) -> None:
    assert str(t.header(text)) == text
    assert str(t.header(text.replace(" ", "").replace(",", " , "))) == text


def test_a_header_says_names_sizes_and_types() -> None:
    header = t.header("C:[M,4].int32 <- A:[M,K].int8, B:[4,K].bf16")
    assert header.outputs == (t.Parameter("C", ("M", 4), INT32),)
    assert header.inputs == (t.Parameter("A", ("M", "K"), INT8), t.Parameter("B", (4, "K"), BFLOAT16))
    assert header.symbols == ("M", "K")
    assert header.match_sizes({"A": (128, 32), "B": (4, 32)}) == {"M": 128, "K": 32}


@pytest.mark.parametrize(
    ("shapes", "message", "expected", "found"),
    [
        ({"A": (8, 4), "B": (6, 5)}, "sizes of B disagree", "B:[N,K].fp16, and K is 4 in A", "B:[6,5]"),
        ({"A": (8, 4), "B": (6,)}, "B has 1 dimensions", "B:[N,K].fp16", "B:[6]"),
    ],
)
def test_sizes_that_disagree(shapes: dict[str, tuple[int, ...]], message: str, expected: str, found: str) -> None:
    with pytest.raises(ArgumentError, match=message) as error:
        t.header(KERNELS[0]).match_sizes(shapes)
    assert (error.value.expected, error.value.found) == (expected, found)


def test_a_size_that_is_a_number_is_that() -> None:
    with pytest.raises(ArgumentError, match="sizes of A disagree"):
        t.header("B:[4].fp32 <- A:[4].fp32").match_sizes({"A": (5,)})


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("[16,16].fp16.SH", "[(16,16):(16,1)].fp16.SH"),
        ("[2,3,4].fp32.GL", "[(2,3,4):(12,4,1)].fp32.GL"),
        ("[32].int8.RF", "[32:1].int8.RF"),
        ("[].fp32.RF", "[].fp32.RF"),
        ("[(4,8)].fp32.GL", "[(4,8):(8,1)].fp32.GL"),
        ("[((4,8))].fp32.GL", "[((4,8)):((1,4))].fp32.GL"),
        ("[(4,8),2].fp32.GL", "[((4,8),2):((2,8),1)].fp32.GL"),
        ("[2,2].[8,4].bf16.GL", "[(2,2):(64,32)].[(8,4):(4,1)].bf16.GL"),
        ("[2,2].[(8,4):(1,8)].bf16.GL", "[(2,2):(64,32)].[(8,4):(1,8)].bf16.GL"),
        ("[64,64].fp16.SH.Sw<3,3,3>", "[(64,64):(64,1)].fp16.SH.Sw<3,3,3>"),
        ("[8:-1].fp64.GL", "[8:-1].fp64.GL"),
    ],
)
def test_strides_that_are_left_out_are_row_major(text: str, printed: str) -> None:
    assert str(t.tensor(text)) == printed
    assert t.tensor(printed) == t.tensor(text)


def test_threads_and_blocks() -> None:
    assert str(t.threads("[2,2].[32].thread")) == "[(2,2):(64,32)].[32:1].thread"
    assert str(t.threads("[64,4].block")) == "[(64,4):(4,1)].block"
    assert t.threads("[((4,2)):((1,16))].thread").levels[0].size == 8


def test_names_of_types_and_memories() -> None:
    assert t.tensor("[4].bf16.SH").memory is Space.SHARED
    for name in ("fp16", "bf16", "fp32", "fp64", *(n for n, d in DTYPES.items() if not d.is_float)):
        assert str(t.tensor(f"[4].{name}.GL")) == f"[4:1].{name}.GL"
    assert (t.tensor("[4].fp16.GL").dtype, t.tensor("[4].fp32.GL").dtype) == (FLOAT16, FLOAT32)


MISTAKES: list[tuple[Callable[[str], object], str, int, str, str]] = [
    (t.tensor, "[4,8].fp64", 11, "the data tensor ends too early", "'.'"),
    (t.tensor, "[4,8:1].fp32.GL", 5, "unexpected ':' in a data tensor", "']'"),
    (t.tensor, "[4 8].fp32.GL", 4, "unexpected '8' in a data tensor", "']'"),
    (t.tensor, "[4,8].fp15.GL", 7, "'fp15' is no type", "fp16"),
    (t.tensor, "[4,8].fp16.GM", 12, "'GM' is no memory", "GL, SH, RF"),
    (t.tensor, "[(4,8):(1,4,2)].fp32.GL", 7, "sizes and strides differ in structure", "as nested as (4, 8)"),
    (t.tensor, "[4,0].fp32.GL", 1, "a size is below 1", "1 or more"),
    (t.tensor, "[2].[(8,8):(16,1)].fp32.GL", 1, "this level needs strides", "strides"),
    (t.tensor, "[4,8].fp32.SH.Sx<1,2,3>", 15, "'Sx' is no swizzle", "Sw<bits,base,shift>"),
    (t.tensor, "[4,8].fp32.SH.Sw<3,3,2>", 15, "Sw<3,3,2> has no inverse", "at least 3"),
    (t.tensor, "[4,8].fp32.SH.Sw<3,-3,3>", 15, "negative", "0 or more"),
    (t.tensor, "[4,8].fp32.GL.Sw<3,3,3>", 12, "by Sw<3,3,3>", "a tensor in SH"),
    (t.tensor, "[4,8].fp32.GL$", 14, "unexpected '$' in a data tensor", "'.'"),
    (t.tensor, "", 1, "the data tensor ends too early", "'['"),
    (t.tensor, "[" * 3000, 2, "unexpected '[' in a data tensor", "an integer"),
    (t.tensor, "[" + "(" * 3000 + "1" + ")" * 3000 + "].fp32.GL", 1, "nest too deep", "16 levels"),
    (t.tensor, f"[4,8].fp32.SH.Sw<3,3,{'9' * 5000}>", 22, "this number is too long", "18 digits"),
    (t.tensor, f"[4,8].fp32.SH.Sw<3,3,{'9' * 9}>", 15, "permutes no offsets", "62 bits"),
    (t.tensor, f"[2].[{'9' * 18},{'9' * 18}].fp32.SH", 1, "this tensor is too large", "2^62 elements"),
    (t.tensor, f"[9:{'9' * 18}].fp32.GL", 3, "this tensor is too large", "2^62 elements"),
    (t.threads, "[4,8].warp", 7, "'warp' is no kind of threads", "thread, block"),
    (t.threads, "[(2,2):(1,1)].thread", 7, "cannot number [(2,2):(1,1)].thread", "multiples of 2"),
    (t.threads, "[4,8]", 6, "the thread tensor ends too early", "'.'"),
    (t.header, "C:[M].fp15 <- A:[M].fp16", 7, "'fp15' is no type", "fp16"),
    (t.header, "C:[M] <- A:[M].fp16", 7, "unexpected '<-' in a header", "'.'"),
    (t.header, "C:[M].fp16", 11, "the header ends too early", "'<-'"),
    (t.header, "C:[M].fp16 = A:[M].fp16", 12, "unexpected '=' in a header", "'<-'"),
    (t.header, "C:[Z].fp16 <- A:[M].fp16", 4, "no input has the size 'Z'", "a size of an input"),
    (t.header, "A:[M].fp16 <- A:[M].fp16", 15, "'A' is there twice", "a name of its own"),
    (t.header, "C:[M].fp16 <- A:[0,M].fp16", 18, "a size is below 1", "1 or more"),
    (t.header, f"C:[M].fp16 <- A:[M,{'9' * 19}].fp16", 20, "this number is too long", "18 digits"),
]


@pytest.mark.parametrize(("read", "text", "column", "message", "expected"), MISTAKES)
def test_mistakes_are_marked(
    read: Callable[[str], object], text: str, column: int, message: str, expected: str
) -> None:
    with pytest.raises(ArgumentError) as error:
        read(text)
    assert message in error.value.message
    assert expected in error.value.expected
    assert error.value.column == column
    assert "^" in str(error.value)


@pytest.mark.parametrize("read", [t.tensor, t.threads, t.header])
def test_what_is_no_text(read: Callable[[object], object]) -> None:
    with pytest.raises(ArgumentError, match="is written as text"):
        read(None)


@law
@given(st.sampled_from([*KERNELS, *(m[1] for m in MISTAKES if len(m[1]) < 100)]), st.data())
def test_a_mutilated_text_is_read_or_refused(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 4)))
    broken = text[:start] + data.draw(st.text("[](),.:<->_Sw0123AM \n", max_size=3)) + text[stop:]
    for read in (t.tensor, t.threads, t.header):
        with contextlib.suppress(ArgumentError):
            found = str(read(broken))
            assert str(read(found)) == found
