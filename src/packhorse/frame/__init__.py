"""Frames, each of one packed tensor: making, reading and decoding them (docs/format.md, sections
2 to 7)."""

from packhorse.codecs.content import content_hash
from packhorse.codecs.plan import Plan
from packhorse.frame.compress import compress_buffer
from packhorse.frame.frame import Frame
from packhorse.frame.header import PlaneSummary
from packhorse.frame.plan import max_frame_nbytes, plan_buffer, planned_frame_nbytes

__all__ = [
    "Frame",
    "Plan",
    "PlaneSummary",
    "compress_buffer",
    "content_hash",
    "max_frame_nbytes",
    "plan_buffer",
    "planned_frame_nbytes",
]
