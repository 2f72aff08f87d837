"""Copies from global to shared memory that run on: cp.async, in groups."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tests.ptx.faults import Fault
from tests.ptx.memory import WARP

if TYPE_CHECKING:
    from tests.ptx.machine import Warp


@dataclass
class _Copy:
    lanes: np.ndarray
    place: np.ndarray  # in shared memory
    data: np.ndarray
    group: np.ndarray  # number of each lane's group; -1 before it is committed


class Copies:
    """The copies of a warp that it has not waited for."""

    def __init__(self, warp: "Warp") -> None:
        self.warp = warp
        self.running: list[_Copy] = []
        self.n_groups = np.zeros(warp.machine.n_lanes, np.int64)

    def begin(self, lanes: np.ndarray, address: np.ndarray, data: np.ndarray) -> None:
        machine = self.warp.machine
        shared, n = machine.shared, data.shape[1]
        place = shared.places(lanes, address, n)
        shared.begin_copy(self.warp.number, lanes, place, n, by_proxy=False)
        if not machine.launch.late:
            shared.put(place, data)
        self.running.append(_Copy(lanes, place, data, np.full(lanes.size, -1)))

    def commit(self, lanes: np.ndarray) -> None:
        chosen = np.zeros(self.n_groups.size, bool)
        chosen[lanes] = True
        for copy in self.running:
            which = chosen[copy.lanes] & (copy.group < 0)
            copy.group[which] = self.n_groups[copy.lanes[which]]
        self.n_groups[lanes] += 1

    def wait(self, lanes: np.ndarray, n_left: int) -> None:
        """Until at most `n_left` groups of each lane are under way."""
        limit = np.full(self.n_groups.size, -1)
        limit[lanes] = self.n_groups[lanes] - n_left
        self._finish(lambda copy: (copy.group >= 0) & (copy.group < limit[copy.lanes]))

    def wait_all(self, lanes: np.ndarray) -> None:
        self.commit(lanes)
        self.wait(lanes, 0)

    def _finish(self, is_over: object) -> None:
        machine, still = self.warp.machine, []
        for copy in self.running:
            over = is_over(copy)
            if not over.any():
                still.append(copy)
                continue
            place, data = copy.place[over], copy.data[over]
            if machine.launch.late:
                machine.shared.put(place, data)
            machine.shared.end_copy(self.warp.number, copy.lanes[over], place, data, by_proxy=False)
            if not over.all():
                keep = ~over
                parts = (copy.lanes, copy.place, copy.data, copy.group)
                still.append(_Copy(*(part[keep] for part in parts)))
        self.running = still

    def require_none(self) -> None:
        """At the end of a program, only copies whose data nobody needs may be under way: a loop
        fetches nothing for the turns after its last."""
        if any(copy.group.min() < 0 for copy in self.running):
            raise Fault(f"warp {self.warp.number} ends with copies that it has not committed")


def programs_of(lanes: np.ndarray) -> np.ndarray:
    return np.unique(lanes // WARP)
