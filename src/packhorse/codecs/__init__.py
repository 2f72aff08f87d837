"""CPU codecs over the C++ core: buffers in, buffers out, no files and no frameworks.

`planes`, `palette` and `rans` are the single steps, for tests and for those who embed them; a frame
is coded by the core in one pass over each chunk. `zstd` codes whole chunks with the zstandard
package; `plan` chooses for a tensor.
"""

__all__: list[str] = []
