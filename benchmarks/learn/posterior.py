"""What a posterior gains on Fashion-MNIST: `python benchmarks/learn/posterior.py [--json FILE]`.

The network is the largest of "Non-Volatile Memory Accelerated Posterior Estimation" (arXiv
2202.10522): 784-1000-1000-1000-10, 2,797,010 parameters, batches of 100. That paper stores every
iterate and gives no figure of what it gains. Here, for each seed:

- SGD with momentum trains for some epochs at a high rate. From there two runs go on as long.
- One lowers the rate to zero: plain SGD.
- The other keeps the rate, and its iterates are collected: one an epoch (SWAG-20, and their mean
  alone, SWA), every 30th, and every iterate of the last two epochs.

All predict the test images, and test images that are rotated or have noise added, which no run has
seen. Accuracy, negative log likelihood and expected calibration error are printed, and kept with
`--json`; `--pictures` draws them. `make data` gets the images. The shelf takes some 15 GB in
`--folder` while the command runs.
"""

import argparse
import copy
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import machine
from benchmarks.data import fashion_mnist
from benchmarks.learn.posterior_pictures import draw
from packhorse.disk import Shelf
from packhorse.learn import SWAG

__all__ = ["main"]

WIDTHS = (784, 1000, 1000, 1000, 10)
BATCH = 100
MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4
HIGH_RATE, SWAG_RATE = 0.05, 0.02
ROTATIONS = (15, 30, 45, 60)  # degrees
NOISES = (0.1, 0.2, 0.3, 0.5)  # standard deviation; pixels are 0 to 1
N_SHIFTED = 2500  # test images of each shift
N_BINS = 15
THINNED = 30
TABLE_SHIFTS = ("rotated 30°", "noise 0.3", "noise 0.5")
LAST_EPOCHS = 2  # whose iterates are all collected
NAMES = {
    "sgd": "SGD",
    "swa": "SWA: the mean of 20",
    "swag20": "SWAG, one iterate an epoch: 20",
    "thinned": "SWAG, every 30th iterate: 400",
    "all": "SWAG, every iterate of 2 epochs: 1,200",
}

Metrics = dict[str, Any]


@dataclass(frozen=True)
class Data:
    """Images as floats, and labels.

    Attributes:
        x: training images.
        y: their labels.
        tests: test images of each shift, and their labels; the first are as they are.
    """

    x: Tensor
    y: Tensor
    tests: dict[str, tuple[Tensor, Tensor]]


def load_data(n_train: int | None = None) -> Data:
    """Fashion-MNIST, with shifted test images."""
    parts = [fashion_mnist.load(name) for name in ("train", "t10k")]
    x, test = (torch.tensor(part.images).float() / 255 for part in parts)
    y, labels = (torch.tensor(part.labels).long() for part in parts)
    tests = {"as it is": (test, labels)}
    some, some_labels = test[:N_SHIFTED], labels[:N_SHIFTED]
    tests |= {f"rotated {angle}°": (rotated(some, angle), some_labels) for angle in ROTATIONS}
    generator = torch.Generator().manual_seed(0)
    for sigma in NOISES:
        noise = torch.randn(some.shape, generator=generator) * sigma
        tests[f"noise {sigma}"] = ((some + noise).clamp(0, 1), some_labels)
    return Data(x[:n_train], y[:n_train], tests)


def rotated(images: Tensor, degrees: float) -> Tensor:
    """Images turned around their middle."""
    angle = torch.tensor(np.radians(degrees))
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
    theta = torch.cat([turn, torch.zeros(2, 1)], dim=1).float().expand(len(images), 2, 3)
    grid = nn.functional.affine_grid(theta, [len(images), 1, 28, 28], align_corners=False)
    square = images.view(-1, 1, 28, 28)
    return nn.functional.grid_sample(square, grid, align_corners=False).view(len(images), -1)


def network() -> nn.Sequential:
    """The network of the paper that has 2,797,010 parameters."""
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Data,
    epochs: range,
    rate: Callable[[float], float],
    after_step: Callable[[int], object] = lambda step: None,
) -> list[float]:
    """Train for some epochs, with a rate for each fraction of them. Returns the seconds of each."""
    per_epoch = len(data.x) // BATCH
    seconds = []
    for epoch in epochs:
        start = time.perf_counter()
        order = torch.randperm(len(data.x))
        for i in range(per_epoch):
            done = ((epoch - epochs.start) * per_epoch + i) / (len(epochs) * per_epoch)
            for group in optimizer.param_groups:
                group["lr"] = rate(done)
            batch = order[i * BATCH : (i + 1) * BATCH]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.x[batch]), data.y[batch]).backward()
            optimizer.step()
            after_step(epoch * per_epoch + i + 1)
        seconds.append(time.perf_counter() - start)
    return seconds


