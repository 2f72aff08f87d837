"""The parts of the soak (`soak.py`), a module for each."""

from soak_parts import changes, crowds, forks, kills, lies, round_trips, stores

__all__ = ["PARTS"]

_MODULES = (round_trips, lies, stores, kills, changes, forks, crowds)
PARTS = {module.PART.name: module.PART for module in _MODULES}
