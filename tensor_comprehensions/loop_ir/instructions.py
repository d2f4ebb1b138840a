"""The functions besides the mathematical ones that a `Call` may name; each stands for a few machine instructions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT64, UINT32, DType
from ..core.math_functions import round_to_tf32


@dataclass(frozen=True, slots=True)
class Instruction:
    """A function with its types. evaluate: computes it on NumPy values, with bfloat16 held in float32."""

    name: str
    operands: tuple[DType, ...]
    result: DType
    evaluate: Callable[..., Any]


def _view_float32_bits(x: Any) -> Any:
    return np.asarray(x, np.float32).view(np.uint32)


def _pack_bfloat16_pair(low: Any, high: Any) -> Any:
    return (_view_float32_bits(low) >> np.uint32(16)) | (_view_float32_bits(high) & np.uint32(0xFFFF0000))


def _pair_float16(low: Any, high: Any) -> Any:
    a, b = (np.asarray(x, np.float16).view(np.uint16).astype(np.uint32) for x in (low, high))
    return a | (b << np.uint32(16))


def _float16_of(pair: Any, shift: int) -> Any:
    return (np.asarray(pair, np.uint32) >> np.uint32(shift)).astype(np.uint16).view(np.float16)


def _unpack_bfloat16_pair(pair: Any) -> tuple[Any, Any]:
    bits = np.asarray(pair, np.uint32)
    return (bits << np.uint32(16)).view(np.float32), (bits & np.uint32(0xFFFF0000)).view(np.float32)


def _accumulate_bfloat16_dot(total: Any, a: Any, b: Any) -> Any:
    """Add the second product first, with one rounding per addition, because bfloat16 products are exact in float32."""
    (low_a, high_a), (low_b, high_b) = _unpack_bfloat16_pair(a), _unpack_bfloat16_pair(b)
    return low_a * low_b + (high_a * high_b + np.asarray(total, np.float32))


def _round_bits(bits: Any) -> Any:
    return round_to_tf32(np.asarray(bits, np.uint32).view(np.float32)).view(np.uint32)


def _shift_left(bits: Any, count: Any) -> Any:
    return (_to_uint64(bits) << _to_uint64(count)).astype(np.int64)


def _shift_right(bits: Any, count: Any) -> Any:
    return (_to_uint64(bits) >> _to_uint64(count)).astype(np.int64)


def _trailing_zeros(bits: Any) -> Any:
    return _popcount(~bits & (bits - np.int64(1)))  # zeros below the lowest set bit become ones, all other bits 0


def _popcount(bits: Any) -> Any:
    return np.unpackbits(_to_uint64(bits)[..., np.newaxis].view(np.uint8), axis=-1).sum(-1, dtype=np.int64)


def _to_uint64(bits: Any) -> Any:
    return np.asarray(bits, np.int64).astype(np.uint64)


PAIR_BFLOAT16, DOT_BFLOAT16 = "pair_bfloat16", "dot_bfloat16"
PAIR_FLOAT16 = "pair_float16"
TF32_BITS = "tf32_bits"
BIT_AND, BIT_OR, SHIFT_LEFT, SHIFT_RIGHT = "bit_and", "bit_or", "shift_left", "shift_right"
TRAILING_ZEROS, POPCOUNT = "trailing_zeros", "popcount"
BROADCAST_WARP = "broadcast_warp"

INSTRUCTIONS = {
    i.name: i
    for i in (
        # Two bfloat16 in one value, the first in the low half.
        Instruction(PAIR_BFLOAT16, (BFLOAT16, BFLOAT16), UINT32, _pack_bfloat16_pair),
        # The same for float16, and the functions that extract the halves of such pairs.
        Instruction(PAIR_FLOAT16, (FLOAT16, FLOAT16), UINT32, _pair_float16),
        Instruction(f"low_{FLOAT16.name}", (UINT32,), FLOAT16, lambda pair: _float16_of(pair, 0)),
        Instruction(f"high_{FLOAT16.name}", (UINT32,), FLOAT16, lambda pair: _float16_of(pair, 16)),
        Instruction(f"low_{BFLOAT16.name}", (UINT32,), BFLOAT16, lambda pair: _unpack_bfloat16_pair(pair)[0]),
        Instruction(f"high_{BFLOAT16.name}", (UINT32,), BFLOAT16, lambda pair: _unpack_bfloat16_pair(pair)[1]),
        # (sum, pair, pair): the sum plus the products of the pairs' halves. Subnormal numbers may count as zero.
        Instruction(DOT_BFLOAT16, (FLOAT32, UINT32, UINT32), FLOAT32, _accumulate_bfloat16_dot),
        # The bits of a float32, rounded to tf32.
        Instruction(TF32_BITS, (UINT32,), UINT32, _round_bits),
        # Operations on 64 bits. Shifts, by 0 to 63, fill with zeros. `trailing_zeros` of 0 is 64.
        Instruction(BIT_AND, (INT64, INT64), INT64, operator.and_),
        Instruction(BIT_OR, (INT64, INT64), INT64, operator.or_),
        Instruction(SHIFT_LEFT, (INT64, INT64), INT64, _shift_left),
        Instruction(SHIFT_RIGHT, (INT64, INT64), INT64, _shift_right),
        Instruction(TRAILING_ZEROS, (INT64,), INT64, _trailing_zeros),
        Instruction(POPCOUNT, (INT64,), INT64, _popcount),
        # A number below 2^31 on which the threads of a warp agree, in a form that the compiler knows to be uniform.
        Instruction(BROADCAST_WARP, (INT64,), INT64, lambda x: x),
    )
}
