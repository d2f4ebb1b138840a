"""Tensor maps in the encoding of NVIDIA's driver: how boxes of a tensor are copied to shared memory and back.

`cuTensorMapEncodeTiled` computes on the CPU alone. Neither CuPy nor CUDA's runtime has it, so it is called in the
driver's own library, which exists on machines with a device; it is loaded at the first launch of a kernel with maps.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass
from typing import Any

from ...core.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, DType
from ...core.errors import ArgumentError, InternalError
from ...loop_ir.nodes import TensorMap

MAP_BYTES, MAP_ALIGNMENT = 128, 64
"""The size and the alignment of an encoded map in bytes."""
LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
"""The driver's library."""
_FLOATS = {FLOAT16: 6, FLOAT32: 7, FLOAT64: 8, BFLOAT16: 9}
_TFLOAT32 = 11
_BITS = {8: 0, 16: 1, 32: 2, 64: 4}
"""CUtensorMapDataType: of floats, of float32 that loads round to tf32, and of other types by bits."""
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""CUtensorMapSwizzle, by bytes."""
_NEAREST_SECTORS = 2
"""CU_TENSOR_MAP_L2_PROMOTION_L2_128B: loads fetch whole lines into L2."""


@dataclass(frozen=True, slots=True)
class TiledMap:
    """The arguments of `cuTensorMapEncodeTiled` that differ between maps, the fastest dimension first.

    Attributes:
        dtype, swizzle: as the driver's enumerators.
        extents, box: in elements. strides: in bytes, of all dimensions but the fastest.
    """

    dtype: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @staticmethod
    def of(m: TensorMap) -> TiledMap:
        """The arguments of the driver for a map."""
        size = m.buffer.type.dtype.size
        dtype = _TFLOAT32 if m.rounds else _data_type(m.buffer.type.dtype)
        return TiledMap(
            dtype, m.shape[::-1], tuple(s * size for s in m.strides[-2::-1]), m.box[::-1],
            _SWIZZLES[m.swizzle],
        )  # fmt: skip


def _data_type(dtype: DType) -> int:
    return _FLOATS.get(dtype, _BITS[dtype.bits])


def encode_tensor_map(m: TiledMap, address: int, place: int) -> None:
    """Encode the map of a tensor at a device address into host memory at `place`, which is aligned to 64 bytes.

    Raises:
        ArgumentError: there is no driver, or one older than CUDA 12.
        InternalError: the driver refuses the map.
    """
    rank = len(m.extents)
    status = _encoder()(
        place, m.dtype, rank, address, (ctypes.c_uint64 * rank)(*m.extents),
        (ctypes.c_uint64 * max(1, rank - 1))(*m.strides), (ctypes.c_uint32 * rank)(*m.box),
        (ctypes.c_uint32 * rank)(*(1,) * rank), 0, m.swizzle, _NEAREST_SECTORS, 0,
    )  # fmt: skip
    if status:
        raise InternalError(
            f"CUDA refuses a tensor map with error {status}: {m} at address {address:#x}; "
            "TileOptions(instruction='mma') and MappingOptions() compile kernels without tensor maps"
        )


@functools.cache
def _encoder() -> Any:
    """The driver's `cuTensorMapEncodeTiled`. Raises ArgumentError if it is missing."""
    try:
        function = ctypes.CDLL(LIBRARY).cuTensorMapEncodeTiled
    except OSError as error:
        raise ArgumentError(
            "launching kernels that copy boxes needs NVIDIA's driver", found=str(error),
            suggestion="nvidia-smi tells whether it is there",
        ) from error  # fmt: skip
    except AttributeError as error:
        raise ArgumentError(
            "NVIDIA's driver cannot encode tensor maps", expected="a driver for CUDA 12 or newer"
        ) from error
    number, pointer = ctypes.c_int, ctypes.c_void_p
    function.argtypes = [
        pointer, number, ctypes.c_uint32, pointer, *(ctypes.POINTER(ctypes.c_uint64),) * 2,
        *(ctypes.POINTER(ctypes.c_uint32),) * 2, *(number,) * 4,
    ]  # fmt: skip
    function.restype = number
    return function
