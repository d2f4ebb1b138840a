"""The generated code is that of the .proto file beside it, which needs no compiler to check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from tensor_comprehensions.cache import tc_cache_pb2

PROTO = Path(tc_cache_pb2.__file__).with_name("tc_cache.proto")
TYPES = {
    "bool": FieldDescriptor.TYPE_BOOL,
    "sint64": FieldDescriptor.TYPE_SINT64,
    "int64": FieldDescriptor.TYPE_INT64,
    "uint32": FieldDescriptor.TYPE_UINT32,
    "double": FieldDescriptor.TYPE_DOUBLE,
    "string": FieldDescriptor.TYPE_STRING,
}


def read_declared_fields() -> dict[str, set[tuple[str, str, int, bool, str]]]:
    """The fields of every message in the file: type, name, number, whether repeated, and the oneof it is in."""
    text = re.sub(r"//.*", "", PROTO.read_text())
    messages = {}
    for name, body in re.findall(r"message (\w+) \{(.*?)\n\}", text, re.DOTALL):
        found, group = set(), ""
        for line in body.splitlines():
            if opened := re.match(r"\s*oneof (\w+)", line):
                group = opened[1]
            elif line.strip() == "}":
                group = ""
            elif field := re.match(r"\s*(repeated )?(\w+) (\w+) = (\d+);", line):
                found.add((field[2], field[3], int(field[4]), bool(field[1]), group))
        messages[name] = found
    return messages


def read_generated_fields() -> dict[str, set[tuple[str, str, int, bool, str]]]:
    names = {number: name for name, number in TYPES.items()}
    return {
        message.name: {
            (
                f.message_type.name if f.message_type else names[f.type], f.name, f.number, f.is_repeated,
                f.containing_oneof.name if f.containing_oneof else "",
            )
            for f in message.fields
        }
        for message in tc_cache_pb2.DESCRIPTOR.message_types_by_name.values()
    }  # fmt: skip


def test_the_generated_code_has_what_the_file_says() -> None:
    assert read_declared_fields() == read_generated_fields()
    assert tc_cache_pb2.DESCRIPTOR.package in PROTO.read_text()


@pytest.mark.parametrize("name", ["Key", "Options", "Measurement", "Collection"])
def test_the_types_for_checkers_know_every_message(name: str) -> None:
    stub = PROTO.with_name("tc_cache_pb2.pyi").read_text()
    assert f"class {name}(" in stub
    for field in tc_cache_pb2.DESCRIPTOR.message_types_by_name[name].fields:
        assert f"    {field.name}: " in stub


def test_there_is_something_to_check() -> None:
    assert sum(map(len, read_declared_fields().values())) > 20