class Run:
    """The runs of one seed."""

    def __init__(self, seed: int, data: Data, options: argparse.Namespace, shelf: Shelf) -> None:
        self.data = data
        self.options = options
        self.shelf = shelf
        self.seed = seed
        self.figures: dict[str, Any] = {}
        torch.manual_seed(seed)
        self.model = network()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), HIGH_RATE, MOMENTUM, weight_decay=WEIGHT_DECAY
        )

    def methods(self) -> Iterator[tuple[str, dict[str, Metrics]]]:
        """Train, and yield what each method predicts."""
        start, epochs = self.options.start, self.options.epochs
        per_epoch = len(self.data.x) // BATCH
        train(self.model, self.optimizer, self.data, range(start), self._falling)
        kept = copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])
        span = range(start, start + epochs)
        quiet = train(
            self.model, self.optimizer, self.data, span, lambda done: SWAG_RATE * (1 - done)
        )
        yield "sgd", self._measured(lambda loader: predicted(self.model, loader))

        self.model.load_state_dict(kept[0])
        self.optimizer.load_state_dict(kept[1])
        first_of_all = (span.stop - LAST_EPOCHS) * per_epoch
        with (
            SWAG(self.model, self.shelf, name="swag20", every=per_epoch) as swag20,
            SWAG(self.model, self.shelf, name="thinned", every=THINNED) as thinned,
            SWAG(self.model, self.shelf, name="all") as every,
        ):

            def collect(step: int) -> None:
                swag20.collect(step)
                thinned.collect(step)
                if step > first_of_all:
                    every.collect(step)

            some = range(start, span.stop - LAST_EPOCHS)
            parts = (self.model, self.optimizer, self.data)
            busy = train(*parts, some, lambda done: SWAG_RATE, collect)
            threads = torch.get_num_threads()
            torch.set_num_threads(max(1, threads - 1))  # one core is left to the thread that packs
            last = train(*parts, range(some.stop, span.stop), lambda done: SWAG_RATE, collect)
            torch.set_num_threads(threads)
            self._keep_costs(quiet, busy, last)
            posteriors = {"swag20": swag20, "thinned": thinned, "all": every}
            for posterior in posteriors.values():
                posterior.flush()
            yield "swa", self._measured(lambda loader: swag20.predict(loader, 1, scale=0))
            for name, posterior in posteriors.items():
                yield name, self._measured(partial(self._sampled, posterior))
                self._keep_rows(name)

    @staticmethod
    def _falling(done: float) -> float:
        """The rate at first: high for half of the time, then down to that of SWAG."""
        return HIGH_RATE + (SWAG_RATE - HIGH_RATE) * max(0.0, 2 * done - 1)

    def _sampled(self, posterior: SWAG, batches: list[Tensor]) -> Tensor:
        options = self.options
        return posterior.predict(batches, options.samples, seed=self.seed, scale=options.scale)

    def _measured(self, predict: Callable[[list[Tensor]], Tensor]) -> dict[str, Metrics]:
        tests = self.data.tests
        start = time.perf_counter()
        batches = [part for x, _ in tests.values() for part in x.split(500)]
        probabilities = predict(batches)
        seconds = time.perf_counter() - start
        parts = probabilities.split([len(x) for x, _ in tests.values()])
        labels = [y for _, y in tests.values()]
        found = dict(zip(tests, map(metrics, parts, labels), strict=True))
        found["as it is"]["seconds"] = round(seconds, 1)
        return found

    def _keep_costs(self, *seconds: Sequence[float]) -> None:
        names = ("no iterate", "some iterates", "every iterate")
        medians = [round(float(np.median(epochs)), 2) for epochs in seconds]
        self.figures["epoch_s"] = dict(zip(names, medians, strict=True))

    def _keep_rows(self, name: str) -> None:
        rows = self.shelf[f"{name}/rows"]
        self.figures[name] = {
            "rows": len(rows), "nbytes": rows.nbytes, "packed_nbytes": rows.packed_nbytes
        }  # fmt: skip


