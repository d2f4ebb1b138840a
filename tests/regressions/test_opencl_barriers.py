"""PoCL makes wrong code of a barrier below a condition in a loop: such conditions are bounds of the loop."""

from __future__ import annotations

import pytest

from tensor_comprehensions.codegen.gpu import opencl_printer as text
from tensor_comprehensions.options import MappingOptions
from tensor_comprehensions.runtime import opencl
from tensor_comprehensions.target import parse_gpu_target

from ..helpers.gpu_suite import check, conformance, map_case, memory_of

OPTIONS = MappingOptions(
    tile=(2, 32), threads=(16,), blocks=(2, 8, 8), unroll=64, private_memory=True, shared_depth=1,
    cooperative_reductions=True, split_k=4, collapse_loops=True, vector_width=4,
)  # fmt: skip


@pytest.mark.skipif(not opencl.is_opencl_available(), reason="running OpenCL needs a device, such as PoCL")
def test_products_of_rows_of_the_last_block() -> None:
    (case,) = (c for c in conformance() if c.name == "R15")
    module = map_case(case, OPTIONS, parse_gpu_target("cuda:sm_90"))
    arrays = memory_of(case, module)
    assert opencl.run_opencl(text.emit_opencl(module), module, arrays) == (0, 0)
    check(case, arrays)
