"""What a user of PyTorch expects of an operator library, item by item, and which tests see to it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tests.typed_use

ROOT = Path(__file__).parents[1]

ITEMS: dict[str, tuple[str, ...]] = {
    "define from a string": ("api/test_define.py::test_defs_are_attributes_and_items",),
    "REPL: no source file is needed": ("api/test_define.py::test_operators_and_libraries_are_copied_as_their_text",),
    "notebook": ("api/test_calls.py::test_show_is_text_and_picture",),
    "quickstart of five lines": ("docs/test_snippets.py::test_python_runs",),
    "opcheck: contiguous, permuted, sliced, empty, requires grad": (
        "torch_ext/test_operators.py::test_torch_finds_no_fault",
        "torch_ext/test_operators.py::test_torch_finds_no_fault_with_other_kinds_of_arguments",
    ),
    "torch.compile(fullgraph=True), forward and backward": (
        "torch_ext/test_compiled.py::test_forward_and_backward_in_one_graph",
        "torch_ext/test_compiled.py::test_inductor_calls_the_operators",
    ),
    "a changing batch compiles at most two graphs": (
        "torch_ext/test_compiled.py::test_a_changing_batch_compiles_at_most_two_graphs",
    ),
    "torch.export": ("torch_ext/test_compiled.py::test_export_keeps_a_symbolic_batch",),
    "AOTInductor": ("torch_ext/test_compiled.py::test_a_package_of_aot_inductor",),
    "torch.func.grad and its relatives": (
        "torch_ext/test_transforms.py::test_torch_func_transforms_a_product",
        "torch_ext/test_transforms.py::test_torch_func_transforms_a_chain_of_statements",
    ),
    "vmap": ("torch_ext/test_transforms.py::test_vmap_of_what_is_not_a_plain_tensor",),
    "autocast": ("torch_ext/test_transforms.py::test_autocast_casts_to_what_the_def_declares",),
    "gradcheck": (
        "api/test_autograd.py::test_gradients_agree_with_finite_differences",
        "conformance/test_gradients.py::test_gradients_agree_with_finite_differences",
    ),
    "name in torch.profiler": ("torch_ext/test_transforms.py::test_the_profiler_names_the_operator",),
    "deepcopy and pickle of ops and modules": (
        "torch_ext/test_operators.py::test_ops_and_modules_are_copied",
        "api/test_nn.py::test_it_is_copied",
    ),
    "DDP and FSDP": (
        "torch_ext/test_distributed.py::test_replicated_and_sharded_layers_get_the_gradients_of_the_whole_batch",
    ),
    "workers of a DataLoader, by fork": ("torch_ext/test_transforms.py::test_workers_of_a_data_loader",),
    "eight threads": (
        "torch_ext/test_transforms.py::test_eight_threads_with_many_shapes",
        "api/test_concurrency.py::test_eight_threads_compile_each_kernel_once",
    ),
    "no leak in 400,000 calls": ("api/test_memory.py::test_nothing_is_left_of_many_calls",),
    "arrays of NumPy and of other libraries, in and out": (
        "api/test_calls.py::test_arrays_in_arrays_out",
        "api/test_arguments.py::test_arrays_of_other_libraries_go_in_and_come_out",
    ),
    "float16 and bfloat16": ("api/test_calls.py::test_half_precision_in_kernels_and_in_the_reference",),
    "types that kernels do not read are refused with a way out": (
        "torch_ext/test_kinds.py::test_types_that_kernels_do_not_read",
    ),
    "more than 2^31 elements": (
        "torch_ext/test_large.py::test_elements_beyond_are_gathered",
        "torch_ext/test_large.py::test_strides_beyond",
    ),
    "subclasses of tensors, tensors on meta": (
        "torch_ext/test_kinds.py::test_a_subclass_goes_in_and_comes_out",
        "torch_ext/test_kinds.py::test_tensors_on_meta_give_shapes",
    ),
    "streams and captured graphs, where there is a GPU": ("api/test_gpu.py::test_captured_in_a_graph",),
    "TC_INTERPRET": ("api/test_calls.py::test_interpret_gives_the_same",),
    "every error of a program has its line and a caret": ("tc_lang/test_mistakes.py::test_mistake",),
    "tensorc doctor": ("cli/test_cli.py::test_doctor_tells_versions_and_that_a_def_compiles",),
    "types for type checkers": ("torch_ext/test_acceptance.py::test_the_typed_program_runs",),
}
MISSING = {
    "CuPy and JAX arrays themselves": "neither is installed in CI; a library that speaks the array API stands for them",
    "float8 as storage": "kernels have no conversions of 8-bit floats; such tensors are refused with a way out",
    "rules for sharding DTensors": "fully_shard hands plain tensors to ops; torch says so of an op on a DTensor",
}


@pytest.mark.parametrize("item", ITEMS)
def test_an_item_has_its_tests(item: str) -> None:
    for test in ITEMS[item]:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_the_typed_program_runs() -> None:
    tests.typed_use.main()


def test_users_read_what_is_missing() -> None:
    page = (ROOT.parent / "docs" / "pytorch.md").read_text().partition("## Not supported")[2]
    for word in ("DTensor", "8 bits", "CuPy", "JAX"):
        assert word in page
    assert all(reason for reason in MISSING.values())
