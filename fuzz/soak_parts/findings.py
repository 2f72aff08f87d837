"""Findings as files: the case, its outcome, and how to run it again."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import packhorse
from soak_parts.case import Case
from soak_parts.worker import Seen

__all__ = ["Found", "load_finding", "save_finding", "signature"]


@dataclass(frozen=True)
class Found:
    """A finding and where it comes from.

    Attributes:
        part: the part that the case belongs to.
        seed: the seed of the run.
        number: the number of the case in its part.
        case: the case that was run.
        seen: the outcome.
    """

    part: str
    seed: int
    number: int
    case: Case
    seen: Seen


def save_finding(found: Found, folder: Path) -> Path:
    """Write a finding; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        **asdict(found),
        "versions": {"packhorse": packhorse.__version__, "python": platform.python_version()},
    }
    text = json.dumps(document, indent=1) + "\n"
    mark = hashlib.sha1(json.dumps(found.case, sort_keys=True).encode()).hexdigest()[:10]
    path = folder / f"found-{found.part}-{found.seen.kind}-{mark}.json"
    path.write_text(text)
    return path


def load_finding(path: Path) -> Found:
    """Read a finding.

    Raises:
        ValueError: the file is not a finding.
    """
    document = json.loads(path.read_text())
    try:
        fields = {key: document[key] for key in ("part", "seed", "number", "case")}
        return Found(**fields, seen=Seen(**document["seen"]))
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path}: not a finding of the soak: {error}") from error


def signature(found: Found) -> str:
    """A text that is the same for findings that probably have the same cause."""
    trace = found.seen.trace.strip().splitlines() or [""]
    places = [line for line in trace if line.lstrip().startswith("File ")]
    text = re.sub(r"/\S+|0x[0-9a-f]+|[0-9a-f]{8,}|\d+|'[^']*'", "#", found.seen.text)[:120]
    return "|".join((found.part, found.seen.kind, text, *places[-1:]))
