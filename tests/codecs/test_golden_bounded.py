"""Bounded messages of earlier releases (docs/format.md, section 13), which every later release must
read. Golden files are never edited.

`golden/bounded/` has the elements of each dtype, messages of them, and two coded messages of one
link. `manifest.json` has the SHA-256 of each file, and of what it decodes to. The page defines
every byte of a message, so encoding the elements again must give the same ones; coded messages may
be shorter one day, so they only have to come back. After adding a case, write the missing files
with

    PYTHONPATH=tests/samples python tests/codecs/test_golden_bounded.py --write-missing

which never touches an existing file, and refuses to write for an older version of the format.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bounded_samples import NUMPY, assert_within, raw, table_rows
from codec_battery import ISAS, forced, guarded, guarded_output

from packhorse.codecs.bounded import (
    Rounding,
    Segment,
    bits_for,
    decode_bounded,
    encode_bounded,
    encode_fixed,
    read_segments,
)
from packhorse.codecs.bounded_models import CodeModel
from packhorse.errors import BaseMismatchError
from packhorse.layout import BOUNDED_VERSION, MAX_BOUNDED_BITS, BoundedForm
from packhorse.reference.bounded import Entry, decode_message, encode_message
from packhorse.reference.coded import decode_coded

FOLDER = Path(__file__).parents[1] / "golden" / "bounded"
MANIFEST = FOLDER / "manifest.json"
VERSION = 1  # of bounded messages; a new one gets cases of its own, beside these
NUMEL = 1100  # two blocks and a short one with a short row
RELATIVE = 2.0**-6  # of the largest magnitude among the usual elements
MODELS = {"coded-first": "F32-for-models", "coded-second": "F32-for-models-later"}  # of one link


@dataclass(frozen=True)
class Case:
    """A message: which elements, and how they are coded."""

    dtype: str
    segments: tuple[Segment, ...]
    rounding: Rounding = Rounding.NEAREST
    seed: int = 0
    form: BoundedForm = BoundedForm.PLAIN
    kind: str = "specials"

    @property
    def elements(self) -> str:
        """The name of the file of its elements."""
        return f"{self.dtype}-{self.kind}.elements"

    def encode(self) -> bytes:
        elements = raw(read_elements(self.elements, self.dtype))
        how: dict[str, Any] = {"rounding": self.rounding, "seed": self.seed}
        if self.form == BoundedForm.FIXED:
            return encode_fixed(elements, self.dtype, self.segments[0], **how).data.tobytes()
        return encode_bounded(elements, self.dtype, self.segments, **how).tobytes()


def relative(bound: float, bits: int = 0, center: float = 0.0) -> Segment:
    """A segment whose bound is a share of the values' spread."""
    return Segment(NUMEL, bound * RELATIVE, bits or bits_for(RELATIVE, bound * RELATIVE), center)


WHOLE = (Segment(NUMEL, 2.0**-10, 6),)
PARTS = (
    Segment(0, 1.0, 3),
    Segment(520, 1 / 300, 3, 2.0**-7),
    Segment(15, 1e-5, 16),
    Segment(NUMEL - 535, 2.0**-9, 5),
)
STOCHASTIC = Rounding.STOCHASTIC
CASES = {
    "F32-parts": Case("F32", PARTS),
    "F32-relative": Case("F32", (relative(1e-2),)),
    "F32-16-bits": Case("F32", (Segment(NUMEL, 1e-6, MAX_BOUNDED_BITS),)),
    "F32-1-bit": Case("F32", (Segment(NUMEL, 0.01, 1, 0.005),)),
    "F32-stochastic": Case("F32", PARTS, STOCHASTIC, seed=2**64 - 3),
    "F32-fixed": Case("F32", (Segment(NUMEL, 2.0**-20, 4),), form=BoundedForm.FIXED),
    "F32-for-models": Case("F32", (Segment(NUMEL, 0.001, 7),), kind="tame"),
    "F32-for-models-later": Case("F32", (Segment(NUMEL, 0.00101, 7),), kind="tame"),
    "F16-nearest": Case("F16", WHOLE),
    "F16-relative": Case("F16", (relative(0.03),)),
    "F16-stochastic": Case("F16", PARTS, STOCHASTIC, seed=5),
    "F16-fixed-stochastic": Case("F16", WHOLE, STOCHASTIC, seed=6, form=BoundedForm.FIXED),
    "BF16-nearest": Case("BF16", WHOLE),
    "BF16-relative": Case("BF16", (relative(0.03),)),
    "BF16-13-bits": Case("BF16", (Segment(NUMEL, 2.0**-16, 13),)),
    "BF16-stochastic": Case("BF16", PARTS, STOCHASTIC, seed=7),
    "BF16-fixed": Case("BF16", WHOLE, form=BoundedForm.FIXED),
    "F64-nearest": Case("F64", PARTS),
    "F64-stochastic": Case("F64", WHOLE, STOCHASTIC, seed=8),
}


