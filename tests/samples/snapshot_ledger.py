"""The content that a store must have after its writers were killed, according to their logs."""

import json
from collections.abc import Callable
from typing import Any

from snapshot_child import make_state
from snapshot_samples import assert_same

from packhorse.disk import SnapshotStore

__all__ = ["Ledger"]


class Ledger:
    """The snapshots that must be in the store, according to the writers' logs.

    Attributes:
        seeds: of the states that must be there, by name.
        either: for names that are uncertain, the possible states; None stands for no snapshot.
    """

    def __init__(self) -> None:
        self.seeds: dict[str, int] = {}
        self.either: dict[str, set[int | None]] = {}

    def read(self, lines: list[str]) -> str | None:
        """Follow a writer's log. Returns the kind of step in which it was killed, if any."""
        running = None
        for line in lines:
            event, kind, what = json.loads(line)
            running = (kind, what) if event == "begin" else None
            if event == "end":
                self.done(kind, what)
        if running is not None:
            self._half_done(*running)
            return str(running[0])
        return None

    def done(self, kind: str, what: Any) -> None:
        """Follow one step that was done."""
        if kind == "prune":
            self.seeds = {name: seed for name, seed in self.seeds.items() if name in what}
        elif kind == "delete":
            del self.seeds[what]
        else:
            self.seeds.pop(what[0], None)
            self.seeds[what[0]] = what[1]

    def _half_done(self, kind: str, what: Any) -> None:
        if kind == "prune":
            gone = [name for name in self.seeds if name not in what]
        else:
            gone = [what] if kind == "delete" else [what[0]]
        for name in gone:
            before = self.seeds.pop(name, None)
            after = what[1] if kind in ("take", "replace") else None
            self.either[name] = {before, after}

    def check(
        self, store: SnapshotStore, restore: Callable[..., Any] = SnapshotStore.restore
    ) -> None:
        """Compare with the store. Everything that is there now must stay."""
        found = {}
        for name in store.names():
            state = restore(store, name)
            assert_same(state, make_state(state["seed"]))
            found[name] = state["seed"]
        for name, seeds in self.either.items():
            assert found.get(name) in seeds, name
        assert {n: s for n, s in found.items() if n not in self.either} == self.seeds
        self.seeds, self.either = found, {}
