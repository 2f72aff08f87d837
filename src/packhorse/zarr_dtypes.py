"""zarr's data types for floats of 16, 8, 6 and 4 bits that NumPy has from ml_dtypes.

zarr 3 itself knows only NumPy's own dtypes. The names are those of the registry of zarr's
extensions, and for `float8_e4m3fn` that of TensorStore; elements of fewer than 8 bits take a byte
each. Importing this module teaches them to zarr, for arrays that are made or opened later. A type
that another package has registered under the same name stays in use.

Like `torch_dtypes.py`, this lies in a low layer because hops and users need it. Importing it needs
zarr.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import DataTypeValidationError, ZDType, data_type_registry

if TYPE_CHECKING:
    from zarr.core.common import ZarrFormat

__all__ = [
    "BFloat16",
    "Float4E2M1FN",
    "Float6E2M3FN",
    "Float6E3M2FN",
    "Float8E4M3FN",
    "Float8E4M3FNUZ",
    "Float8E5M2",
    "Float8E5M2FNUZ",
    "Float8E8M0FNU",
    "MLFloat",
    "zarr_dtype",
]

_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass(frozen=True, kw_only=True)
class MLFloat(ZDType[Any, Any], HasItemSize):
    """A data type of ml_dtypes. A subclass says which by `native`.

    Attributes:
        native: the dtype of NumPy.
    """

    native: ClassVar[np.dtype[Any]]

    def __init_subclass__(cls) -> None:
        cls.dtype_cls = type(cls.native)
        cls._zarr_v3_name = cls.native.name

    @classmethod
    def from_native_dtype(cls, dtype: np.dtype[Any]) -> Self:
        """The data type for a dtype of NumPy.

        Raises:
            DataTypeValidationError: it is for another dtype.
        """
        if dtype != cls.native:
            raise DataTypeValidationError(f"{dtype} is not {cls.native}")
        return cls()

    def to_native_dtype(self) -> np.dtype[Any]:
        """The dtype of NumPy."""
        return self.native

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return int(self.native.itemsize)

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        return cls._from_json_v3(data.get("name") if isinstance(data, dict) else data)

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name!r}")
        return cls()

    def to_json(self, zarr_format: ZarrFormat) -> Any:
        """The data type as an array's metadata name it."""
        name = self._zarr_v3_name
        return {"name": name, "object_codec_id": None} if zarr_format == 2 else name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, int | float | np.number | self.native.type)

    def cast_scalar(self, data: object) -> Any:
        """A number as an element.

        Raises:
            TypeError: it is not a number.
        """
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} is not a number, which {self._zarr_v3_name} needs")
        return self.native.type(data)

    def default_scalar(self) -> Any:
        """The element whose bits are all zero."""
        return np.zeros((), self.native)[()]

    def from_json_scalar(self, data: Any, *, zarr_format: ZarrFormat) -> Any:
        """An element from an array's metadata: a number, a word for one, or its bits.

        Raises:
            TypeError: it is none of these.
        """
        if isinstance(data, str) and data.startswith("0x"):
            bits = int(data, 16).to_bytes(self.item_size, "little")
            return np.frombuffer(bits, self.native)[0]
        return self.cast_scalar(_WORDS.get(data, data) if isinstance(data, str) else data)

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> str | float:
        """An element for an array's metadata; NaN and infinity as their bits."""
        element = np.asarray(self.cast_scalar(data))
        number = float(element)
        if np.isfinite(number):
            return number
        return f"0x{int.from_bytes(element.tobytes(), 'little'):0{2 * self.item_size}x}"


@dataclass(frozen=True, kw_only=True)
class BFloat16(MLFloat, HasEndianness):
    """bfloat16. NumPy has it in this machine's byte order only."""

    native = np.dtype(ml_dtypes.bfloat16)

    def to_native_dtype(self) -> np.dtype[Any]:
        """The dtype of NumPy.

        Raises:
            ValueError: the byte order is the other one.
        """
        if self.endianness != "little":
            raise ValueError("bfloat16 in big-endian byte order cannot be read")
        return super().to_native_dtype()


class Float8E4M3FN(MLFloat):
    """float8_e4m3fn."""

    native = np.dtype(ml_dtypes.float8_e4m3fn)


class Float8E5M2(MLFloat):
    """float8_e5m2."""

    native = np.dtype(ml_dtypes.float8_e5m2)


class Float8E8M0FNU(MLFloat):
    """float8_e8m0fnu."""

    native = np.dtype(ml_dtypes.float8_e8m0fnu)


class Float8E4M3FNUZ(MLFloat):
    """float8_e4m3fnuz."""

    native = np.dtype(ml_dtypes.float8_e4m3fnuz)


class Float8E5M2FNUZ(MLFloat):
    """float8_e5m2fnuz."""

    native = np.dtype(ml_dtypes.float8_e5m2fnuz)


class Float6E2M3FN(MLFloat):
    """float6_e2m3fn, one byte an element."""

    native = np.dtype(ml_dtypes.float6_e2m3fn)


class Float6E3M2FN(MLFloat):
    """float6_e3m2fn, one byte an element."""

    native = np.dtype(ml_dtypes.float6_e3m2fn)


class Float4E2M1FN(MLFloat):
    """float4_e2m1fn, one byte an element."""

    native = np.dtype(ml_dtypes.float4_e2m1fn)


_TYPES: dict[np.dtype[Any], type[MLFloat]] = {
    known.native: known
    for known in (
        BFloat16,
        Float8E4M3FN,
        Float8E5M2,
        Float8E8M0FNU,
        Float8E4M3FNUZ,
        Float8E5M2FNUZ,
        Float6E2M3FN,
        Float6E3M2FN,
        Float4E2M1FN,
    )
}


def zarr_dtype(dtype: np.dtype[Any]) -> Any:
    """The data type of zarr for a dtype of NumPy, to make an array with.

    Raises:
        ValueError: zarr has none.
    """
    ours = _TYPES.get(dtype)
    if ours is None:
        return data_type_registry.match_dtype(dtype)
    return data_type_registry.get(ours._zarr_v3_name).from_native_dtype(dtype)


for _type in _TYPES.values():  # for those who import this module
    if _type._zarr_v3_name not in data_type_registry.contents:
        data_type_registry.register(_type._zarr_v3_name, _type)
