"""Instructions that compute in registers."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from tests.ptx.faults import UnknownInstruction
from tests.ptx.program import Group, Instruction
from tests.ptx.values import TYPES, from_bf16, reader, size_of, to_bf16, writer

if TYPE_CHECKING:
    from tests.ptx.machine import Warp

    Run = Callable[[Warp, "np.ndarray | None"], None]

_COMPARE = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq,
    "ne": operator.ne, "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip
_LOGIC = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def compile_arithmetic(x: Instruction) -> "Run | None":
    """A function that does an instruction; None if the instruction is not one of these."""
    op, type_name = x.opcode[0], x.opcode[-1]
    make = _MAKERS.get(op)
    return None if make is None else make(x, op, type_name)


def _simple(x: Instruction, types: list[str], compute: Callable) -> "Run":
    """An instruction with one result, from operands of given types."""
    write = writer(x.operands[0])
    reads = [reader(part, t) for part, t in zip(x.operands[1:], types, strict=False)]

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        write(warp, compute(*(read(warp) for read in reads)), mask)

    return run


def _two(x: Instruction, op: str, t: str) -> "Run":
    n = len(x.operands) - 1
    if t in ("bf16", "bf16x2"):
        steps = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
        steps |= {"min": np.fmin, "max": np.fmax}
        return _simple(x, [t] * n, _on_bf16(steps[op], t))
    steps = {"add": operator.add, "sub": operator.sub, **_LOGIC}
    if t == "f32":
        steps |= {"mul": operator.mul, "min": np.fmin, "max": np.fmax, "div": operator.truediv}
    else:
        steps |= {"min": np.minimum, "max": np.maximum, "div": _divide, "rem": _remainder}
        if op == "mul":
            return _integer_mul(x, t)
    return _simple(x, [t] * n, steps[op])


def _on_bf16(compute: Callable, t: str) -> Callable:
    def one(*parts: np.ndarray) -> np.ndarray:
        return to_bf16(compute(*(from_bf16(part) for part in parts)).astype(np.float32))

    def both(*parts: np.ndarray) -> np.ndarray:
        low = one(*((part & np.uint32(0xFFFF)) for part in parts)).astype(np.uint32)
        high = one(*((part >> np.uint32(16)) for part in parts)).astype(np.uint32)
        return low | high << np.uint32(16)

    return both if t == "bf16x2" else one


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "u":
        return a // np.maximum(b, 1)
    wide_a, wide_b = a.astype(np.int64), b.astype(np.int64)
    sizes = np.abs(wide_a) // np.maximum(np.abs(wide_b), 1)
    return (np.sign(wide_a) * np.sign(wide_b) * sizes).astype(a.dtype)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a - _divide(a, b) * b).astype(a.dtype)


def _wide(t: str) -> str:
    return f"{t[0]}{2 * int(t[1:])}"


def _integer_mul(x: Instruction, t: str) -> "Run":
    if x.opcode[1] == "wide":
        wide = TYPES[_wide(t)]
        return _simple(x, [t, t], lambda a, b: a.astype(wide) * b.astype(wide))
    if x.opcode[1] == "hi":
        wide, bits = TYPES[_wide(t)], 8 * size_of(t)
        return _simple(
            x,
            [t, t],
            lambda a, b: (a.astype(wide) * b.astype(wide) >> wide.type(bits)).astype(a.dtype),
        )
    return _simple(x, [t, t], operator.mul)


def _mad(x: Instruction, op: str, t: str) -> "Run":
    if op == "fma" or t == "f32":
        if t == "f32":
            return _simple(x, [t] * 3, _fma)
        return _simple(x, [t] * 3, _on_bf16(_fma, t))
    if x.opcode[1] == "wide":
        wide = TYPES[_wide(t)]
        return _simple(x, [t, t, _wide(t)], lambda a, b, c: a.astype(wide) * b.astype(wide) + c)
    return _simple(x, [t] * 3, lambda a, b, c: a * b + c)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _one(x: Instruction, op: str, t: str) -> "Run":
    steps: dict[str, Callable] = {"neg": operator.neg, "not": operator.invert, "abs": np.abs}
    if op == "neg" and t in ("bf16", "bf16x2"):
        flip = TYPES[t].type(0x8000 if t == "bf16" else 0x80008000)
        return _simple(x, [t], lambda a: a ^ flip)
    if op == "popc":
        return _simple(x, [t], lambda a: np.bitwise_count(a).astype(np.uint32))
    if op == "clz":
        bits = 8 * size_of(t)
        return _simple(
            x, [t], lambda a: np.array([bits - int(v).bit_length() for v in a], np.uint32)
        )
    return _simple(x, [t], steps[op])


def _shift(x: Instruction, op: str, t: str) -> "Run":
    bits = 8 * size_of(t)

    def left(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        unsigned = a.view(f"u{a.itemsize}")
        shifted = unsigned << np.minimum(n, bits - 1).astype(unsigned.dtype)
        return np.where(n >= bits, unsigned.dtype.type(0), shifted).view(a.dtype)

    def right(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        shifted = a >> np.minimum(n, bits - 1).astype(a.dtype)
        return shifted if a.dtype.kind == "i" else np.where(n >= bits, a.dtype.type(0), shifted)

    return _simple(x, [t, "u32"], left if op == "shl" else right)


def _funnel(x: Instruction, op: str, t: str) -> "Run":
    to_left, wraps = x.opcode[1] == "l", x.opcode[2] == "wrap"

    def compute(low: np.ndarray, high: np.ndarray, n: np.ndarray) -> np.ndarray:
        n = (n & 31 if wraps else np.minimum(n, 32)).astype(np.uint64)
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        moved = (both << n) >> np.uint64(32) if to_left else both >> n
        return moved.astype(np.uint32)

    return _simple(x, ["b32", "b32", "u32"], compute)


def _setp(x: Instruction, op: str, t: str) -> "Run":
    compare = _COMPARE[x.opcode[1]]
    a, b = reader(x.operands[1], t), reader(x.operands[2], t)
    results = x.operands[0].parts if isinstance(x.operands[0], Group) else (x.operands[0],)
    writes = [writer(part) for part in results]
    join = _LOGIC.get(x.opcode[2])
    more = reader(x.operands[3], "pred") if join is not None else None

    def run(warp: "Warp", mask: np.ndarray | None) -> None:
        truth = compare(a(warp), b(warp))
        for write, value in zip(writes, (truth, ~truth), strict=False):
            write(warp, value if more is None else join(value, more(warp)), mask)

    return run


def _selp(x: Instruction, op: str, t: str) -> "Run":
    return _simple(x, [t, t, "pred"], lambda a, b, p: np.where(p, a, b))


def _bfe(x: Instruction, op: str, t: str) -> "Run":
    def compute(a: np.ndarray, place: np.ndarray, n: np.ndarray) -> np.ndarray:
        place, n = place & 0xFF, np.minimum(n & 0xFF, 32)
        wide = a.astype(np.int64) >> np.minimum(place, 63).astype(np.int64)
        field = wide & ((np.int64(1) << n.astype(np.int64)) - 1)
        if a.dtype.kind == "i":
            sign = np.int64(1) << np.maximum(n.astype(np.int64) - 1, 0)
            field = np.where(n > 0, (field ^ sign) - sign, 0)
        return field.astype(np.int64).astype(a.dtype)

    return _simple(x, [t, "u32", "u32"], compute)


def _bfi(x: Instruction, op: str, t: str) -> "Run":
    def compute(a: np.ndarray, b: np.ndarray, place: np.ndarray, n: np.ndarray) -> np.ndarray:
        wide = ((np.uint64(1) << (n & 0xFF).astype(np.uint64)) - np.uint64(1)) << place.astype(
            np.uint64
        )
        moved = a.astype(np.uint64) << place.astype(np.uint64)
        return ((b.astype(np.uint64) & ~wide) | (moved & wide)).astype(b.dtype)

    return _simple(x, [t, t, "u32", "u32"], compute)


def _lop3(x: Instruction, op: str, t: str) -> "Run":
    table = x.operands[4].bits

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        result = np.zeros(1, np.uint32)
        for i in range(8):
            if table >> i & 1:
                result = result | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return result

    return _simple(x, ["b32"] * 3, compute)


def _prmt(x: Instruction, op: str, t: str) -> "Run":
    if len(x.opcode) > 2:
        raise UnknownInstruction(x.text)

    shifts = np.arange(0, 16, 4, dtype=np.uint32)

    def compute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        both = np.empty((max(a.size, b.size, selector.size), 2), np.uint32)
        both[:, 0], both[:, 1] = a, b
        which = np.broadcast_to(selector[:, None] >> shifts, (len(both), 4))
        result = np.take_along_axis(both.view(np.uint8), which & np.uint32(7), axis=1)
        signs = which & np.uint32(8)
        if signs.any():
            result = np.where(signs, (result >> 7) * np.uint8(255), result)
        return np.ascontiguousarray(result).view(np.uint32)[:, 0]

    return _simple(x, ["b32"] * 3, compute)


def _cvt(x: Instruction, op: str, t: str) -> "Run":
    names = [part for part in x.opcode[1:] if part in TYPES]
    to, source = names[0], names[-1]
    if to == "bf16x2":
        return _simple(
            x,
            ["f32", "f32"],
            lambda a, b: (
                to_bf16(b).astype(np.uint32) | to_bf16(a).astype(np.uint32) << np.uint32(16)
            ),
        )
    if to == "bf16" and source == "f32":
        return _simple(x, ["f32"], to_bf16)
    if source == "bf16":
        return _simple(x, ["bf16"], from_bf16)
    if "f16" in (to, source):
        raise UnknownInstruction(x.text)
    if source == "f32" and to[0] in "us":
        step = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[x.opcode[1]]
        return _simple(x, [source], lambda a: step(a).astype(TYPES[to]))
    return _simple(x, [source], lambda a: a.astype(TYPES[to]))


def _mov(x: Instruction, op: str, t: str) -> "Run":
    to, source = x.operands
    if isinstance(to, Group):
        writes = [writer(part) for part in to.parts]
        read, bits = reader(source, t), 8 * size_of(t) // len(to.parts)

        def split(warp: "Warp", mask: np.ndarray | None) -> None:
            values = read(warp)
            for i, write in enumerate(writes):
                part = (values >> values.dtype.type(bits * i)).astype(f"u{bits // 8}")
                write(warp, part, mask)

        return split
    if isinstance(source, Group):
        write, n = writer(to), len(source.parts)
        bits = 8 * size_of(t) // n
        reads = [reader(part, f"b{bits}") for part in source.parts]

        def join(warp: "Warp", mask: np.ndarray | None) -> None:
            values = np.zeros(1, TYPES[t])
            for i, one in enumerate(reads):
                values = values | one(warp).astype(TYPES[t]) << TYPES[t].type(bits * i)
            write(warp, values, mask)

        return join
    return _simple(x, [t], lambda a: a)


_MAKERS: dict[str, Callable] = {
    **dict.fromkeys(("add", "sub", "mul", "min", "max", "and", "or", "xor", "div", "rem"), _two),
    **dict.fromkeys(("mad", "fma"), _mad),
    **dict.fromkeys(("neg", "not", "abs", "popc", "clz"), _one),
    **dict.fromkeys(("shl", "shr"), _shift),
    "shf": _funnel,
    "setp": _setp,
    "selp": _selp,
    "bfe": _bfe,
    "bfi": _bfi,
    "lop3": _lop3,
    "prmt": _prmt,
    "cvt": _cvt,
    "mov": _mov,
}
