"""What every rank tells every other one before the pieces of an operation travel.

A statement says which operation a rank is in, with which dtype and sizes, and how long earlier
calls took it (selector.py). It travels alone, or before the first piece. Every rank reads those of
all others before it uses any payload, and refuses those that do not fit its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from packhorse import _core
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.torch_dtypes import short_name
from packhorse.wire import torch_ways
from packhorse.wire.backend import torch
from packhorse.wire.handshake import agree_or_raise
from packhorse.wire.peers import Peers

__all__ = [
    "NBYTES",
    "ROOT_WORDS",
    "Statement",
    "check_sizes",
    "described",
    "exchange_statements",
    "read_statements",
]

ROOT_WORDS = ("the root",)  # what the argument of a broadcast means

NBYTES = 128
_MAGIC = b"PHWS"
# magic, number of the operation, what it is, argument, arm, bytes to the receiver, bytes that all
# ranks must state alike, escapes, seconds of the last call, bytes of this call, its label
_FIELDS = struct.Struct("<4sI40sHHQQIfQ40s")
_CRC = struct.Struct("<I")


class Statement(NamedTuple):
    """What one rank states to another one.

    Attributes:
        number: how many operations the rank has begun.
        what: the operation and the dtype, such as "a2a bfloat16".
        argument: the root of a broadcast, or the kind of a reduction.
        arm: how the operation runs (`selector.Arm`).
        nbytes: bytes that go to the receiver, before packing.
        common: a size that must be the same on all ranks; 0 if there is none.
        escapes: says how long the message is that goes to the receiver's device (device_ways.py).
        seconds: how long the last measured call took.
        total: bytes that the rank holds in this call, if it asks.
        label: what the caller calls it, if the rank asks.
    """

    number: int
    what: str
    argument: int
    arm: int
    nbytes: int
    common: int
    escapes: int = 0
    seconds: float = 0.0
    total: int = 0
    label: str = ""

    def to_bytes(self) -> bytes:
        """The bytes of the statement."""
        words = {"what": self.what.encode()[:40], "label": self.label.encode()[:40]}
        fields = self._replace(**words)  # type: ignore[arg-type]
        text = _FIELDS.pack(_MAGIC, *fields)
        return (text + _CRC.pack(_core.crc32c(text))).ljust(NBYTES, b"\0")

    @classmethod
    def from_bytes(cls, text: bytes) -> Statement:
        """The statement that `to_bytes` gave; nothing is checked."""
        _, number, what, *rest, label = _FIELDS.unpack_from(text)
        words = [field.rstrip(b"\0").decode(errors="replace") for field in (what, label)]
        return cls._make([number, words[0], *rest, words[1]])


def described(operation: str, dtype: torch.dtype) -> str:
    """What a statement says of an operation: its short name and the dtype."""
    return f"{operation} {short_name(dtype)}"


def exchange_statements(
    peers: Peers,
    mine: Sequence[Statement],
    words: Sequence[str],
    *,
    device: torch.device | None = None,
) -> list[Statement]:
    """States something to each rank, and reads what each states to this one.

    Args:
        peers: the other ranks.
        mine: the statement for each rank.
        words: what `argument` means, for messages: its name, and the name of each value if it is
            an index.
        device: whose memory the statements travel through, where the group's backend needs that.

    Returns:
        The statement of each rank.

    Raises:
        CorruptionError: bytes were damaged on their way.
        CompatibilityError: ranks are in different operations, or state different dtypes or sizes.
    """
    text = bytearray().join([statement.to_bytes() for statement in mine])
    lengths = [NBYTES] * peers.size
    sent = torch.frombuffer(text, dtype=torch.uint8)
    output = torch.empty(len(text), dtype=torch.uint8, device=device)
    if device is None:
        peers.wait(peers.all_to_all(output, sent, lengths, lengths))
    else:
        sent = sent.to(device)
        work = peers.begin(torch_ways.all_to_all, output, sent, lengths, lengths)
        peers.wait_on_device(work)
    found = output.cpu().numpy().tobytes()
    ends = range(NBYTES, len(found) + 1, NBYTES)
    return read_statements(peers, [found[end - NBYTES : end] for end in ends], words)


def read_statements(peers: Peers, texts: Sequence[bytes], words: Sequence[str]) -> list[Statement]:
    """Reads and compares the statements of all ranks.

    Args:
        peers: the other ranks.
        texts: the bytes of each rank's statement, this rank's own included.
        words: as for `exchange_statements`.

    Raises:
        CorruptionError, CompatibilityError: as `exchange_statements`.
    """
    stated = [_read(peers, rank, text) for rank, text in enumerate(texts)]
    if len({_common_of(one) for one in stated}) > 1:
        agree_or_raise([_by_name(one, words) for one in stated])
    return stated


def check_sizes(peers: Peers, stated: Sequence[Statement], expected: Sequence[int]) -> None:
    """Checks that each rank sends as many bytes as this one expects.

    Raises:
        CompatibilityError: one does not.
    """
    for rank, (statement, nbytes) in enumerate(zip(stated, expected, strict=True)):
        if statement.nbytes != nbytes and rank != peers.rank:
            raise CompatibilityError(
                f"rank {rank} sends {statement.nbytes} bytes to rank {peers.rank}, which expects "
                f"{nbytes}; make sizes and splits fit on all ranks"
            )


def _read(peers: Peers, rank: int, text: bytes) -> Statement:
    (crc,) = _CRC.unpack_from(text, _FIELDS.size)
    if not text.startswith(_MAGIC) or _core.crc32c(text[: _FIELDS.size]) != crc:
        raise CorruptionError(
            f"what rank {rank} stated to rank {peers.rank} is damaged, or is no statement; call "
            "the same operations on all ranks"
        )
    return Statement.from_bytes(text)


def _common_of(statement: Statement) -> tuple[object, ...]:
    """What must be equal in the statements of all ranks."""
    one = statement
    return one.number, one.what, one.argument, one.arm, one.common, one.label


def _by_name(statement: Statement, words: Sequence[str]) -> dict[str, str]:
    """What ranks must agree on, by name."""
    name, *values = words or ["argument"]
    argument = statement.argument
    operation, _, dtype = statement.what.partition(" ")
    return {
        "the number of the operation": str(statement.number),
        "the operation": operation,
        "dtype": dtype,
        "label": statement.label or "none",
        name: values[argument] if argument < len(values) else str(argument),
        "the size in bytes": str(statement.common),
        "the way of the transfer": str(statement.arm),
    }
