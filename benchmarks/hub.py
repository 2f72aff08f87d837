"""Measure what the second version of a model uploads to a hub: `python benchmarks/hub.py`.

The client of Xet, which the hub of Hugging Face stores files with, cuts files into chunks by their
content and uploads only chunks that are not there yet, compressed. Here the real client uploads two
versions of a model to a store in a folder: plain, packed, and packed against the first version. The
versions are checkpoints of the training run of `benchmarks/training.py`. Each second version is
downloaded again and compared byte for byte, and each packed one is unpacked and compared.

`--write` keeps the figures in `benchmarks/results/hub.json` and writes `docs/benchmarks_hub.md`;
`--render` only writes the page again.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import figures, machine
from benchmarks.data import sets

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "hub.json"
DOCUMENT = HERE.parent / "docs" / "benchmarks_hub.md"
CHANGED = "layers.5."  # the last layer, in the case in which only a part is trained
N_ROWS = 16  # of the embedding, in the case in which a few words are trained
DTYPES = {"w16": ("BF16", ml_dtypes.bfloat16), "w32": ("F32", np.float32)}
Tensors = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Row:
    """One way to store two versions.

    Attributes:
        case: what changed between the versions.
        form: how the files are stored.
        nbytes: of the second file.
        first: bytes that the first version uploaded.
        second: bytes that the second version uploaded.
        known: bytes of the second file that the hub had already.
    """

    case: str
    form: str
    nbytes: int
    first: int
    second: int
    known: int


def _steps(kind: str, gap: int) -> tuple[Tensors, Tensors]:
    """The weights of two steps."""
    manifest = json.loads((sets.training_folder() / sets.TRAINING_MANIFEST).read_text())
    last = manifest["recipe"]["full_steps"] + manifest["recipe"]["cool_down"]
    old, new = (sets.training_tensors(kind, step, *DTYPES[kind]) for step in (last - gap, last))
    return old, new


def _one_layer() -> tuple[Tensors, Tensors]:
    """The weights of two steps, as if only the last layer had been trained."""
    old, new = _steps("w16", 128)
    return old, {name: new[name] if CHANGED in name else old[name] for name in old}


def _some_rows() -> tuple[Tensors, Tensors]:
    """The weights of two steps, as if only a few words of the vocabulary had been trained."""
    old, new = _steps("w16", 128)
    name = max(old, key=lambda name: old[name].size)
    rows = np.random.default_rng(sets.SEED).choice(len(old[name]), N_ROWS, replace=False)
    changed = old[name].copy()
    changed[rows] = new[name][rows]
    return old, old | {name: changed}


CASES: dict[str, Callable[[], tuple[Tensors, Tensors]]] = {
    "bf16, one of six layers trained": _one_layer,
    f"bf16, {N_ROWS} rows of the embedding trained": _some_rows,
    "bf16, one step": partial(_steps, "w16", 1),
    "bf16, 8 steps": partial(_steps, "w16", 8),
    "bf16, 128 steps": partial(_steps, "w16", 128),
    "fp32, one step": partial(_steps, "w32", 1),
}
FORMS = ("plain", "packed", "packed against the first")


class Store:
    """A store of Xet in a folder, and the client that uploads to it."""

    def __init__(self, folder: Path) -> None:
        import hf_xet

        self._session = hf_xet.XetSession()
        self._where = f"local://{folder}"

    def upload(self, path: Path) -> tuple[Any, Any]:
        """Uploads a file; returns what the client says about it, and the file's name there."""
        commit = self._session.new_upload_commit(endpoint=self._where)
        handle = commit.start_upload_file(str(path))
        report = commit.wait_to_finish()
        return report.dedup_metrics, handle.result().xet_info

    def download(self, info: Any, path: Path) -> None:
        """Downloads a file."""
        group = self._session.new_file_download_group(endpoint=self._where)
        group.start_download_file(info, str(path))
        group.wait_to_finish()


def measure(names: list[str]) -> dict[str, Any]:
    """Upload both versions of each case in each form; prints a line for each."""
    result: dict[str, Any] = {
        "kind": "hub",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine.describe(),
        "versions": {name: version(name) for name in ("hf_xet", "safetensors")},
        "rows": [],
    }
    for case in names:
        with tempfile.TemporaryDirectory() as folder:
            for row in _one_case(case, Path(folder)):
                print(f"{row.case}, {row.form}: {row.second / 1e6:.2f} MB", flush=True)
                result["rows"].append(asdict(row))
    return result


