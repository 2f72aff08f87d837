"""The parts of the soak (`soak.py`), a module for each."""

from soak_parts import bounded, changes, crowds, forks, kills, lies, round_trips, stores, updates

__all__ = ["PARTS"]

_MODULES = (round_trips, lies, stores, kills, changes, forks, crowds, bounded, updates)
PARTS = {module.PART.name: module.PART for module in _MODULES}
