"""The names of the objects in a store (docs/snapshots.md, "The store on disk").

A name that was read from a file is always checked here before it is used as a path.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import quote, unquote

from packhorse.layout import FILE_SUFFIX
from packhorse.storage.interface import Stamp

__all__ = [
    "CATALOG",
    "LOCK_FILE",
    "MAX_ORDER",
    "PACKS",
    "SNAPSHOTS",
    "STORE_FILE",
    "ManifestFile",
    "is_pack",
    "is_page",
    "manifest_file",
    "new_pack",
    "new_page",
    "pack_path",
    "parse_manifest_file",
    "quote_name",
]

CATALOG = "catalog"
STORE_FILE = "store.json"
LOCK_FILE = "writer.lock"
PACKS = "packs"
SNAPSHOTS = "snapshots"

MAX_ORDER = 10**12 - 1

_MAX_QUOTED_NBYTES = 240  # file systems allow 255
_N_QUOTED = 1 << 12  # quoted names that are kept, because a listing asks for each one twice
_MAX_GENERATION = 10**6 - 1
_PACK = re.compile(r"[0-9a-f]{32}")
_PAGE = re.compile(r"[0-9a-f]{16}\.bin")
_MANIFEST = re.compile(r"([0-9]{12})-([0-9]{6})-([0-9a-f]{16})\.json")


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """The name of a manifest, which identifies it and its snapshot.

    Attributes:
        snapshot: the snapshot's name.
        order: the place among all snapshots that were ever taken; larger is newer.
        generation: how often the snapshot's manifest was rewritten; larger is newer.
        unique: random digits, so that no name is ever used twice.
        stamp: the stamp of the file if it was found in a listing, otherwise None.
        path: the path in the store.
    """

    snapshot: str
    order: int
    generation: int
    unique: str
    stamp: Stamp | None = field(default=None, compare=False)
    path: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        file = f"{self.order:012d}-{self.generation:06d}-{self.unique}.json"
        object.__setattr__(self, "path", f"{SNAPSHOTS}/{quote_name(self.snapshot)}/{file}")

    @property
    def folder(self) -> str:
        """The snapshot's folder in the store."""
        return self.path.rpartition("/")[0]


def quote_name(name: str) -> str:
    """The name of a snapshot's folder.

    Raises:
        TypeError: the name is not a string.
        ValueError: the name is empty, too long or not Unicode text.
    """
    if not isinstance(name, str):
        raise TypeError(f"a snapshot's name must be a string, not {name!r}")
    return _quote(name)


@lru_cache(_N_QUOTED)
def _quote(name: str) -> str:
    try:
        quoted = quote(name, safe="")
    except UnicodeEncodeError as error:
        raise ValueError(f"the snapshot's name {name!a} is not Unicode text") from error
    if quoted.startswith("."):
        quoted = "%2E" + quoted[1:]
    if not 0 < len(quoted) <= _MAX_QUOTED_NBYTES:
        raise ValueError(
            f"the snapshot's name takes {len(quoted)} bytes as a file name; 1 to "
            f"{_MAX_QUOTED_NBYTES} are allowed"
        )
    return quoted


def manifest_file(snapshot: str, order: int, generation: int) -> ManifestFile:
    """A name for a new manifest.

    Raises:
        ValueError: the order or the generation is too large.
    """
    if order > MAX_ORDER or generation > _MAX_GENERATION:
        raise ValueError(
            f"snapshot {snapshot!r}: no number is left for another manifest; take the state again "
            "under another name, and delete this snapshot"
        )
    return ManifestFile(snapshot, order, generation, os.urandom(8).hex())


def parse_manifest_file(path: str, stamp: Stamp | None = None) -> ManifestFile | None:
    """Parse a path below the folder of snapshots, `<folder>/<file>`; None if it does not name a
    manifest."""
    folder, _, file = path.partition("/")
    match = _MANIFEST.fullmatch(file)
    try:
        name = unquote(folder, errors="strict")
        if match is None or quote_name(name) != folder:
            return None
    except ValueError:
        return None
    return ManifestFile(name, int(match[1]), int(match[2]), match[3], stamp)


def new_pack() -> str:
    """A name for a new pack."""
    return os.urandom(16).hex()


def is_pack(name: object) -> bool:
    """Whether something is the name of a pack."""
    return isinstance(name, str) and _PACK.fullmatch(name) is not None


def new_page() -> str:
    """A path for a new page of the catalogue."""
    return f"{CATALOG}/{os.urandom(8).hex()}.bin"


def is_page(file: str) -> bool:
    """Whether a file in the catalogue's folder has the name of a page."""
    return _PAGE.fullmatch(file) is not None


def pack_path(name: str) -> str:
    """The path of a pack in the store."""
    return f"{PACKS}/{name}{FILE_SUFFIX}"
