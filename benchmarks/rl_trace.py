"""A real reinforcement learning run as benchmark data: `python benchmarks/rl_trace.py`.

A small language model first learns the sources of Python's standard library. Then it is fine-tuned
by a policy gradient (GRPO) to write the word "return", once for each learning rate, and the bf16
weights after every step are kept: the updates that a trainer sends to the workers that sample. The
states are in snapshot stores, which `benchmarks/data/rl_trace.py` reads; a summary is written to
`results/rl_trace.json`.

A run that was stopped goes on where it was when the same command is given again, with the same
bits. Everything runs on one thread. On a machine with more cores, commands with different `--lr`
can run beside each other, once the first part is done. Machines round sums in different orders, so
no hash is pinned: each state has its own in the store.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import machine
from benchmarks.data import rl_trace, sets
from benchmarks.data.rl_masters import checkpoint_record
from benchmarks.data.rl_pretraining import CHECKPOINT, Corpus, Pretraining, pretrain
from benchmarks.data.rl_tuning import Tuning, tune

__all__ = ["main", "summary", "table"]

RATES = (1e-6, 3e-6, 1e-5, 3e-5)
STEPS = 200
TRIAL_STEPS = 3  # of each kind, which a dry run times
RESULTS = Path(__file__).parent / "results" / "rl_trace.json"
ENDS = 20  # steps at each end whose mean reward is reported
# Bytes of a state in the store, as a share of its bf16 bytes, and a store's full states.
PACKED = {1e-6: 0.005, 3e-6: 0.01, 1e-5: 0.022, 3e-5: 0.045}
PACKED_FULL = 0.66


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status.
    """
    args = _parser().parse_args(argv)
    folder = args.out or rl_trace.folder()
    rates = args.lr or list(RATES)
    try:
        if args.dry_run:
            _dry_run(rates, args.steps)
            return 0
        if not args.table:
            _make(folder, rates, args.steps)
        _report(folder, args.results, ["rl_trace.py", *argv])
    except (OSError, ValueError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Fine-tune a small language model by a policy gradient, and keep its weights "
        "after every step as benchmark data. The same command goes on with a run that was stopped."
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where the trace goes (default: build/rl_trace)"
    )
    parser.add_argument(
        "--lr",
        type=float,
        nargs="+",
        metavar="RATE",
        help=f"learning rates (default: {' '.join(map(_short, RATES))})",
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help="steps a rate (default: %(default)s)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FILE",
        help="where the summary goes (default: benchmarks/results/rl_trace.json)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only say how long it takes and how much it writes"
    )
    parser.add_argument(
        "--table", action="store_true", help="only write the summary of what is there"
    )
    return parser


def _corpus(vocabulary: int) -> Corpus:
    return Corpus([text.encode() for text in sets.library_sources()], vocabulary)


def _make(folder: Path, rates: list[float], n_steps: int) -> None:
    """Do all that is missing of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Pretraining()
    corpus = _corpus(recipe.shape.vocabulary)
    progress = _Progress("pre-training", recipe.steps)
    weights = pretrain(
        recipe, corpus, folder, lambda step, loss: progress(step, f"loss {loss:.2f}")
    )
    for rate in rates:
        tune(
            Tuning(),
            rate,
            n_steps,
            folder,
            corpus=corpus,
            shape=recipe.shape,
            weights=weights,
            on_step=_Told(_Progress(f"lr {_short(rate)}", n_steps)),
        )


def _dry_run(rates: list[float], n_steps: int) -> None:
    """Do a few steps of each kind in a folder that is removed, and say what the whole run needs."""
    recipe, times = Pretraining(steps=TRIAL_STEPS), list[float]()
    corpus = _corpus(recipe.shape.vocabulary)
    with tempfile.TemporaryDirectory() as name:
        weights = pretrain(
            recipe, corpus, Path(name), lambda step, loss: times.append(time.process_time())
        )
        tune(
            *(Tuning(), rates[0], TRIAL_STEPS, Path(name)),
            corpus=corpus,
            shape=recipe.shape,
            weights=weights,
            on_step=lambda record: times.append(time.process_time()),
        )
    # What comes before the first step of each kind does not grow with their number.
    trials = times[:TRIAL_STEPS], times[TRIAL_STEPS:]
    learning, tuning = ((trial[-1] - trial[0]) / (TRIAL_STEPS - 1) for trial in trials)
    numel = sum(weight.numel() for weight in weights.values())
    minutes = [Pretraining().steps * learning / 60, n_steps * tuning / 60]
    full = n_steps / (rl_trace.MAX_CHAIN + 1) * PACKED_FULL
    gigabytes = [2e-9 * numel * (n_steps * _packed(rate) + full) for rate in rates]
    checkpoints = 12e-9 * numel * (1 + len(rates))
    print(f"{numel / 1e6:.1f} million parameters: {2e-6 * numel:.1f} MB a state of bf16")
    print(f"pre-training: {minutes[0]:.0f} min of one core, once")
    print(f"tuning: {minutes[1]:.0f} min of one core for each of {len(rates)} rates")
    print(f"disk: about {sum(gigabytes):.1f} GB of states, {checkpoints:.1f} GB of checkpoints")


def _packed(rate: float) -> float:
    """About how much of a state's bytes its difference takes."""
    return next((share for known, share in PACKED.items() if rate <= known), PACKED_FULL)


