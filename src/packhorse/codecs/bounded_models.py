"""Codes the codes of bounded messages once more, with rANS, for slow links (docs/format.md, section
13.2).

Values of embeddings and gradients have heavy tails: most codes are near the middle, and take fewer
bits than the rest. Which codes are frequent changes slowly, so a model of it serves many messages:
it is sent once, and every message names the models that it needs. The models of a message are
chosen from its own codes, one for each segment; they are chosen again every `refresh` messages, or
when a message becomes longer than the models promised.

A `CodeModel` is one end of a link in one direction, with segments of the same kind in every
message.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from packhorse import _core
from packhorse.codecs.base import ByteArray, as_bytes
from packhorse.codecs.bounded import raise_message_fault
from packhorse.errors import BaseMismatchError, CorruptionError
from packhorse.layout import CODED_HEADER, BoundedFault

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["CodeModel"]

# A message may be this much longer, for its elements, than the first one with the same models.
_MAX_DRIFT = 1.05
_NO_MODELS = np.empty(0, np.uint8)


class CodeModel:
    """Encodes messages of one sender for one receiver, or decodes them there.

    Args:
        refresh: after how many messages the sender chooses models anew.

    Raises:
        ValueError: `refresh` is not positive.

    Example:
        >>> import numpy as np
        >>> from packhorse.codecs.bounded import Segment, encode_bounded
        >>> from packhorse.codecs.bounded_models import CodeModel
        >>> rows = np.random.default_rng(0).normal(0, 0.01, 50_000).astype(np.float32)
        >>> message = encode_bounded(rows, "F32", [Segment(rows.size, bound=0.001, bits=6)])
        >>> sender, receiver = CodeModel(), CodeModel()
        >>> coded = sender.encode(message)
        >>> len(coded) < 0.85 * message.nbytes
        True
        >>> receiver.decode(coded, max_nbytes=message.nbytes).tobytes() == message.tobytes()
        True
    """

    def __init__(self, *, refresh: int = 100) -> None:
        if refresh < 1:
            raise ValueError(f"refresh is {refresh}; it must be positive")
        self._refresh = refresh
        self._tables = _core.CodeTables(_NO_MODELS)
        self._n_since = refresh  # messages since models were chosen
        self._first_share = 0.0  # coded bytes for each byte, of the first message with the models

    def encode(self, message: "Buffer | Any", *, threads: int = 1) -> bytes:
        """Encodes a message of `encode_bounded` or `encode_fixed`.

        Args:
            message: exactly the bytes of a message.
            threads: how many threads of the core work on it.

        Returns:
            The coded message. It has models in it if they are new.

        Raises:
            CorruptionError: `message` breaks a rule of docs/format.md, section 13.
            TypeError: it is not a C-contiguous buffer.
        """
        src = as_bytes(message, "message")
        if self._n_since < self._refresh:
            coded = self._encode(src, False, threads)
            if len(coded) <= self._first_share * _MAX_DRIFT * max(src.size, 1):
                self._n_since += 1
                return coded
        return self._encode_with_new_models(src, threads)

    def _encode_with_new_models(self, src: ByteArray, threads: int) -> bytes:
        try:
            models = _core.choose_code_models(src)
        except ValueError as error:
            raise CorruptionError(f"bounded message: {error}") from None
        self._tables = _core.CodeTables(np.frombuffer(models, np.uint8))
        coded = self._encode(src, True, threads)
        self._n_since = 1
        self._first_share = (len(coded) - len(models)) / max(src.size, 1)
        return coded

    def _encode(self, src: ByteArray, with_models: bool, threads: int) -> bytes:
        dst = np.empty(_core.max_coded_nbytes(src.size, self._tables), np.uint8)
        nbytes = _core.encode_coded(src, self._tables, with_models, dst, threads)
        if nbytes == 0:
            raise CorruptionError("bounded message: it breaks a rule; decode it to see which")
        return dst[:nbytes].tobytes()

    def decode(self, coded: "Buffer | Any", *, max_nbytes: int, threads: int = 1) -> ByteArray:
        """Decodes to the bytes of the message, for `decode_bounded`.

        Args:
            coded: exactly the bytes of a coded message. All messages of the sender must be decoded
                by the same `CodeModel`, or at least those with models and those between.
            max_nbytes: the most bytes that the message may have, such as `max_encoded_nbytes` of
                its segments. Nothing longer is allocated.
            threads: how many threads of the core work on it.

        Raises:
            BaseMismatchError: the message needs models that were not received.
            TruncationError: bytes are missing at the end.
            CorruptionError: the message breaks a rule of docs/format.md, section 13.2, or would
                have more than `max_nbytes` bytes.
            CompatibilityError: the message is of a later version.
            TypeError: `coded` is not a C-contiguous buffer.
        """
        src = as_bytes(coded, "coded")
        fault, has_models, models_nbytes, crc, nbytes = _core.read_coded(src, max_nbytes)
        if fault:
            raise_message_fault(BoundedFault(fault), 0, src)
        tables = self._tables
        if has_models:
            tables = _core.CodeTables(src[CODED_HEADER.size : CODED_HEADER.size + models_nbytes])
            if not tables.is_valid or tables.crc != crc:
                raise CorruptionError("coded message: its models break a rule")
        if (tables.models_nbytes, tables.crc) != (models_nbytes, crc):
            raise BaseMismatchError(
                f"coded message: it needs models with the checksum {crc:#010x}, and the last ones"
                f" that were received have {tables.crc:#010x}; decode all messages of the sender,"
                " in order"
            )
        dst = np.empty(nbytes, np.uint8)
        fault = _core.decode_coded(src, tables, dst, threads)
        if fault:
            raise_message_fault(BoundedFault(fault), 0, src)
        self._tables = tables
        return dst
