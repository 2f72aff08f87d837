"""`decode_frame` under the name that it has had from the start; its home is
`packhorse.gpu.frames`."""

from packhorse.gpu.frames import decode_frame

__all__ = ["decode_frame"]