class _Progress:
    """A line for each step that is a multiple of ten, with the time left."""

    def __init__(self, what: str, n_steps: int) -> None:
        self._what, self._n_steps = what, n_steps
        self._begun = time.perf_counter()
        self._n_done = 0

    def __call__(self, step: int, told: str) -> None:
        self._n_done += 1
        if step % 10 and step != self._n_steps:
            return
        spent = time.perf_counter() - self._begun
        left = spent / self._n_done * (self._n_steps - step) / 60
        line = f"{self._what}: step {step} of {self._n_steps}, {told}, {left:.1f} min left"
        print(line, flush=True)


class _Told:
    """Turns the records of a run into lines: means over the steps since the last line."""

    def __init__(self, progress: _Progress) -> None:
        self._progress = progress
        self._recent: list[dict[str, Any]] = []

    def __call__(self, record: dict[str, Any]) -> None:
        self._recent = [*self._recent[-9:], record]
        reward, changed = (_mean(self._recent, key) for key in ("reward", "changed"))
        self._progress(record["step"], f"reward {reward:.2f}, {changed:.2%} changed")


def _mean(records: list[dict[str, Any]], key: str) -> float:
    return float(sum(record[key] for record in records) / len(records))


def _report(folder: Path, results: Path, command: list[str]) -> None:
    """Write the summary and print the table."""
    found = {rate: rl_trace.records(folder, rate) for rate in rl_trace.rates(folder)}
    if not found:
        raise FileNotFoundError(f"there is no trace in {folder}; make it with `make rl-trace`")
    rows = [summary(rate, records) for rate, records in found.items()]
    document = {
        "kind": "rl_trace",
        "date": datetime.date.today().isoformat(),
        "command": " ".join(command),
        "machine": machine.describe(),
        "versions": _versions(),
        "pretraining": asdict(Pretraining()),
        "tuning": asdict(Tuning()),
        "pretrained_loss": _pretrained_loss(folder),
        "rates": rows,
    }
    results.write_text(_dumped(document) + "\n")
    print(table(rows))
    print(f"the states are in {folder}, the summary is in {results}")


def summary(rate: float, records: list[dict[str, Any]]) -> dict[str, Any]:
    """What is known of one learning rate.

    Args:
        rate: the learning rate.
        records: of all steps; the first is the state before the first step.
    """
    done = records[1:]
    changed = [record["changed"] for record in done]
    ulps = [sum(column) for column in zip(*(record["ulps"] for record in done), strict=True)]
    ends = done[:ENDS], done[-ENDS:]
    return {
        "rate": rate,
        "n_steps": len(done),
        "changed": dict(zip(("mean", "min", "max"), _spread(changed), strict=True)),
        "ulp_shares": [round(n / max(sum(ulps), 1), 5) for n in ulps],
        "reward_first": round(_mean(ends[0], "reward"), 4) if done else None,
        "reward_last": round(_mean(ends[1], "reward"), 4) if done else None,
        "kl_first": next((r["kl_first"] for r in reversed(done) if "kl_first" in r), None),
        "kl_worker": _mean(done, "kl_worker") if done else None,
        "cpu_seconds": round(sum(record["cpu_seconds"] for record in done), 1),
        "first_sha256": records[0]["sha256"],
        "last_sha256": records[-1]["sha256"],
        "changed_of_steps": [round(share, 5) for share in changed],
        "reward_of_steps": [record["reward"] for record in done],
    }


def _spread(shares: list[float]) -> tuple[float, ...]:
    if not shares:
        return ()
    return tuple(round(x, 5) for x in (sum(shares) / len(shares), min(shares), max(shares)))


def table(rows: list[dict[str, Any]]) -> str:
    """The summaries as a table in Markdown.

    Args:
        rows: of `summary`.
    """
    lines = [
        "| lr | steps | changed: mean | min | max | of these 1 ulp | 2 ulp | 3 or more "
        f"| reward, first {ENDS} steps | last {ENDS} |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if not row["n_steps"]:
            continue
        shares = [f"{share:.2%}" for share in row["changed"].values()]
        ulps = [f"{share:.1%}" for share in row["ulp_shares"]]
        ends = [f"{row[key]:.2f}" for key in ("reward_first", "reward_last")]
        cells = [_short(row["rate"]), str(row["n_steps"]), *shares, *ulps, *ends]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _short(rate: float) -> str:
    """A learning rate as people write it: 1e-6."""
    return f"{rate:g}".replace("e-0", "e-")


def _pretrained_loss(folder: Path) -> float | None:
    """The mean loss of the last steps of the first part; None if only the states are there."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    losses = checkpoint_record(path)["losses"][-ENDS:]
    return round(sum(losses) / len(losses), 3)


def _versions() -> dict[str, str]:
    names = ("torch", "numpy", "packhorse")
    versions = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **versions}


def _dumped(document: dict[str, Any]) -> str:
    """JSON with one line for each list of numbers."""
    lists: list[list[Any]] = []

    def kept_apart(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept_apart(member) for key, member in value.items()}
        if isinstance(value, list | tuple) and not any(isinstance(x, dict) for x in value):
            lists.append(list(value))
            return f"@{len(lists) - 1}@"
        return [kept_apart(member) for member in value] if isinstance(value, list) else value

    text = json.dumps(kept_apart(document), indent=1)
    for i, members in enumerate(lists):
        text = text.replace(f'"@{i}@"', json.dumps(members))
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
