"""CPU codecs over the C++ core: buffers in, buffers out, no files and no frameworks.

The core codes each chunk of a frame in one pass over it. `zstd` codes whole chunks with the
zstandard package, `weights` packs weights for memory, and `plan` chooses how a tensor is packed.
"""

__all__: list[str] = []
