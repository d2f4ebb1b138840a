"""Modules with parameters: where they are in scope, and what they decide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.binding_checks import check_bindings
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import BlockCount, If, Kernel, Launch, Module, Parameter, Stmt, Store
from tensor_comprehensions.loop_ir.rename import rename
from tensor_comprehensions.loop_ir.show import format_program
from tensor_comprehensions.loop_ir.verify import verify

LAUNCH = Launch((9, 1, 1), (1, 1, 1), counts=(BlockCount("n", 1, 9), None, None))
X = replace(build.buffer("x", FLOAT32, (0,)), dynamic=(0,), extent_variables=("n",))
WRITE = Store(X, (build.var("block.x"),), build.const(1.0, FLOAT32))


def module_of(body: Stmt) -> Module:
    return Module("f", (X,), (), (Kernel("f", body, LAUNCH),), (), ("x",), parameters=(Parameter("n", 9),))


def test_parameters_are_in_scope_of_all_kernels() -> None:
    module = module_of(If(build.lt(build.var("block.x"), build.var("n")), WRITE))
    verify(module)
    check_bindings(module)
    for broken in (replace(module, parameters=()), replace(module, parameters=(Parameter("m"),))):
        with pytest.raises(InternalError):
            verify(broken)
        with pytest.raises(InternalError):
            check_bindings(broken)


def test_temporaries_are_dynamic_only_by_parameters() -> None:
    room = replace(module_of(WRITE), arguments=(), temporaries=(X,), written=())
    verify(room)
    with pytest.raises(InternalError, match="the temporary x is dynamic"):
        verify(replace(room, temporaries=(replace(X, extent_variables=()),)))


def test_an_interpreted_grid_follows_the_parameters() -> None:
    for n in (0, 1, 5):
        array = np.zeros(n, np.float32)
        assert interpret(module_of(WRITE), {"x": array}, {"n": n}) == []
        assert array.all()
    with pytest.raises(InternalError, match="argument x is"):
        interpret(module_of(WRITE), {"x": np.zeros(4, np.float32)}, {"n": 5})


def test_buffers_take_numbers_from_a_call() -> None:
    b = replace(X, shape=(0, 7), strides=(99, 1), extent_variables=("n", None), stride_variables=("s", None))
    found = b.bind_parameters({"n": 3, "s": 8, "m": 1})
    assert (found.shape, found.strides, found.dynamic) == ((3, 7), (8, 1), ())
    assert found.bytes == 4 * (2 * 8 + 7)


def test_parameters_are_shown_and_renamed() -> None:
    renamed = rename(module_of(WRITE), lambda name: name.upper(), "g")
    assert renamed.parameters == (Parameter("N", 9),)
    assert renamed.arguments[0].extent_variables == ("N",)
    text = format_program(renamed)
    assert "parameter N" in text
    assert "argument float32 X[N] written" in text
    assert "blocks min(9, N), 1, 1" in text
