"""Fuzz `Frame`: any header and payload must give a tensor or a documented error.

The result must be the same on every code path, for the whole tensor and for its parts.

An input is a control byte (see `main`) and a frame.
"""

import harness
import numpy as np
from harness import MAX_NBYTES, Frame, PackhorseError


def main(data: bytes) -> None:
    """Run one input."""
    control, frame = data[0] if data else 0, data[1:]
    if harness.is_fixed(control):
        frame = harness.seal(harness.repair(frame) if control & 4 else frame)
    harness.choose_isa(control >> 3 & 3)
    try:
        read = Frame.from_buffer(frame, name="t", max_nbytes=MAX_NBYTES)
    except PackhorseError:
        return
    describe(read, frame)
    base = harness.base_of(frame)
    whole = decode(read, base, check=True, threads=1 + (control >> 5 & 3))
    harness.choose_isa(0)
    assert whole == decode(read, base, check=True, threads=1), "the code paths differ"
    careless = decode(read, base, check=False, threads=1)
    if whole is None:
        assert fails(lambda: read.verify(base=base)), "a frame that does not decode was verified"
        check_refused_patch(read, base)
        return
    assert read.base_hash is None or decode(read, None, check=True, threads=1) is None
    assert careless == whole, "without its checksums a good frame decodes to other bytes"
    check_patch(read, base, whole)
    compare_part(read, base, whole, control)
    fails(lambda: read.verify(base=base))


def describe(read: Frame, frame: bytes) -> None:
    """Read everything that a frame says without being decoded."""
    assert read.nbytes == len(frame) == len(read.to_bytes())
    assert read.logical_nbytes <= MAX_NBYTES
    assert sum(plane.logical_nbytes for plane in read.planes()) == read.logical_nbytes
    assert repr(read), "a frame has a description"
    assert read.n_chunks * read.chunk_nbytes >= read.logical_nbytes


def decode(read: Frame, base: bytes | None, *, check: bool, threads: int) -> bytes | None:
    """The tensor's bytes, or None for a documented error."""
    decoded = np.full(read.logical_nbytes, 0xA5 if check else 0x5A, np.uint8)
    try:
        read.decompress_into(decoded, threads=threads, check=check, base=base)
    except PackhorseError:
        return None
    return decoded.tobytes()


def compare_part(read: Frame, base: bytes | None, whole: bytes, control: int) -> None:
    """Decode a range somewhere in the middle."""
    start, stop = len(whole) * (control & 7) // 24, len(whole) - len(whole) * (control >> 5) // 24
    part = bytearray(stop - start)
    read.decompress_into(part, start=start, stop=stop, threads=1, base=base)
    assert part == whole[start:stop], "a range differs from the whole"


def can_patch(read: Frame, base: bytes | None) -> bool:
    """Whether the memory of the base may become the tensor."""
    return read.base_dtype == read.dtype and base is not None


def check_patch(read: Frame, base: bytes | None, whole: bytes) -> None:
    """Patch the base in place, and put the list of changes into it."""
    if not can_patch(read, base):
        return
    target = bytearray(base)
    read.patch_into(target, threads=2)
    assert target == whole, "a patched base differs from the tensor"
    indices, values = read.changes(base, threads=2)
    units = np.frombuffer(bytearray(base), values.dtype)
    assert (units[indices] != values).all(), "an unchanged unit is listed"
    assert (np.diff(indices.astype(np.int64)) > 0).all(), "changes do not ascend"
    units[indices] = values
    assert units.tobytes() == whole, "the changes do not make the tensor"


def check_refused_patch(read: Frame, base: bytes | None) -> None:
    """A frame that does not decode must leave its target as it was."""
    if not can_patch(read, base):
        return
    target = bytearray(base)
    assert fails(lambda: read.patch_into(target)), "a bad frame was used as a patch"
    assert target == base, "a bad frame changed its target"
    assert fails(lambda: read.changes(base)), "a bad frame has changes"


def fails(work: object) -> bool:
    """Whether a call ends in a documented error."""
    assert callable(work)
    try:
        work()
    except PackhorseError:
        return True
    return False


if __name__ == "__main__":
    harness.fuzz(main)
