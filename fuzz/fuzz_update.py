"""Fuzz `DeltaReceiver`: any update must be applied whole, or refused with nothing changed.

An input is a control byte and the bytes of an update. Unless its two low bits are zero, the update
gets the length, the hashes and the checksum that fit it before it is read. Bit 2 lets the receiver
decode in place. Bit 3 gives it a state of its own, which takes anchors of any tensors; otherwise it
has the tensors of `weights`, at the version that `make_corpus.py` starts its deltas from.

A receiver that accepts an update must have the state that the update names, and must refuse the
same update at once.
"""

import struct
from typing import Any

import harness
import numpy as np
import zstandard
from harness import MAX_NBYTES, PackhorseError

with harness.instrumented():
    from packhorse.codecs.content import content_sum, crc32c
    from packhorse.frame import Frame
    from packhorse.wire.updates import DeltaReceiver, DeltaSender, Update
    from packhorse.wire.updates.contents import parse_contents, state_hash
    from packhorse.wire.updates.message import HEADER_NBYTES

__all__ = ["sealed", "weights"]

_MAX_FRAMES = 64
_MAX_TEXT_NBYTES = 1 << 16


def weights() -> dict[str, Any]:
    """The tensors of the receiver: two that share a frame, one tied, a longer one, and a scalar.
    The bytes of each frame's tensors are those that `harness.seal` takes for its base."""
    numbers = harness.count_bytes(4096)
    state = {
        "a": np.frombuffer(numbers[:80], np.float16).copy(),
        "b": np.frombuffer(numbers[80:120], np.float16).reshape(4, 5).copy(),
        "long": np.frombuffer(numbers, np.int16).copy(),
        "n": np.frombuffer(numbers[:8], np.int64).reshape(()).copy(),
    }
    return state | {"tied": state["a"]}


_FIRST = DeltaSender(weights(), threads=1).pack()


def main(data: bytes) -> None:
    """Run one input."""
    control, update = data[0] if data else 0, data[1:]
    if harness.is_fixed(control):
        update = sealed(update)
    state = None if control & 8 else weights()
    receiver = DeltaReceiver(
        into=state, threads=1, in_place=bool(control & 4), max_nbytes=MAX_NBYTES
    )
    before = held(receiver)
    try:
        read = Update(update)
        assert bytes(read) == update
        assert len(read.report) >= 1
        staged = receiver.stage(update)
    except (PackhorseError, ValueError) as error:
        check_refused(error, is_own=bool(control & 8))
        assert held(receiver) == before, "an update that was refused has changed something"
        return
    assert held(receiver) == before, "staging has changed something"
    try:
        receiver.commit(staged)
    except PackhorseError:
        assert control & 4, "a commit failed"
        return
    check_applied(receiver, read, update)


def check_refused(error: Exception, *, is_own: bool) -> None:
    """Only tensors other than the receiver's are a mistake of a caller."""
    assert isinstance(error, PackhorseError) or not is_own, repr(error)


def check_applied(receiver: DeltaReceiver, read: Update, update: bytes) -> None:
    """Compare the state with what the update says of it."""
    assert receiver.state_hash == read.state_hash
    assert sorted(receiver.state) == read.names
    receiver.forget()
    try:
        receiver.stage(update)
    except PackhorseError:
        assert not read.is_anchor, "an anchor does not follow its own state"
    else:
        assert read.is_anchor or read.base_hash == read.state_hash, "an update applies twice"


def held(receiver: DeltaReceiver) -> tuple[Any, ...]:
    """All bytes of the receiver, and what it says of them."""
    state = {name: tensor.tobytes() for name, tensor in receiver.state.items()}
    return state, receiver.version, receiver.state_hash, receiver.is_torn


def sealed(update: bytes) -> bytes:
    """The update with frames, hashes and a checksum that fit. It is returned unchanged if that
    makes no sense."""
    if len(update) < HEADER_NBYTES:
        return update
    n_frames, n_packed = (struct.unpack_from("<I", update, at)[0] for at in (12, 104))
    table = HEADER_NBYTES + 8 * n_frames
    if n_frames > _MAX_FRAMES or table + n_packed > len(update):
        return update
    frames_at = -(-(table + n_packed) // 64) * 64
    head = bytearray(update[: table + n_packed].ljust(frames_at, b"\0"))
    frames, at = b"", frames_at
    for i in range(n_frames):
        n_lines = struct.unpack_from("<I", head, HEADER_NBYTES + 8 * i + 4)[0]
        frames += harness.seal(update[at : at + 64 * n_lines].ljust(64 * min(n_lines, 1 << 12)))
        at += 64 * n_lines
    struct.pack_into("<Q", head, 16, frames_at + len(frames))
    _seal_hashes(head, head[table : table + n_packed], frames)
    head[112:116] = bytes(4)
    head[112:116] = struct.pack("<I", crc32c(head))
    return bytes(head) + frames


def _seal_hashes(head: bytearray, packed: bytearray, frames: bytes) -> None:
    """Writes the hash of the contents, and of the states before and after, if they can be read."""
    try:
        if zstandard.get_frame_parameters(packed).content_size > _MAX_TEXT_NBYTES:
            return
        text = zstandard.ZstdDecompressor().decompress(packed, max_output_size=_MAX_TEXT_NBYTES)
        contents = parse_contents(text)
    except (zstandard.ZstdError, PackhorseError):
        return
    head[88:104] = contents.digest
    struct.pack_into("<I", head, 108, len(text))
    same = contents.digest == _FIRST.message.contents.digest
    hashes = [content_sum(b"")] * len(contents.units)
    if same and not head[5] & 1:
        hashes = [
            _FIRST.message.frames[i].content_hash if i in _FIRST.message.frames else digest
            for i, digest in enumerate(hashes)
        ]
        head[56:72] = state_hash(contents, hashes)
    at = 0
    for i in range(struct.unpack_from("<I", head, 12)[0]):
        unit, n_lines = struct.unpack_from("<II", head, HEADER_NBYTES + 8 * i)
        try:
            frame = Frame.from_buffer(frames[at : at + 64 * n_lines], max_nbytes=MAX_NBYTES)
        except PackhorseError:
            return
        if unit >= len(hashes):
            return
        hashes[unit] = frame.content_hash
        at += 64 * n_lines
    head[72:88] = state_hash(contents, hashes)


if __name__ == "__main__":
    harness.fuzz(main)
