"""Operands and results of the emulated instructions, as arrays with an element for each lane."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from tests.ptx.faults import Fault, UnknownInstruction
from tests.ptx.program import Constant, Negated, Register, Special

if TYPE_CHECKING:
    from tests.ptx.machine import Warp

    Read = Callable[[Warp], np.ndarray]
    Write = Callable[[Warp, np.ndarray, "np.ndarray | None"], None]

TYPES: dict[str, np.dtype] = {
    **{f"{kind}{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8) for kind in "ub"},
    **{f"s{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "bf16": np.dtype(np.uint16),
    "f16": np.dtype(np.uint16),
    "bf16x2": np.dtype(np.uint32),
    "pred": np.dtype(bool),
}


def size_of(type_name: str) -> int:
    return TYPES[type_name].itemsize


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """FP32 to the nearest BF16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def reader(operand: object, type_name: str) -> "Read":
    """A function that returns an operand's values, of a type."""
    dtype = TYPES[type_name]
    if isinstance(operand, Register):
        return _register_reader(operand, dtype)
    if isinstance(operand, Negated):
        inner = reader(operand.register, "pred")
        return lambda warp: ~inner(warp)
    if isinstance(operand, Constant):
        if dtype.kind == "b":
            truth = np.array([operand.bits != 0])
            return lambda warp: truth
        unsigned = np.dtype(f"u{dtype.itemsize}")
        mask = (1 << 8 * dtype.itemsize) - 1
        values = np.array([operand.bits & mask], np.uint64).astype(unsigned).view(dtype)
        return lambda warp: values
    if isinstance(operand, Special):
        name = operand.name
        return lambda warp: warp.special(name).astype(dtype)
    raise UnknownInstruction(f"operand {operand}")


def _register_reader(register: Register, dtype: np.dtype) -> "Read":
    number, size = register.number, dtype.itemsize

    def read(warp: "Warp") -> np.ndarray:
        values = warp.registers[number]
        if values is None:
            raise Fault(f"register {register.name} is read before it is written")
        if number in warp.in_flight:
            raise Fault(f"register {register.name} is read while a product adds to it")
        if values.itemsize == size:
            return values.view(dtype)
        return values.astype(f"u{size}").view(dtype)

    return read


def writer(operand: object) -> "Write":
    """A function that writes values to a register where a mask is true; None means all lanes."""
    if isinstance(operand, Special) and operand.name == "_":
        return lambda warp, values, mask: None
    if not isinstance(operand, Register):
        raise UnknownInstruction(f"result {operand}")
    number = operand.number
    size = 1 if operand.kind == "pred" else size_of(operand.kind)
    kept = np.dtype(bool) if operand.kind == "pred" else np.dtype(f"u{size}")
    poison = (
        np.zeros(1, kept) if operand.kind == "pred" else np.full(1, 0xCB, np.uint8).astype(kept)
    )

    def write(warp: "Warp", values: np.ndarray, mask: np.ndarray | None) -> None:
        if number in warp.in_flight:
            raise Fault(f"register {operand.name} is written while a product uses it")
        if values.dtype.itemsize != size:
            signed = values.dtype.kind == "i"  # narrower numbers keep their sign
            values = values.astype(f"{'i' if signed else 'u'}{size}")
        values = values.view(kept)
        if values.size == 1:
            values = np.repeat(values, warp.n_lanes)
        if mask is not None:
            before = warp.registers[number]
            values = np.where(mask, values, poison if before is None else before)
        warp.registers[number] = values

    return write
