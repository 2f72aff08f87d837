"""What was measured, kept as a JSON file for each kind of GPU.

A file names the GPU, its multiprocessors and the versions of Triton and Packhorse that its figures
hold for. It is read with distrust: each entry must be one that this release could have written, and
whatever is wrong makes the whole file void. A void file is told once, by a warning, and then it is
as if nothing had been measured: so a bad cache may cost time, and never gives a wrong product.
It is written under another name and renamed, so a reader sees an old or a new file and no part.
"""

import json
import math
import os
import re
import tempfile
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from packhorse.device.strategy import (
    BUCKETS,
    INVARIANT_TOKENS,
    MAX_FUSED_TOKENS,
    Choice,
    Strategy,
)
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.kernels.matmul import MatmulConfig
from packhorse.kernels.matmul_many import ManyConfig
from packhorse.layout import MAX_WEIGHT_COLUMNS, W12, WEIGHT_FORMATS

__all__ = [
    "CACHE_VARIABLE",
    "CACHE_VERSION",
    "CONFIG_VALUES",
    "Entries",
    "Identity",
    "Key",
    "Measured",
    "cache_path",
    "check_config",
    "load_cache",
    "order_of",
    "read_cache",
    "update_cache",
    "write_cache",
]

CACHE_VERSION = 1
CACHE_VARIABLE = "PACKHORSE_CACHE_DIR"
_MAX_CACHE_NBYTES = 16 << 20
_MAX_ROWS = 1 << 31
# What each field of a division may be; the launchers take these, some are too large for any GPU.
CONFIG_VALUES: dict[type, dict[str, tuple[int, ...]]] = {
    MatmulConfig: {
        "block_rows": (16, 32, 64, 128, 256),
        "block_tokens": (8, 16, 32),
        "block_steps": (16, 32, 64, 128, 256),
        "n_warps": (1, 2, 4, 8),
        "n_splits": (1, 2, 4, 8, 16, 32, 64),
        "n_stages": (1, 2, 3, 4, 5, 6, 7, 8),
        "n_tiles": (1, 2, 3, 4),
    },
    ManyConfig: {
        "block_rows": (64, 128, 256),
        "block_tokens": (16, 32, 64, 128, 256),
        "block_steps": (16, 32, 64, 128),
        "n_warps": (4, 8),
        "n_splits": (1, 2, 4, 8, 16, 32, 64),
        "n_stages": (1, 2, 3, 4, 5, 6, 7, 8),
    },
}


@dataclass(frozen=True)
class Identity:
    """What figures hold for.

    Attributes:
        device: name of the GPU, as the driver tells it.
        n_processors: its multiprocessors; a slice of a GPU has fewer.
        triton: version of the compiler.
        packhorse: version of the kernels.
    """

    device: str
    n_processors: int
    triton: str
    packhorse: str


@dataclass(frozen=True)
class Key:
    """A matrix whose products were measured.

    Attributes:
        n_rows: its rows.
        n_columns: its columns.
        form: name of its format.
    """

    n_rows: int
    n_columns: int
    form: str


@dataclass(frozen=True)
class Measured:
    """What is best for a number of tokens.

    Attributes:
        choice: what to run.
        seconds: what that takes.
        plain_seconds: what a product with the BF16 weight takes; None if that was not measured.
    """

    choice: Choice
    seconds: float
    plain_seconds: float | None = None


Entries: TypeAlias = dict[Key, dict[int, Measured]]


def order_of(config: MatmulConfig) -> tuple[int, int, int]:
    """What the order of sums depends on."""
    return config.block_steps, config.n_warps, config.n_splits


def check_config(config: MatmulConfig | ManyConfig) -> None:
    """Checks the ranges of a division.

    Raises:
        ValueError: a field is out of its range; the message names it.
    """
    for field in fields(config):
        value, allowed = getattr(config, field.name), CONFIG_VALUES[type(config)][field.name]
        if type(value) is not int or value not in allowed:
            raise ValueError(f"{field.name} is {value!r}; it must be one of {allowed}")


def cache_path(device: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Where the figures of a GPU lie.

    Args:
        device: its name.
        folder: by default the one that PACKHORSE_CACHE_DIR names, or `packhorse` in
            XDG_CACHE_HOME, or in ~/.cache.
    """
    if folder is None:
        folder = os.environ.get(CACHE_VARIABLE) or None
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = Path(home) / "packhorse"
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "gpu"
    return Path(folder) / f"tune-{name[:80]}.json"


def load_cache(path: Path, identity: Identity) -> Entries:
    """The entries of a file; none if there is no file, and none and a warning if it is no good."""
    try:
        return read_cache(path, identity)
    except FileNotFoundError:
        return {}
    except (CorruptionError, CompatibilityError, OSError) as error:
        warnings.warn(
            f"{path}: measured choices are not used: {error}; kernels are chosen by predictions "
            "instead. Run `packhorse tune` to measure again",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}


def read_cache(path: Path, identity: Identity) -> Entries:
    """The entries of a file.

    Raises:
        CompatibilityError: they hold for another GPU or version.
        CorruptionError: the file is not as this release writes it.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        data = file.read(_MAX_CACHE_NBYTES + 1)
    _require(len(data) <= _MAX_CACHE_NBYTES, f"it has more than {_MAX_CACHE_NBYTES} bytes")
    try:
        document = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"it is not valid JSON ({error})") from error
    version = document.get("version") if isinstance(document, dict) else None
    if type(version) is not int or version != CACHE_VERSION:
        raise CompatibilityError(f"its version is {version!r:.40}, not {CACHE_VERSION}")
    _require_keys(document, {"version", "identity", "entries"}, "it")
    _check_identity(document["identity"], identity)
    _require(type(document["entries"]) is list, "its entries are no list")
    entries: Entries = {}
    for number, entry in enumerate(document["entries"]):
        try:
            key, buckets = _parse_entry(entry)
        except (CorruptionError, ValueError, TypeError) as error:
            raise CorruptionError(f"entry {number}: {error}") from error
        _require(key not in entries, f"entry {number} stands there twice")
        entries[key] = buckets
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise CorruptionError(text)