@torch.no_grad()
def predicted(model: nn.Module, batches: Sequence[Tensor]) -> Tensor:
    """What one network predicts."""
    return torch.cat([model(batch).softmax(-1) for batch in batches])


def metrics(probabilities: Tensor, labels: Tensor) -> Metrics:
    """Accuracy, negative log likelihood, expected calibration error, and what that is made of.

    Args:
        probabilities: a row for each image.
        labels: what is right.
    """
    confidence, guess = probabilities.double().max(dim=-1)
    right = (guess == labels).double()
    chosen = probabilities.double().gather(1, labels[:, None])
    bins = (confidence * N_BINS).long().clamp(max=N_BINS - 1)
    counts, n_right, summed = (
        torch.zeros(N_BINS, dtype=torch.float64).index_add_(0, bins, values)
        for values in (torch.ones_like(right), right, confidence)
    )
    return {
        "accuracy": round(right.mean().item(), 4),
        "nll": round(-chosen.clamp(min=1e-12).log().mean().item(), 4),
        "ece": round((n_right - summed).abs().sum().item() / len(labels), 4),
        "bins": [
            [int(n), round(float(r / n), 4), round(float(c / n), 4)] if n else [0, 0.0, 0.0]
            for n, r, c in zip(counts, n_right, summed, strict=True)
        ],
    }


def main() -> None:
    """Train, measure, print."""
    options = parse()
    data = load_data(options.n_train)
    print(f"{sum(p.numel() for p in network().parameters()):,} parameters", flush=True)
    result: dict[str, Any] = {
        "kind": "posterior",
        "seeds": [],
        "machine": machine.describe(),
        "names": NAMES,
    }
    result["settings"] = {
        "start_epochs": options.start, "epochs": options.epochs, "samples": options.samples,
        "batch": BATCH, "high_rate": HIGH_RATE, "swag_rate": SWAG_RATE, "momentum": MOMENTUM,
        "weight_decay": WEIGHT_DECAY, "n_shifted": N_SHIFTED, "scale": options.scale,
    }  # fmt: skip
    for seed in options.seeds:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            with Shelf(folder / "posterior.shelf") as shelf:
                run = Run(seed, data, options, shelf)
                found = {}
                for name, measured in run.methods():
                    found[name] = measured
                    show(NAMES[name], measured)
                result["seeds"].append({"seed": seed, "methods": found, "figures": run.figures})
                print(json.dumps(run.figures), flush=True)
        finally:
            shutil.rmtree(folder)
        if options.json:
            options.json.write_text(json.dumps(result, ensure_ascii=False) + "\n")
    print(table(result))
    if options.pictures:
        draw(result, options.pictures)


def table(result: dict[str, Any]) -> str:
    """The table of docs/posterior.md: means of the seeds.

    Args:
        result: what `--json` writes.
    """
    lines = [
        "| | accuracy | likelihood | calibration | "
        + " | ".join(f"likelihood, calibration: {shift}" for shift in TABLE_SHIFTS)
        + " |",
        "|---|---|---|---|" + "---|" * len(TABLE_SHIFTS),
    ]
    for method, name in result["names"].items():
        found = [seed["methods"][method] for seed in result["seeds"]]

        def mean(shift: str, key: str, found: list[Any] = found) -> float:
            return float(np.mean([measured[shift][key] for measured in found]))

        cells = [name, f"{mean('as it is', 'accuracy'):.2%}"]
        cells += [f"{mean('as it is', key):.3f}" for key in ("nll", "ece")]
        cells += [f"{mean(shift, 'nll'):.2f}, {mean(shift, 'ece'):.2f}" for shift in TABLE_SHIFTS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def show(name: str, measured: dict[str, Metrics]) -> None:
    """Print the figures of a method."""
    print(f"{name}: {measured['as it is'].get('seconds')} s to predict")
    for shift, m in measured.items():
        words = f"{m['accuracy']:.2%}  nll {m['nll']:.4f}  ece {m['ece']:.4f}"
        print(f"  {shift:12} {words}", flush=True)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures")
    parser.add_argument("--folder", type=Path, help="where the shelf lies meanwhile")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--start", type=int, default=6, help="epochs before iterates count")
    parser.add_argument("--epochs", type=int, default=20, help="epochs after that")
    parser.add_argument("--samples", type=int, default=30, help="networks of each posterior")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the covariance")
    parser.add_argument("--n-train", type=int, help="use only some of the training images")
    return parser.parse_args()


if __name__ == "__main__":
    main()
