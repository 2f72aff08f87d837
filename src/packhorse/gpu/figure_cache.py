"""Keeps measured figures in a JSON file for each kind of GPU. The caller defines the figures.

A file names the GPU, its number of multiprocessors, and the versions of Triton and Packhorse for
which its figures are valid. Every entry is checked when the file is read: it must be one that this
release could have written, and a single fault makes the whole file invalid. An invalid file causes
one warning, and is then treated as if nothing had been measured. So a bad cache may cost time, but
never gives a wrong result. A file is written under another name and then renamed, so a reader sees
either the old file or the new one, never a part of one.
"""

import json
import os
import re
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.storage.atomic import atomic_file
from packhorse.storage.strict_json import parse_json

__all__ = [
    "CACHE_VARIABLE",
    "FigureCache",
    "Identity",
    "cache_folder",
    "require",
    "require_keys",
]

CACHE_VARIABLE = "PACKHORSE_CACHE_DIR"
_MAX_CACHE_NBYTES = 16 << 20

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def cache_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder of what is kept for later processes.

    Args:
        folder: one that the caller has chosen; by default the one that PACKHORSE_CACHE_DIR names,
            or `packhorse` in XDG_CACHE_HOME, or in ~/.cache.
    """
    named = folder or os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "packhorse"


@dataclass(frozen=True)
class Identity:
    """The GPU and the versions for which figures are valid.

    Attributes:
        device: name of the GPU, as the driver reports it.
        n_processors: its number of multiprocessors; a slice of a GPU has fewer.
        triton: version of the compiler.
        packhorse: version of the kernels.
    """

    device: str
    n_processors: int
    triton: str
    packhorse: str


def require(condition: bool, text: str) -> None:
    """Checks a condition that an entry must fulfil.

    Raises:
        CorruptionError: the condition is false; `text` is the message.
    """
    if not condition:
        raise CorruptionError(text)


def require_keys(value: Any, keys: set[str], what: str) -> None:
    """Checks that a value is a JSON object with exactly these keys.

    Raises:
        CorruptionError: it is not.
    """
    require(type(value) is dict and set(value) == keys, f"{what} must have {sorted(keys)}")


@dataclass(frozen=True)
class FigureCache(Generic[_Key, _Value]):
    """Files of figures of one kind.

    Attributes:
        stem: the beginning of the names of its files.
        version: version of its entries.
        parse: makes an entry from JSON; raises CorruptionError, ValueError or TypeError for an
            entry that this release does not write.
        dump: makes JSON from an entry.
        remedy: the warning for a file that cannot be used; it says what that means, and what to do.
    """

    stem: str
    version: int
    parse: Callable[[Any], tuple[_Key, _Value]]
    dump: Callable[[_Key, _Value], dict[str, Any]]
    remedy: str

    def path(self, device: str, folder: str | os.PathLike[str] | None = None) -> Path:
        """The path of the file for a GPU.

        Args:
            device: the GPU's name.
            folder: the folder; None for `cache_folder()`.
        """
        name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "gpu"
        return cache_folder(folder) / f"{self.stem}-{name[:80]}.json"

    def load(self, path: Path, identity: Identity) -> dict[_Key, _Value]:
        """The entries of a file; none if there is no file. If the file cannot be used, warns and
        returns none."""
        try:
            return self.read(path, identity)
        except FileNotFoundError:
            return {}
        except (CorruptionError, CompatibilityError, OSError) as error:
            warnings.warn(f"{path}: {self.remedy.format(error)}", RuntimeWarning, stacklevel=2)
            return {}

    def read(self, path: Path, identity: Identity) -> dict[_Key, _Value]:
        """The entries of a file.

        Raises:
            CompatibilityError: the entries are for another GPU or version.
            CorruptionError: the file is not one that this release writes.
            OSError: the file cannot be read.
        """
        document = _read_document(path)
        version = document.get("version")
        if type(version) is not int or version != self.version:
            raise CompatibilityError(f"its version is {version!r:.40}, not {self.version}")
        require_keys(document, {"version", "identity", "entries"}, "it")
        _check_identity(document["identity"], identity)
        require(type(document["entries"]) is list, "its entries are not a list")
        entries: dict[_Key, _Value] = {}
        for number, entry in enumerate(document["entries"]):
            try:
                key, value = self.parse(entry)
            except (CorruptionError, ValueError, TypeError) as error:
                raise CorruptionError(f"entry {number}: {error}") from error
            require(key not in entries, f"entry {number} repeats an earlier one")
            entries[key] = value
        return entries

    def write(self, path: Path, identity: Identity, entries: Mapping[_Key, _Value]) -> None:
        """Replaces a file in one step.

        Raises:
            OSError: the system refuses.
        """
        document = {
            "version": self.version,
            "identity": asdict(identity),
            "entries": [self.dump(key, value) for key, value in entries.items()],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, force=True) as file:
            file.write(json.dumps(document, indent=1).encode() + b"\n")

    def update(self, path: Path, identity: Identity, entries: Mapping[_Key, _Value]) -> None:
        """Adds entries to a file, and replaces those with the same keys. A file that cannot be used
        is replaced as a whole.

        Raises:
            OSError: the system refuses.
        """
        try:
            before = self.read(path, identity)
        except (CorruptionError, CompatibilityError, FileNotFoundError):
            before = {}
        self.write(path, identity, {**before, **entries})


def _read_document(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        data = file.read(_MAX_CACHE_NBYTES + 1)
    require(len(data) <= _MAX_CACHE_NBYTES, f"it has more than {_MAX_CACHE_NBYTES} bytes")
    return parse_json(data, label="its text")


def _check_identity(found: Any, own: Identity) -> None:
    expected = asdict(own)
    require_keys(found, set(expected), "its identity")
    for name, value in expected.items():
        if type(found[name]) is not type(value) or found[name] != value:
            text = f"it was measured with {name} {found[name]!r:.80}, but this is {value!r:.80}"
            raise CompatibilityError(text)
