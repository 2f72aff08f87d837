"""Time differences and chains of them in the C++ core alone: `python benchmarks/deltas.py`.

A small program around the headers of `csrc/` (snapshots/deltas.cpp) is compiled with the flags of
CMakeLists.txt and run on states of the study's first training run (`make study`), in which AdamW
has fp32 masters. The states at all anchors that have an older one are joined. One thread, pinned to
a core; processor time, the best of all rounds; every result is compared before it is timed.

- **Pairs**: a state as differences from one that is 1, 8 or 128 steps older. Hashes of both
  tensors are counted when encoding, that of the base when decoding. zipnn, if it is installed,
  takes turns with our program; it hashes nothing.
- **Chains**: a full frame and up to eight links. A dense chain goes from one state to the next and
  back, again and again. In a sparse one, each link changes other places, half a percent of them
  all. Times are in decodes of the full frame. *alone* decodes each link from its base, *rANS* no
  more than the tokens: no chain can be faster than the full frame and that. *bytes* is what is
  decoded, in full frames.

To compare variants of the code, run the command in two checkouts, in turn.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.codecs.measure import cores
from benchmarks.codecs.peers import Setup
from benchmarks.common import machine
from benchmarks.common.process import find_compiler
from benchmarks.core import Isa, Level, best_isa, build
from benchmarks.data import sets
from benchmarks.snapshots.delta_peers import ZipnnDeltaCodec
from benchmarks.snapshots.pairs import Pair
from benchmarks.study.runs import ANCHORS, RUNS
from benchmarks.study.states import States

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "benchmarks" / "snapshots" / "deltas.cpp"
PROGRAM = ROOT / "build" / "benchmarks" / "deltas"
PARTS = {"bf16": "weights", "fp32": "masters"}
GAPS = (1, 8, 128)
N_LINKS = 8
CHANGED_SHARE = 0.005  # by each link of a sparse chain
ROUNDS = 7
Array = NDArray[Any]


class Found(NamedTuple):
    """What the program found.

    Attributes:
        packed: bytes of the full frame and of each link.
        seconds: of the processor, the best of all rounds, by operation.
    """

    packed: list[int]
    seconds: dict[str, float]


def main(argv: list[str]) -> int:
    """Compile the program if needed, run it, print what it measured.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status: 1 if there is no compiler or no training run, or if a result is wrong.
    """
    args = _parse(argv)
    compiler = find_compiler()
    if compiler is None:
        print("a C++ compiler is missing: install g++ or clang++, or name one in CXX")
        return 1
    isa = Isa[args.isa.upper()] if args.isa else best_isa()
    try:
        program = build(compiler, PROGRAM, source=SOURCE)
        states = States(RUNS[0], args.out / RUNS[0].name)
        print(f"{machine.describe()['cpu']}, {isa.name.lower()}, {args.rounds} rounds")
        with cores(1):
            print(table_of_pairs(program, states, isa, args.rounds))
            print(table_of_chains(program, states, isa, args.rounds))
    except (OSError, subprocess.CalledProcessError) as problem:
        print(f"error: {getattr(problem, 'stderr', None) or problem}", file=sys.stderr)
        return 1
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    folder = ROOT / "build" / "study"
    parser.add_argument("--out", type=Path, metavar="DIR", default=folder, help="where runs are")
    parser.add_argument("--isa", choices=[isa.name.lower() for isa in Isa], help="default: best")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N")
    return parser.parse_args(argv)


def joined(states: States, part: str, gap: int, back: int) -> Array:
    """The states `back` steps before all anchors that have one `gap` steps older, as one array."""
    anchors = [anchor for anchor in ANCHORS if gap < anchor]
    tensors = [states.tensors(anchor - back, part) for anchor in anchors]
    return np.concatenate([t.reshape(-1) for each in tensors for t in each.values()])


def measure(program: Path, chain: Sequence[Array], isa: Isa, rounds: int) -> Found:
    """Run the program on a full frame and its links.

    Args:
        program: the result of `build`.
        chain: floats; each array but the first is packed as differences from the one before.
        isa: the code path.
        rounds: how often each operation is timed.

    Raises:
        subprocess.CalledProcessError: a result is wrong; `stderr` says which.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(i) for i in range(len(chain))]
        for path, array in zip(paths, chain, strict=True):
            array.tofile(path)
        numbers = (chain[0].itemsize, int(Level.DEFAULT), int(isa), rounds)
        command = [str(program), *map(str, (*numbers, *paths))]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    (_, *packed), *lines = map(str.split, done.stdout.splitlines())
    return Found(list(map(int, packed)), {name: min(map(float, s)) for name, *s in lines})