def _one_case(case: str, folder: Path) -> list[Row]:
    from packhorse.disk import pack_file, unpack_file

    old, new, packed, delta, back = (folder / f"{name}.safetensors" for name in "abcde")
    for path, tensors in zip((old, new), CASES[case](), strict=True):
        safetensors.numpy.save_file(tensors, path)
    first = folder / "first.safetensors"
    pack_file(old, first)
    pack_file(new, packed)
    pack_file(new, delta, base=old)
    for path, base in ((packed, None), (delta, first)):
        unpack_file(path, back, base=base, force=True)
        _check(back, new)
    pairs = dict(zip(FORMS, ((old, new), (first, packed), (first, delta)), strict=True))
    return [
        _one_form(case, form, paths, folder / str(number))
        for number, (form, paths) in enumerate(pairs.items())
    ]


def _one_form(case: str, form: str, paths: tuple[Path, Path], folder: Path) -> Row:
    store = Store(folder)
    before, _ = store.upload(paths[0])
    after, info = store.upload(paths[1])
    again = folder / "again"
    store.download(info, again)
    _check(again, paths[1])
    return Row(
        case, form, paths[1].stat().st_size, before.total_bytes_uploaded,
        after.total_bytes_uploaded, after.deduped_bytes,
    )  # fmt: skip


def _check(path: Path, original: Path) -> None:
    if path.read_bytes() != original.read_bytes():
        raise RuntimeError(f"{path} is not {original} byte for byte")


INTRODUCTION = """# What a second version of a model uploads

Written by `python benchmarks/hub.py --write` from `benchmarks/results/hub.json`; do not edit
by hand. [arrays.md](arrays.md#a-hub) says how models are uploaded.

- The client of Xet, which the hub of Hugging Face uses, uploads to a store in a folder. It cuts
  files into chunks of about 64 KiB by their content, leaves out chunks that are there,
  and compresses the others. So its figure for plain files is less than their size.
- Both versions come from a small language model that is trained. Each second version was downloaded
  again and compared byte for byte; packed ones were unpacked and compared, too.
- `first` and `second` are the bytes that a version uploads, in MB (10^6 bytes). `known` is the part
  of the second file that the store had already.
"""
CONCLUSION = """## What this means

- **Tensors that have not changed** are known to the hub, packed or plain, because the same tensor
  gives the same frame.
- **Tensors that have changed everywhere** have no chunk in common with their older version, packed
  or plain. Then the better packing decides.
- **Tensors that have changed in a few places** are where packing costs uploads. A change reaches
  all bytes of the frame's chunk that it is in, and such a chunk holds 256 KiB of the tensor.
  The chunks of the hub have about 64 KiB.
- **Differences** are the way for a few steps of training or a few rows: pack the new version
  against the old one (`packhorse pack new.safetensors --base old.safetensors`). Whoever downloads
  the new version needs the old one, too.
"""


def document(result: dict[str, Any]) -> str:
    """The whole of docs/benchmarks_hub.md."""
    m, packages = result["machine"], result["versions"]
    names = ", ".join(f"{name} {number}" for name, number in packages.items())
    lines = [INTRODUCTION, f"Measured on {result['date']}: {m['cpu']}, {m['system']}; {names}.", ""]
    lines += ["| what changed | files | size MB | first | second | known |"]
    lines += ["|---|---|--:|--:|--:|--:|"]
    for row in result["rows"]:
        cells = [f"{row[key] / 1e6:.2f}" for key in ("nbytes", "first", "second")]
        known = f"{row['known'] / row['nbytes']:.0%}"
        lines.append(f"| {row['case']} | {row['form']} | {' | '.join(cells)} | {known} |")
    return "\n".join([*lines, "", CONCLUSION])


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description="Measure uploads of a second version.")
    parser.add_argument("--case", nargs="+", choices=CASES, help="default: all")
    figures.add_outputs(parser)
    args = parser.parse_args(argv)
    if not args.render:
        result = measure(args.case or list(CASES))
        figures.keep(result, args.json)
        figures.keep(result, RESULT if args.write else None)
    if args.write or args.render:
        DOCUMENT.write_text(document(json.loads(RESULT.read_text())))
        print(f"wrote {DOCUMENT}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
