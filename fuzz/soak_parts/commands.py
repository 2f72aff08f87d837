"""Run the command in a child, and check what must hold however it ends."""

from __future__ import annotations

import json

from soak_parts.case import Place, claim
from soak_parts.children import Ended, run_child

__all__ = ["run_command"]

_CODES = (0, 1, 2, 3)  # exit codes documented for sources of any kind
_LIMIT_S = 20.0


def run_command(place: Place, args: list[str]) -> Ended:
    """Run the command. It must end in time, with a documented code, without a traceback, and print
    one document if the arguments ask for JSON."""
    ended = run_child(lambda: place.operations.command(args), place.folder, limit_s=_LIMIT_S)
    claim("Traceback" not in ended.err, f"a traceback of {args}: {ended.last_line}", ended.err)
    claim(ended.code in _CODES, f"exit code {ended.code} of {args}: {ended.last_line}", ended.err)
    if "--json" in args:
        claim(_is_document(ended.out), f"exit code {ended.code} without a JSON document: {args}")
    if ended.is_good:
        place.accept()
    else:
        place.refuse()
    return ended


def _is_document(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
