"""Decodes many frames on a GPU; the frames are uploaded packed.

Frames are cut into windows of some chunks. Threads of the host copy a window to pinned memory,
check its checksums there and plan its decoding; one thread uploads the window and launches its
kernels. Windows take turns on three streams, so that one is uploaded while another is decoded;
before a stream is used again, the host waits for it. So the device holds the tensors, and three
windows with their scratch memory.

Frames that kernels cannot decode are left to the host. If a window has a bad checksum, field or
stream, the host decodes it again, to raise an error with the right words.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from packhorse._core import Geometry
from packhorse.errors import CorruptionError
from packhorse.frame import Frame
from packhorse.gpu.decode import (
    UNITS,
    empty_statuses,
    fill_host_memory,
    first_bad_chunk,
    part_arrays,
    run_plan,
    why_on_host,
)
from packhorse.gpu.plans import ChunkPlan, plan_chunks
from packhorse.layout import CHUNK_CRC
from packhorse.threads import in_order
from packhorse.torch_dtypes import TORCH_DTYPES

__all__ = ["MIN_NBYTES", "N_LANES", "WINDOW_NBYTES", "decode_frames"]

WINDOW_NBYTES = 1 << 24  # decoded bytes of a window: 64 chunks fill half of a large GPU
# One core of the host decodes a smaller tensor in less time than it takes to make a plan.
MIN_NBYTES = 1 << 21
N_LANES = 3  # windows on the device: one is uploaded, one decoded, and one waits

_unusable: set[torch.device] = set()  # devices on which kernels have failed to start


class _Window(NamedTuple):
    """Some chunks of a frame: `first` to `last` - 1."""

    owner: int  # index of the frame
    frame: Frame
    first: int
    last: int

    @property
    def start(self) -> int:
        """First decoded byte."""
        return self.first * self.frame.chunk_nbytes

    @property
    def stop(self) -> int:
        """One past the last decoded byte."""
        return min(self.last * self.frame.chunk_nbytes, self.frame.logical_nbytes)


class _Job(NamedTuple):
    """A window to upload: its chunks and the arrays of its plan, in host memory."""

    payload: torch.Tensor
    arrays: torch.Tensor
    plan: ChunkPlan

    def on_host(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory to upload."""
        return self.payload, self.arrays


def decode_frames(
    frames: Sequence[Frame], device: torch.device | str, *, threads: int
) -> list[torch.Tensor | None]:
    """Decodes frames with a device's kernels. Waits until all tensors are complete.

    Args:
        frames: their bytes are only read.
        device: a GPU; with Triton's interpreter, it may also be the host.
        threads: threads of the host that copy, check and plan.

    Returns:
        For each frame, a tensor on the device; None for a frame that kernels do not decode, or that
        has fewer bytes than `MIN_NBYTES`.

    Raises:
        CorruptionError: a frame is damaged, as `Frame.decompress_into`.
    """
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    windows = [
        window
        for i, frame in enumerate(frames)
        if _suits(frame, target)
        for window in _cut(i, frame)
    ]
    # Pinned memory holds one window more than there are threads, so that no thread waits for
    # memory.
    prepared = in_order(lambda i: _prepare(windows[i], target), len(windows), threads, threads + 1)
    with _Launcher(target) as launcher, closing(prepared) as jobs:
        for window, job in zip(windows, jobs, strict=True):
            launcher.launch(window, job)
            if launcher.has_failed:
                break
    found = launcher.finish()
    return [found.get(i) for i in range(len(frames))]


def _suits(frame: Frame, device: torch.device) -> bool:
    if frame.dtype not in TORCH_DTYPES or not frame.logical_nbytes or device in _unusable:
        return False
    return frame.logical_nbytes >= MIN_NBYTES and why_on_host(frame.header, device) is None


