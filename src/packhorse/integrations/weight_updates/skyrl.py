"""SkyRL's two functions for bytes of deltas, with our codec in the place of Zstandard.

SkyRL takes the exclusive or of old and new bytes itself, and passes the bytes of each tensor to
`compress_bytes`. `install` puts these functions into its module. SkyRL's manifests name no codec,
so install them in the trainer and in all workers, or in none. `DeltaSender` sends fewer bytes,
because it sees which way a number moves.
"""

from __future__ import annotations

from packhorse.errors import CorruptionError
from packhorse.frame import Frame, compress_buffer
from packhorse.late_import import import_late
from packhorse.layout import Level

__all__ = ["compress_bytes", "decompress_bytes", "install"]

_MODULES = (
    "skyrl.backends.skyrl_train.weight_sync.delta_payload",
    "skyrl.backends.skyrl_train.weight_sync.delta_checkpoint",
)
_FAST_LEVEL, _MAX_LEVEL = 1, 10  # of Zstandard, which SkyRL means
_UNIT_NBYTES = 2  # of BF16


def compress_bytes(data: bytes, level: int = 3) -> bytes:
    """Packs bytes.

    Args:
        data: the exclusive or of a tensor's old and new bytes.
        level: SkyRL's level: 1 is fast, 10 and above try hardest.

    Returns:
        A frame. Bytes of an even number are taken for numbers of 16 bits.
    """
    effort = Level.DEFAULT
    if level <= _FAST_LEVEL or level >= _MAX_LEVEL:
        effort = Level.FAST if level <= _FAST_LEVEL else Level.MAX
    n, rest = divmod(len(data), _UNIT_NBYTES)
    dtype, shape = ("U8", (len(data),)) if rest else ("U16", (n,))
    return compress_buffer(data, dtype, shape, level=effort).to_bytes()


def decompress_bytes(data: bytes, expected_size: int | None = None) -> bytes:
    """Unpacks what `compress_bytes` made.

    Args:
        data: the frame.
        expected_size: how many bytes there must be; None for any number.

    Raises:
        CorruptionError: the frame is damaged.
        ValueError: there is another number of bytes.
    """
    frame = Frame.from_buffer(data)
    if expected_size is not None and frame.logical_nbytes != expected_size:
        raise ValueError(
            f"{expected_size} bytes are expected, the frame has {frame.logical_nbytes}"
        )
    if frame.base_hash is not None:
        raise CorruptionError("the frame has a base, so it is none of compress_bytes")
    decoded = bytearray(frame.logical_nbytes)
    frame.decompress_into(decoded)
    return bytes(decoded)


def install() -> None:
    """Puts both functions into SkyRL's modules.

    Raises:
        ImportError: SkyRL is not installed, or has no deltas.
    """
    for name in _MODULES:
        module = import_late(name)
        module.compress_bytes = compress_bytes  # type: ignore[attr-defined]
        module.decompress_bytes = decompress_bytes  # type: ignore[attr-defined]
