"""Planes of units (docs/format.md, section 4)."""

from packhorse.layout import DType, Split

__all__ = ["split_planes"]


def split_planes(data: bytes, dtype: DType, split: int) -> list[bytes]:
    """Section 4, from the units' values."""
    size = dtype.unit_nbytes
    if split == Split.WHOLE:
        return [data]
    planes = [data[size - 1 - i :: size] for i in range(size)]
    if split == Split.FLOAT and size == 1:
        return [bytes(byte << 1 & 0xFF | byte >> 7 for byte in data)]
    if split == Split.FLOAT:
        r = 4 if dtype.name == "F64" else 1
        tops = [high << 8 | low for high, low in zip(planes[0], planes[1], strict=True)]
        planes[0] = bytes(t >> (8 - r) & 0xFF for t in tops)
        planes[1] = bytes(t << r & 0xFF | t >> (16 - r) for t in tops)
    return planes