def make_elements(dtype: str, kind: str) -> bytes:
    """Elements like those of an embedding table, most of them below `RELATIVE`; NaNs with payloads,
    infinities, zeros, subnormal and large numbers among them unless they are tame."""
    values = table_rows(NUMEL // 10, 10, seed=13).reshape(-1).clip(-RELATIVE, RELATIVE)
    elements = values.astype(NUMPY[dtype])
    if kind == "tame":
        return elements.tobytes()
    units = elements.view(f"<u{elements.itemsize}")
    infinity = int(np.array(np.inf, NUMPY[dtype]).view(units.dtype))
    sign = 1 << 8 * elements.itemsize - 1
    odd = [infinity, infinity | sign, infinity | 1, infinity - 1, infinity | sign | 5, 0, sign, 1,
           sign | 3, 2 * infinity // 3]  # fmt: skip
    for start in (3, 517, 1027):  # in each block
        units[start : start + 5 * len(odd) : 5] = odd
    return elements.tobytes()


def read_elements(name: str, dtype: str) -> Any:
    return np.frombuffer((FOLDER / name).read_bytes(), NUMPY[dtype])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def inner_messages() -> Iterator[tuple[str, bytes]]:
    """The messages of the coded ones, in their order, by the slow decoder."""
    models = b""
    for name in MODELS:
        inner, models = decode_coded((FOLDER / f"{name}.message").read_bytes(), models)
        yield name, inner


def describe(message: bytes) -> dict[str, Any]:
    """A line of the manifest, by the slow decoder."""
    dtype, entries, elements = decode_message(message)
    return {
        "dtype": dtype,
        "n_escapes": [entry.n_escapes for entry in entries],
        "doublings": [entry.doublings for entry in entries],
        "decoded_sha256": sha256(raw(elements).tobytes()),
    }


def writers() -> dict[str, Callable[[], bytes]]:
    """What makes each file, by name; elements come first."""
    made: dict[str, Callable[[], bytes]] = {}
    for case in CASES.values():
        made[case.elements] = lambda case=case: make_elements(case.dtype, case.kind)
    for name, case in CASES.items():
        made[f"{name}.message"] = case.encode
    sender = CodeModel()
    for name, inner in MODELS.items():
        made[f"{name}.message"] = lambda inner=inner: sender.encode(CASES[inner].encode())
    return made


def read_manifest() -> dict[str, Any]:
    return json.loads(MANIFEST.read_text()) if MANIFEST.exists() else {"files": {}, "messages": {}}


def write_missing() -> list[str]:
    """Write missing files, and return their names."""
    if BOUNDED_VERSION != VERSION:
        raise SystemExit(
            f"these cases are of version {VERSION}; add new ones for {BOUNDED_VERSION}"
        )
    FOLDER.mkdir(exist_ok=True)
    manifest, written = read_manifest(), []
    for name, write in writers().items():
        if name not in manifest["files"] and not (FOLDER / name).exists():
            (FOLDER / name).write_bytes(write())
            manifest["files"][name] = sha256((FOLDER / name).read_bytes())
            written.append(name)
    for name in CASES:
        if f"{name}.message" in written:
            manifest["messages"][name] = describe((FOLDER / f"{name}.message").read_bytes())
    MANIFEST.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return written


GOLDEN = read_manifest()
LINES = GOLDEN["messages"]
EACH = pytest.mark.parametrize("name", LINES)


def golden(name: str) -> bytes:
    return (FOLDER / f"{name}.message").read_bytes()


def test_no_golden_file_is_missing_changed_or_unknown() -> None:
    found = {path.name for path in FOLDER.iterdir()}
    assert found == {*GOLDEN["files"], MANIFEST.name}, "see the first lines of this file"
    assert set(writers()) <= found, "write the missing ones as this file's first lines say"
    for name, digest in GOLDEN["files"].items():
        assert sha256((FOLDER / name).read_bytes()) == digest, f"{name} was edited"
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 60 << 10


def test_golden_messages_cover_the_format() -> None:
    headers = {(golden(name)[5], golden(name)[6], golden(name)[7]) for name in LINES}
    assert {dtype for dtype, _, _ in headers} == {14, 15, 16, 17}
    assert {(rounding, form) for _, rounding, form in headers} == {
        (rounding, form) for rounding in Rounding for form in BoundedForm
    }
    entries = [entry for name in LINES for entry in read_segments(golden(name))]
    assert {1, MAX_BOUNDED_BITS} < {entry.bits for entry in entries}
    assert {0} < {entry.doublings for entry in entries}
    assert {0} < {entry.n_escapes for entry in entries}
    assert any(entry.center for entry in entries)
    assert [golden(name)[5] for name in MODELS] == [1, 0]  # with models, and with those before


@EACH
def test_golden_message_decodes_in_every_decoder(name: str) -> None:
    message, line, case = golden(name), LINES[name], CASES[name]
    assert describe(message) == line
    elements, at = read_elements(case.elements, case.dtype), 0
    for isa in ISAS:
        with forced(isa):
            out = guarded_output(elements.nbytes)
            decode_bounded(guarded(message), out, dtype=line["dtype"])
        assert sha256(bytes(out)) == line["decoded_sha256"]
    decoded = np.frombuffer(out, NUMPY[case.dtype])
    for entry in read_segments(message):
        part = slice(at, at + entry.n)
        assert_within(elements[part], decoded[part], entry.bound)
        at += entry.n


@EACH
def test_todays_encoders_write_the_same_message(name: str) -> None:
    case, message = CASES[name], golden(name)
    for isa in ISAS:
        with forced(isa):
            assert case.encode() == message
    elements = read_elements(case.elements, case.dtype)
    asked = [
        Entry(entry.n, entry.bound, entry.bits, entry.center, doublings=entry.doublings)
        for entry in read_segments(message)
    ]
    how = (case.rounding, case.seed, case.form)
    assert encode_message(case.dtype, elements, asked, *how) == message


@pytest.mark.parametrize("isa", ISAS)
def test_golden_coded_messages_decode_in_every_decoder(isa: str) -> None:
    receiver = CodeModel()
    for name, inner in inner_messages():
        assert inner == golden(MODELS[name])
        assert len(golden(name)) < len(inner)
        with forced(isa):
            found = receiver.decode(guarded(golden(name)), max_nbytes=len(inner))
        assert found.tobytes() == inner


def test_a_coded_message_needs_the_models_before_it() -> None:
    first, second = MODELS
    _, models = decode_coded(golden(first))
    with pytest.raises(BaseMismatchError):
        decode_coded(golden(second))
    with pytest.raises(BaseMismatchError):
        decode_coded(golden(second), models[:-1])
    assert decode_coded(golden(second), models)[1] == models


def test_todays_coded_messages_come_back_in_the_slow_decoder() -> None:
    sender, models = CodeModel(), b""
    for inner in MODELS.values():
        coded = sender.encode(golden(inner))
        found, models = decode_coded(coded, models)
        assert found == golden(inner)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the golden files that are missing.")
    parser.add_argument("--write-missing", action="store_true", required=True)
    parser.parse_args()
    print("\n".join(write_missing()) or "nothing is missing")
