"""Draw what `posterior.py` has measured: reliability, and likelihood against shift.

The colours are middle tones on a transparent background, readable on white and on black. Text
stays text, and the same figures give the same file.
"""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

__all__ = ["draw"]

GREY = "#76808c"
COLOURS = {
    "sgd": "#a87b22", "swa": "#8b949e", "swag20": "#4a7fc1", "thinned": "#14917f", "all": "#b0517f"
}  # fmt: skip
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "packhorse", "font.family": "sans-serif",
    "text.color": GREY, "axes.labelcolor": GREY, "axes.edgecolor": GREY, "axes.titlecolor": GREY,
    "xtick.color": GREY, "ytick.color": GREY, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "font.size": 11,
}  # fmt: skip
RELIABILITY = ("as it is", "rotated 30°", "noise 0.3")
MIN_COUNT = 50  # images in a bin, of all seeds, that is drawn


def draw(result: dict[str, Any], folder: Path) -> None:
    """Write posterior_reliability.svg and posterior_shift.svg.

    Args:
        result: what `posterior.py --json` writes.
        folder: where.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(10, 4.1), sharey=True)
        for axis, shift in zip(axes, RELIABILITY, strict=True):
            _reliability(axis, result, shift)
        axes[0].set_ylabel("share that is right")
        _save(figure, result, folder / "posterior_reliability.svg")

        figure, axes = plt.subplots(1, 2, figsize=(10, 4.1))
        for axis, word, label in zip(
            axes, ("rotated ", "noise "), ("rotation in degrees", "noise, standard deviation"),
            strict=True,
        ):  # fmt: skip
            _shifts(axis, result, word)
            axis.set_xlabel(label)
        axes[0].set_ylabel("negative log likelihood")
        _save(figure, result, folder / "posterior_shift.svg")


def _reliability(axis: Axes, result: dict[str, Any], shift: str) -> None:
    """How often predictions of each confidence are right."""
    axis.plot([0, 1], [0, 1], color=GREY, lw=1, ls=":")
    for method, colour in COLOURS.items():
        bins = np.array([seed["methods"][method][shift]["bins"] for seed in result["seeds"]])
        counts = bins[..., 0].sum(0)
        drawn = counts >= MIN_COUNT
        right, confidence = (
            (bins[..., 0] * bins[..., i]).sum(0)[drawn] / counts[drawn] for i in (1, 2)
        )
        axis.plot(confidence, right, color=colour, marker="o", ms=3, lw=1.5)
    axis.set(title=shift, xlabel="confidence", xlim=(0.2, 1.02), ylim=(0, 1.02))


def _shifts(axis: Axes, result: dict[str, Any], word: str) -> None:
    """Likelihood against the strength of a shift; the mean of the seeds."""
    seeds = [seed["methods"] for seed in result["seeds"]]
    names = [name for name in seeds[0]["sgd"] if name.startswith(word)]
    strengths = [0.0] + [float(name.removeprefix(word).rstrip("°")) for name in names]
    for method, colour in COLOURS.items():
        values = [[seed[method][name]["nll"] for name in ["as it is", *names]] for seed in seeds]
        axis.plot(strengths, np.mean(values, axis=0), color=colour, marker="o", ms=3, lw=1.5)
    axis.set_ylim(bottom=0)


def _save(figure: Any, result: dict[str, Any], path: Path) -> None:
    lines = [plt.Line2D([], [], color=colour, lw=2) for colour in COLOURS.values()]
    names = [result["names"][method] for method in COLOURS]
    figure.legend(lines, names, loc="lower center", ncol=3, fontsize=10)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    # matplotlib ends lines with blanks
    path.write_text("".join(line.rstrip() + "\n" for line in path.read_text().splitlines()))
