"""The slow reader of frames and files, written from docs/format.md alone and in its order.

The fast paths are tested against it, so it shares no code with them. It uses plain integers and
bytes, the constants of `layout.py`, and xxhash and zstandard for the parts that other standards
define. It is clear and not fast: expect one or two MB/s.

Every rule is checked where the page states it: the whole header before any chunk is read, a chunk's
CRC before its streams. `words` is section 1 of the page, `header` 2 and 3, `frame` 4, 5 and 7,
`streams`, `rans` and `delta` 6, `file` and `folder` 8, `weights` 12 and `bounded` and `coded` 13
(with NumPy). Offsets in messages count from the start of the frame; `decode_file` adds the tensor's
name and the frame's offset.
"""

from packhorse.reference.file import decode_file
from packhorse.reference.folder import decode_index
from packhorse.reference.frame import DecodedTensor, content_hash, content_sum, decode_frame

__all__ = [
    "DecodedTensor",
    "content_hash",
    "content_sum",
    "decode_file",
    "decode_frame",
    "decode_index",
]