def table_of_pairs(program: Path, states: States, isa: Isa, rounds: int) -> str:
    """A table of pairs of states, with zipnn beside us.

    Args:
        program: the result of `build`.
        states: of the training run.
        isa: the code path.
        rounds: how often everything is timed.
    """
    lines = [
        "\nGB/s to encode / decode:\n",
        "| pair | ratio | encode / decode | zipnn's ratio | zipnn |",
        "|---|--:|--:|--:|--:|",
    ]
    for dtype, part in PARTS.items():
        for gap in GAPS:
            old, new = (joined(states, part, gap, back) for back in (gap, 0))
            found, theirs = _beside_zipnn(program, old, new, isa, rounds)
            seconds = [found.seconds[name] for name in ("encode", "decode")]
            cells = [_ratio(new, found.packed[1]), _speeds(new, seconds)]
            if theirs is not None:
                cells += [_ratio(new, theirs[0]), _speeds(new, theirs[1:])]
            lines.append(f"| {dtype}, {gap} step{'s'[: gap > 1]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(array: Array, packed_nbytes: float) -> str:
    return f"{array.nbytes / packed_nbytes:.3f}"


def _speeds(array: Array, seconds: Sequence[float]) -> str:
    return " / ".join(f"{array.nbytes / s / 1e9:.2f}" for s in seconds)


def _beside_zipnn(
    program: Path, old: Array, new: Array, isa: Isa, rounds: int
) -> tuple[Found, Sequence[float] | None]:
    """What we take, and what zipnn takes: bytes, seconds to encode and to decode."""
    codec = None
    if find_spec("zipnn") is not None:
        pair = Pair("", "", new, "", "", (), old, "")
        codec = ZipnnDeltaCodec(pair, Setup())
        source = codec.prepare(pair)
    best: list[Any] = []
    theirs: list[tuple[float, ...]] = []
    for _ in range(rounds):
        best.append(measure(program, [old, new], isa, 1))
        if codec is not None:
            begun = time.process_time()
            packed = codec.encode(source)
            middle = time.process_time()
            codec.decode(packed)
            theirs.append((len(packed), middle - begun, time.process_time() - middle))
    seconds = {key: min(f.seconds[key] for f in best) for key in best[0].seconds}
    return Found(best[0].packed, seconds), [min(c) for c in zip(*theirs, strict=True)] or None


def table_of_chains(program: Path, states: States, isa: Isa, rounds: int) -> str:
    """A table of chains of up to eight links, dense and sparse.

    Args:
        program: the result of `build`.
        states: of the training run.
        isa: the code path.
        rounds: how often everything is timed.
    """
    lines = [
        "\nRestoring a chain, in decodes of its full frame:\n",
        "| chain | full, GB/s | | " + " | ".join(str(k) for k in range(1, N_LINKS + 1)) + " |",
        "|---|--:|---" + "|--:" * N_LINKS + "|",
    ]
    for dtype, part in PARTS.items():
        pair = [joined(states, part, 1, back) for back in (1, 0)]
        chains = {"dense": [pair[i % 2] for i in range(N_LINKS + 1)]}
        if dtype == "bf16":
            chains["sparse"] = sparse_chain(*pair, N_LINKS)
        for kind, chain in chains.items():
            found = measure(program, chain, isa, rounds)
            title = f"{dtype}, {kind} | {chain[0].nbytes / found.seconds['full'] / 1e9:.2f}"
            for row in rows_of_chain(found):
                lines.append(f"| {title} | {row} |")
                title = " | "
    return "\n".join(lines)


def sparse_chain(old: Array, new: Array, n_links: int) -> list[Array]:
    """States of which each differs from the one before in few places, as two given states do.

    Args:
        old: the first state.
        new: a state like it.
        n_links: how many states follow the first.
    """
    units = [state.view(f"u{state.itemsize}") for state in (old, new)]
    changed = np.flatnonzero(units[0] != units[1])
    random, state = np.random.default_rng(sets.SEED), units[0]
    chain = [old]
    for _ in range(n_links):
        places = random.choice(changed, round(CHANGED_SHARE * state.size), replace=False)
        state = state.copy()
        state[places] = np.where(
            state[places] == units[0][places], units[1][places], units[0][places]
        )
        chain.append(state.view(old.dtype))
    return chain


def rows_of_chain(found: Found) -> list[str]:
    """The cells of each kind of time, for chains of one link and more.

    Args:
        found: of the longest chain.
    """
    full, n_links = found.seconds["full"], len(found.packed) - 1
    rows = []
    for name in ("chain", "alone", "rans"):
        extra = 0 if name == "chain" else full
        cells = [(extra + found.seconds[f"{name}-{k}"]) / full for k in range(1, n_links + 1)]
        title = {"chain": "**range by range**", "alone": "link by link"}.get(name, "rANS alone")
        rows.append(f"{title} | {' | '.join(f'{cell:.1f}' for cell in cells)}")
    sums = np.cumsum(found.packed)[1:] / found.packed[0]
    return [*rows, f"bytes | {' | '.join(f'{cell:.1f}' for cell in sums)}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
