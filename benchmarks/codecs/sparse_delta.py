"""Updates that change few weights, in five forms: `python benchmarks/codecs/sparse_delta.py`.

A trainer sends its bf16 weights to inference workers after each step. Its fp32 masters move by
about the learning rate, which most bf16 weights are too coarse to show. Here the masters are
N(0, .02), and a step is the learning rate times N(0, 1), clipped at 2.5. The forms are

- ours, as `compress_buffer` chooses;
- the dense mode of differences alone (docs/format.md, 6.6), which was all before version 2;
- XOR of old and new weights, zstd level 1 (slime, SkyRL);
- gaps between changed weights as u16, XOR of these weights, both zstd level 1 (NeMo-RL);
- positions as int32 and new weights, as they are (verl, vLLM).

The last three are re-made from their descriptions with NumPy and zstandard. Each form restores the
new weights exactly before it is timed. Then all forms take turns, with one thread each, in memory
that exists. Figures are the best of all rounds, in processor seconds, which other programs disturb
less.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from packhorse import _core
from packhorse._core import EncodedTensor
from packhorse.codecs.content import content_hash
from packhorse.frame import Frame, compress_buffer, max_frame_nbytes, plan_buffer
from packhorse.frame.base import checked_base
from packhorse.frame.encode import encode_payload
from packhorse.frame.plan import checked_source
from packhorse.layout import Mode

RATES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5)
N_ELEMENTS = 17_000_000
ROUNDS = 5
CLIP = 2.5
MAX_U16 = 0xFFFF

Words = Any  # arrays of u16: bf16 weights


@dataclass(frozen=True)
class Form:
    """One way to send an update.

    Attributes:
        name: its name in the table.
        encode: makes what is sent, from the new weights.
        decode: fills memory with the new weights, from what was sent.
        nbytes: the length of what is sent.
    """

    name: str
    encode: Callable[[Words], Any]
    decode: Callable[[Any, Words], None]
    nbytes: Callable[[Any], int]


def make_weights(rate: float, n: int) -> tuple[Words, Words]:
    """Weights before and after a step."""
    rng = np.random.default_rng(7)
    master = (rng.standard_normal(n, np.float32) * np.float32(0.02)).astype(np.float32)
    step = np.clip(rng.standard_normal(n, np.float32), -CLIP, CLIP) * np.float32(rate)
    return _bf16(master), _bf16(master + step)


def _bf16(values: Any) -> Words:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def ours(old: Words) -> Form:
    """Frames, as the package makes them."""
    digest, shape = content_hash(old), old.shape
    memory = np.empty(max_frame_nbytes("BF16", shape), np.uint8)

    def encode(new: Words) -> Frame:
        return compress_buffer(
            new, "BF16", shape, threads=1, out=memory, base=old, base_hash=digest,
            base_is_fixed=True,
        )  # fmt: skip

    def decode(frame: Frame, out: Words) -> None:
        frame.decompress_into(out, threads=1, base=old, base_hash=digest)

    return Form("packhorse", encode, decode, lambda frame: frame.nbytes)


def dense(old: Words) -> Form:
    """The payload of a frame without the sparse mode, with a plan for each."""
    memory = np.empty(max_frame_nbytes("BF16", old.shape), np.uint8)

    def encode(new: Words) -> Any:
        source = checked_source(new, "BF16", old.shape)
        base, _ = checked_base(old, None, source)
        plan = plan_buffer(new, "BF16", old.shape, base=old)
        payload = encode_payload(
            source, plan, base, memory, 1, base_is_fixed=True, last_mode=Mode.DELTA
        )
        return plan.geometry, payload, base

    def decode(sent: Any, out: Words) -> None:
        geometry, payload, base = sent
        tensor = EncodedTensor(memory[: payload.nbytes], payload.table, geometry, None, base)
        status, _ = _core.decode_range(tensor, 0, out.view(np.uint8), True, 1)
        assert status == 0, "a payload is good"

    return Form("dense mode", encode, decode, lambda sent: sent[1].nbytes + sent[1].table.nbytes)


def xor_zstd(old: Words) -> Form:
    """The XOR of all weights, packed."""
    pack, unpack = zstandard.ZstdCompressor(1).compress, zstandard.ZstdDecompressor().decompress
    scratch = np.empty_like(old)

    def encode(new: Words) -> bytes:
        np.bitwise_xor(new, old, out=scratch)
        return pack(scratch.data)

    def decode(sent: bytes, out: Words) -> None:
        np.bitwise_xor(np.frombuffer(unpack(sent), np.uint16), old, out=out)

    return Form("XOR, zstd-1", encode, decode, len)


def gaps_zstd(old: Words) -> Form:
    """Gaps and XORs of changed weights, packed."""
    pack, unpack = zstandard.ZstdCompressor(1).compress, zstandard.ZstdDecompressor().decompress

    def encode(new: Words) -> tuple[bytes, bytes, np.dtype]:
        places = np.flatnonzero(new != old)
        gaps = np.diff(places, prepend=0)
        kind = np.dtype(np.uint16 if gaps.max(initial=0) <= MAX_U16 else np.uint32)
        return pack(gaps.astype(kind).data), pack((new[places] ^ old[places]).data), kind

    def decode(sent: tuple[bytes, bytes, np.dtype], out: Words) -> None:
        places = np.cumsum(np.frombuffer(unpack(sent[0]), sent[2]), dtype=np.int64)
        out[:] = old
        out[places] ^= np.frombuffer(unpack(sent[1]), np.uint16)

    return Form("u16 gaps + XOR, zstd-1", encode, decode, lambda sent: len(sent[0]) + len(sent[1]))


def positions(old: Words) -> Form:
    """Positions and new weights."""

    def encode(new: Words) -> tuple[Any, Words]:
        places = np.flatnonzero(new != old).astype(np.int32)
        return places, new[places]

    def decode(sent: tuple[Any, Words], out: Words) -> None:
        out[:] = old
        out[sent[0]] = sent[1]

    return Form("int32 + values", encode, decode, lambda sent: sent[0].nbytes + sent[1].nbytes)


FORMS = (ours, dense, xor_zstd, gaps_zstd, positions)


def measure(rate: float, n: int, rounds: int) -> tuple[float, list[tuple[float, float, float]]]:
    """Measure all forms at one learning rate.

    Args:
        rate: the learning rate.
        n: the number of weights.
        rounds: how often each form is timed.

    Returns:
        The share of weights that change; for each form the ratio, and GB/s to encode and decode.
    """
    old, new = make_weights(rate, n)
    forms, out = [make(old) for make in FORMS], np.empty_like(new)
    ratios = []
    for form in forms:
        sent = form.encode(new)
        out.fill(0)
        form.decode(sent, out)
        assert np.array_equal(out, new), f"{form.name} is not exact"
        ratios.append(new.nbytes / form.nbytes(sent))
    best = np.full((len(forms), 2), np.inf)
    for _ in range(rounds):
        for i, form in enumerate(forms):
            begun = time.process_time()
            sent = form.encode(new)
            middle = time.process_time()
            form.decode(sent, out)
            best[i] = np.minimum(best[i], (middle - begun, time.process_time() - middle))
    speeds = new.nbytes / 1e9 / best
    rows = [(r, float(e), float(d)) for r, (e, d) in zip(ratios, speeds, strict=True)]
    return float((old != new).mean()), rows


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=N_ELEMENTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    names = [make(np.zeros(64, np.uint16)).name for make in FORMS]
    print("Ratio (encode / decode in GB/s of raw weights, one thread)\n")
    print(f"| learning rate | changed | {' | '.join(names)} |")
    print("|---" * (2 + len(names)) + "|")
    for rate in RATES:
        changed, rows = measure(rate, args.elements, args.rounds)
        cells = [f"{ratio:.1f}x ({e:.2f} / {d:.2f})" for ratio, e, d in rows]
        print(f"| {rate:g} | {changed:.2%} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
