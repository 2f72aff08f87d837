"""The weights of a policy after each step of a reinforcement learning run, as they are sent.

`make rl-trace` makes the trace; this module reads it, also while it is being made. There is one
snapshot store for each learning rate. Snapshot 0 holds the weights before the first step, and every
snapshot has a record with the SHA-256 of its weights, which is checked when they are read.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packhorse.disk import SnapshotStore

__all__ = [
    "digest",
    "folder",
    "open_store",
    "rates",
    "records",
    "snapshot_name",
    "state",
    "steps",
    "store_path",
    "writable_store",
]

VARIABLE = "PACKHORSE_RL_TRACE"
PREFIX = "lr_"
MAX_CHAIN = 16  # deltas that a state may need; each takes a thirtieth of a second to decode
CACHE_NBYTES = 1 << 28  # the newest state stays in memory, so that its successor is packed quickly

Arrays = dict[str, NDArray[Any]]  # bf16 of ml_dtypes, by name, in the order of the model


def folder() -> Path:
    """Where the trace is: $PACKHORSE_RL_TRACE, or build/rl_trace."""
    default = Path(__file__).resolve().parents[2] / "build" / "rl_trace"
    return Path(os.environ.get(VARIABLE) or default)


def store_path(folder: Path, rate: float) -> Path:
    """The snapshot store of a learning rate, in the folder of the trace."""
    return folder / f"{PREFIX}{rate:g}"


def rates(folder: Path) -> list[float]:
    """The learning rates of which there are states, the lowest first; none without a trace."""
    found = (float(path.name.removeprefix(PREFIX)) for path in folder.glob(f"{PREFIX}*"))
    return sorted(rate for rate in found if writable_store(folder, rate).names())


def open_store(folder: Path, rate: float) -> SnapshotStore:
    """The store of a learning rate.

    Raises:
        FileNotFoundError: there is none; the message says how to make it.
    """
    store = writable_store(folder, rate)
    if not store.names():
        has = ", ".join(f"{known:g}" for known in rates(folder)) or "none"
        raise FileNotFoundError(
            f"no trace for the learning rate {rate:g} in {folder} (there are: {has}); make it "
            f"with `make rl-trace`, or set ${VARIABLE} to the folder of a trace"
        )
    return store


def writable_store(folder: Path, rate: float) -> SnapshotStore:
    """The store of a learning rate, which may not be there yet."""
    path = store_path(folder, rate)
    return SnapshotStore(path, threads=1, max_chain=MAX_CHAIN, cache_nbytes=CACHE_NBYTES)


def records(folder: Path, rate: float) -> list[dict[str, Any]]:
    """What is known of every step: its number is its place, and 0 is the state before the first.

    Raises:
        FileNotFoundError: there is no trace for this rate.
    """
    store = open_store(folder, rate)
    return [dict(store.info(name).metadata) for name in store.names()]


def state(store: SnapshotStore, step: int) -> Arrays:
    """The weights after a step, bit for bit.

    Args:
        store: of `open_store`.
        step: its number; 0 is the state before the first.

    Raises:
        ValueError: the step is not there, or its weights have another hash than when it was made.
    """
    name = snapshot_name(step)
    arrays: Arrays = store.restore(name)
    wanted = store.info(name).metadata["sha256"]
    if digest(arrays) != wanted:
        raise ValueError(f"the weights of step {step} do not have the SHA-256 {wanted}")
    return arrays


def snapshot_name(step: int) -> str:
    """The name of the snapshot of a step."""
    return f"step-{step:05}"


def steps(
    folder: Path, rate: float, *, first: int = 0, last: int | None = None
) -> Iterator[tuple[int, Arrays]]:
    """The numbers of the steps and the weights after them, in order.

    Args:
        folder: of the trace; `folder()` says where it usually is.
        rate: the learning rate, such as 1e-6.
        first: the first step that is wanted; 0 is the state before the first.
        last: the last one; None for the last that there is.

    Raises:
        FileNotFoundError: there is no trace for this rate; raised by the call itself.
        ValueError: the trace does not have all the steps, or one is damaged.
    """
    store = open_store(folder, rate)
    end = len(store.names()) if last is None else last + 1
    return ((step, state(store, step)) for step in range(first, end))


def digest(state: Mapping[str, NDArray[Any]]) -> str:
    """The SHA-256 of all weights end to end, in hex.

    Args:
        state: C-contiguous arrays, in the order of the model.
    """
    found = hashlib.sha256()
    for array in state.values():
        found.update(array.reshape(-1).view(np.uint8))
    return found.hexdigest()