def _cut(index: int, frame: Frame) -> Iterator[_Window]:
    step = max(WINDOW_NBYTES // frame.chunk_nbytes, 1)
    for first in range(0, frame.n_chunks, step):
        yield _Window(index, frame, first, min(first + step, frame.n_chunks))


def _prepare(window: _Window, device: torch.device) -> _Job | None:
    """The job of a window; None if the planner has refused it but the host can decode it.

    The checks run on the copy, because nobody else can write to it.
    """
    frame, header = window.frame, window.frame.header
    ends = header.chunk_offsets()[window.first : window.last + 1]
    data = np.frombuffer(frame.buffer(), np.uint8)[int(ends[0]) : int(ends[-1])]
    payload = fill_host_memory([data], device)
    copy, table = payload.numpy(), header.table[window.first : window.last]
    try:
        sums = table[:, CHUNK_CRC].tolist()
        if first_bad_chunk(copy, (ends - ends[0]).tolist(), sums) is not None:
            raise CorruptionError("a checksum does not match")
        cut = header.geometry
        part = Geometry(cut.unit_nbytes, cut.split, cut.chunk_log, window.stop - window.start)
        plan = plan_chunks(copy, table, part)
    except CorruptionError:
        _let_the_host_say(window)
        return None
    return _Job(payload, fill_host_memory([plan.memory], device), plan)


def _let_the_host_say(window: _Window) -> None:
    """Decodes a window on the host, whose error says what is wrong and where."""
    memory = np.empty(window.stop - window.start, np.uint8)
    window.frame.decompress_into(memory, start=window.start, stop=window.stop, threads=1)


class _Lane:
    """A stream of the device, and the memory that its work uses. The host has no stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._held: tuple[object, ...] = ()

    def wait(self) -> None:
        """Waits until the stream is idle; after that, other work may use its memory."""
        if self.stream is not None:
            self.stream.synchronize()
        self._held = ()

    def hold(self, *memory: object) -> None:
        """Keeps memory alive until `wait` is called."""
        self._held = memory


class _Launcher:
    """Uploads windows, launches their kernels, and reads their statuses at the end.

    All memory belongs to the caller's stream. Lanes wait for that stream before they use memory,
    and it waits for the lanes at the end, so that the caller can use the memory again.
    """

    def __init__(self, device: torch.device) -> None:
        self.has_failed = False
        self._device = device
        self._home: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._lanes: list[_Lane] = []
        self._n_launched = 0
        self._units: dict[int, torch.Tensor] = {}
        self._frames: dict[int, Frame] = {}
        self._left: set[int] = set()  # frames that are left to the host
        self._statuses: list[tuple[_Window, torch.Tensor]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Wait also after an error: freed memory must not be reused while kernels still write to it.
        for lane in self._lanes:
            if self._home is not None and lane.stream is not None:
                self._home.wait_stream(lane.stream)

    def launch(self, window: _Window, job: _Job | None) -> None:
        """Uploads and decodes a window; waits only for the third window before it."""
        if job is None:
            self._left.add(window.owner)
        if job is None or window.owner in self._left:
            return
        try:
            self._run(window, job)
        except torch.cuda.OutOfMemoryError:
            self._left.add(window.owner)
        except Exception as error:  # e.g. Triton finds no compiler, or does not know the GPU
            self.has_failed = True
            self._left.update((window.owner, *self._frames))
            _unusable.add(self._device)
            warnings.warn(
                f"kernels do not start on {self._device}, so tensors are decoded in host memory: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _run(self, window: _Window, job: _Job) -> None:
        lane = self._next_lane()
        units = self._memory_of(window)
        statuses = empty_statuses(job.plan, self._device)
        payload, memory = (torch.empty_like(host, device=self._device) for host in job.on_host())
        nbytes = max(job.plan.scratch_nbytes, 1)
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        lane.hold(payload, memory, scratch)
        if lane.stream is not None:
            lane.stream.wait_stream(self._home)  # earlier work may still use the memory
        with nullcontext() if lane.stream is None else torch.cuda.stream(lane.stream):
            for target, host in zip((payload, memory), job.on_host(), strict=True):
                target.copy_(host, non_blocking=True)
            arrays = part_arrays(memory, job.plan.arrays())
            run_plan(payload, job.plan, arrays, scratch, units, statuses)
        self._statuses += [(window, status) for status in statuses if len(status)]

    def _memory_of(self, window: _Window) -> torch.Tensor:
        """The units of a window, in the memory of the whole tensor."""
        header = window.frame.header
        size = header.dtype.unit_nbytes
        if window.owner not in self._units:
            units = torch.empty(header.nbytes // size, dtype=UNITS[size], device=self._device)
            self._units[window.owner] = units
            self._frames[window.owner] = window.frame
        return self._units[window.owner][window.start // size : window.stop // size]

    def _next_lane(self) -> _Lane:
        """The lane whose turn it is, idle."""
        number, self._n_launched = self._n_launched % N_LANES, self._n_launched + 1
        if number == len(self._lanes):
            make: Any = torch.cuda.Stream  # PyTorch has no type hints for it
            self._lanes.append(_Lane(None if self._home is None else make(self._device)))
        self._lanes[number].wait()
        return self._lanes[number]

    def finish(self) -> dict[int, torch.Tensor]:
        """Waits for the kernels, and returns their tensors by the index of the frame.

        Raises:
            CorruptionError: a frame is damaged.
        """
        if self._statuses and not self.has_failed:
            found = torch.cat([status for _, status in self._statuses]).cpu().numpy()
            sizes = [len(status) for _, status in self._statuses]
            bad = np.repeat(np.arange(len(sizes)), sizes)[found != 0]
            for i in dict.fromkeys(bad.tolist()):
                _let_the_host_say(self._statuses[i][0])
                # If the host finds no fault, the tensor that the host decodes is used.
                self._left.add(self._statuses[i][0].owner)
        return {
            i: units.view(TORCH_DTYPES[self._frames[i].dtype]).reshape(self._frames[i].shape)
            for i, units in self._units.items()
            if i not in self._left
        }
