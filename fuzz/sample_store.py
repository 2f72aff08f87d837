"""A small snapshot store, always the same, and the manifests of small distributed checkpoints.

make_corpus.py makes seeds from it, and the target `manifest` reads them in this store, which has
their packs. Its tensors are full frames, chains of deltas, and a rounded copy of its master.
"""

import itertools
import json
import re
import struct
import tempfile
import warnings
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import zstandard

from packhorse.disk import SnapshotStore
from packhorse.disk.snapshots.index import Index
from packhorse.disk.snapshots.records import decode_page, encode_page

__all__ = ["build_store", "catalogue_parts", "checkpoint_manifests", "snapshot_manifests"]

_CHECKSUM = b'{"crc32c":"00000000",'
_DRAWN = re.compile(r"shards-[0-9a-f]{16}")
_TIME = "2026-11-21T16:20:00.123456Z"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _state(i: int) -> dict[Any, Any]:
    rng = np.random.default_rng(0)
    master = rng.standard_normal((64, 20)).astype(np.float32) + np.float32(1e-4 * i)
    return {
        "model": {"w": master, "copy": master.astype(np.float16), "n": np.arange(i + 3)},
        3: [np.array(i), (np.empty((0, 2), np.uint8), None, True), {"name": "x", 1.5: [[]]}],
        "values": [i, 0.25, float("inf"), -7, "text", {}],
    }


def build_store(folder: Path) -> None:
    """Make the store: three snapshots, each a delta on the one before.

    Args:
        folder: where the store goes; it must not exist yet.
    """
    numbers = itertools.count(1)
    store = SnapshotStore(folder, threads=1)
    with (
        mock.patch("os.urandom", lambda n: next(numbers).to_bytes(n, "big")),
        mock.patch.object(Index, "save"),  # its names would take random numbers, too
    ):
        for i in range(3):
            store.take(f"step-{i}", _state(i), metadata={"loss": [1.5, None], "step": i})
    store.prune(keep=3)  # this saves the catalogue, and has nothing else to do


def snapshot_manifests(folder: Path) -> dict[str, bytes]:
    """The manifests of a store and its own file without their checksums, by name.

    Args:
        folder: of the store.
    """
    paths = sorted((folder / "snapshots").glob("*/*.json"))
    texts = {path.parent.name: path.read_bytes() for path in paths}
    texts["store"] = (folder / "store.json").read_bytes()
    out = {name: b"{" + text[len(_CHECKSUM) :] for name, text in texts.items()}
    for name in out.keys() - {"store"}:
        document = json.loads(out[name])
        out[name] = _text({**document, "time": _TIME})
    return out


def catalogue_parts(folder: Path) -> bytes:
    """The catalogue of a store as the target reads it: six counts, the lengths of two parts, and
    three parts.

    Args:
        folder: of the store.
    """
    (path,) = (folder / "catalog").iterdir()
    records = decode_page(path.read_bytes()).records()
    fixed = [
        replace(record, stamp=record.stamp._replace(changed=i), crc=i, time=_EPOCH)
        for i, record in enumerate(records)
    ]
    page = encode_page(fixed)
    assert page is not None
    *counts, first, second, third = struct.unpack_from("<9I", page, 12)
    cuts = list(itertools.accumulate((first, second, third), initial=48))
    raw = [zstandard.decompress(page[a:b]) for a, b in itertools.pairwise(cuts)]
    return struct.pack("<8I", *counts, len(raw[0]), len(raw[1])) + b"".join(raw)


def checkpoint_manifests() -> dict[str, bytes]:
    """The manifests of two checkpoints, the second based on the first, without their checksums, by
    name; none if PyTorch is not installed."""
    if find_spec("torch") is None:
        return {}
    import torch
    import torch.distributed.checkpoint as dcp

    from packhorse.disk import PackhorseWriter

    out = {}
    numbers = itertools.count(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("os.urandom", lambda n: next(numbers).to_bytes(n, "big")),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # PyTorch warns that there is only one process
        for i in range(2):
            base = f"{folder}/{i - 1}" if i else None
            generator = torch.Generator().manual_seed(0)
            state = {
                "w": torch.randn(40, 50, generator=generator) + 1e-4 * i,
                "half": torch.arange(6).to(torch.float16).reshape(2, 3),
                "list": [torch.zeros(0), {"step": i}],
            }
            writer = PackhorseWriter(f"{folder}/{i}", base=base, threads=1)
            dcp.save(state, storage_writer=writer, no_dist=True)
            text = (Path(folder) / f"{i}" / "packhorse.json").read_bytes()
            document = json.loads(text)["manifest"]
            document["storage_meta"] |= {"checkpoint_id": "run", "save_id": "1"}
            for file in document["files"]:  # their names are drawn at random
                n = len(file["path"])
                file["path"] = _DRAWN.sub(f"shards-{n:016x}", file["path"])
            out[f"checkpoint-{i}"] = _text(document)
    return out


def _text(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