def _require_keys(value: Any, keys: set[str], what: str) -> None:
    _require(type(value) is dict and set(value) == keys, f"{what} must have {sorted(keys)}")


def _check_identity(found: Any, own: Identity) -> None:
    expected = asdict(own)
    _require_keys(found, set(expected), "its identity")
    for name, value in expected.items():
        if type(found[name]) is not type(value) or found[name] != value:
            text = f"it was measured with {name} {found[name]!r:.80}, and this is {value!r:.80}"
            raise CompatibilityError(text)


def _parse_entry(entry: Any) -> tuple[Key, dict[int, Measured]]:
    _require_keys(entry, {"n_rows", "n_columns", "form", "buckets"}, "an entry")
    n_rows, n_columns = entry["n_rows"], entry["n_columns"]
    _require(type(n_rows) is int and 0 < n_rows < _MAX_ROWS, "n_rows is out of range")
    _require(
        type(n_columns) is int and 0 < n_columns <= MAX_WEIGHT_COLUMNS, "n_columns is out of range"
    )
    _require(type(entry["form"]) is str and entry["form"] in WEIGHT_FORMATS, "no such format")
    _require(type(entry["buckets"]) is list, "buckets are no list")
    parsed = [_parse_measured(row) for row in entry["buckets"]]
    numbers = [n_tokens for n_tokens, _ in parsed]
    _require(numbers == sorted(set(numbers)), "buckets do not ascend")
    found = dict(parsed)
    is_many = any(measured.choice.strategy is Strategy.MANY for measured in found.values())
    _require(not is_many or entry["form"] == W12.name, f"{W12.name} alone has such a product")
    orders = {_order(measured) for n, measured in parsed if n <= INVARIANT_TOKENS}
    _require(len(orders) <= 1, "the order of sums depends on the number of tokens")
    return Key(n_rows, n_columns, entry["form"]), found


def _order(measured: Measured) -> tuple[int, int, int] | None:
    config = measured.choice.config
    return order_of(config) if isinstance(config, MatmulConfig) else None


def _parse_measured(row: Any) -> tuple[int, Measured]:
    names = {"n_tokens", "strategy", "config", "seconds", "plain_seconds"}
    _require_keys(row, names, "a bucket")
    n_tokens, strategy, config = row["n_tokens"], row["strategy"], row["config"]
    _require(type(n_tokens) is int and n_tokens in BUCKETS, "no such number of tokens")
    _require(strategy in [s.value for s in Strategy], "no such strategy")
    times = [row["seconds"]] + ([row["plain_seconds"]] if row["plain_seconds"] is not None else [])
    _require(
        all(type(time) is float and 0 < time < math.inf for time in times), "a time is no time"
    )
    if strategy == Strategy.DECODE.value:
        _require(config is None, "a division of what is not divided")
        choice = Choice(Strategy.DECODE)
    else:
        kind = MatmulConfig if strategy == Strategy.FUSED.value else ManyConfig
        _require(kind is MatmulConfig or n_tokens > INVARIANT_TOKENS, "too few tokens")
        _require(n_tokens <= MAX_FUSED_TOKENS, "too many tokens for a fused product")
        _require_keys(config, {field.name for field in fields(kind)}, "a division")
        parsed = kind(**config)
        check_config(parsed)
        choice = Choice(Strategy(strategy), parsed)
    return n_tokens, Measured(choice, row["seconds"], row["plain_seconds"])


def write_cache(path: Path, identity: Identity, entries: Entries) -> None:
    """Replaces a file, in one step.

    Raises:
        OSError: the system refuses.
    """
    document = {
        "version": CACHE_VERSION,
        "identity": asdict(identity),
        "entries": [_entry(key, buckets) for key, buckets in entries.items()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(".tmp", ".packhorse-", path.parent)
    try:
        with open(handle, "w") as file:
            file.write(json.dumps(document, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def update_cache(path: Path, identity: Identity, entries: Entries) -> None:
    """Adds entries to a file, or replaces those of the same matrices. A file that cannot be used is
    replaced as a whole.

    Raises:
        OSError: the system refuses.
    """
    try:
        before = read_cache(path, identity)
    except (CorruptionError, CompatibilityError, FileNotFoundError):
        before = {}
    write_cache(path, identity, before | entries)


def _entry(key: Key, buckets: dict[int, Measured]) -> dict[str, Any]:
    rows = [
        {
            "n_tokens": n_tokens,
            "strategy": measured.choice.strategy.value,
            "config": None if measured.choice.config is None else asdict(measured.choice.config),
            "seconds": measured.seconds,
            "plain_seconds": measured.plain_seconds,
        }
        for n_tokens, measured in sorted(buckets.items())
    ]
    return asdict(key) | {"buckets": rows}
