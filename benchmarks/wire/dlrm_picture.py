"""Draws the curves of `dlrm_training.py` as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["draw"]


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Loss against steps, and for each arm its AUC and the bytes of a step.

    Args:
        found: the content of benchmarks/results/dlrm.json.
        path: of the picture.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "packhorse"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, run in found["runs"].items():
        arm = name.partition(" | ")[0]
        steps, losses = zip(*_smoothed(run["loss_curve"]), strict=True)
        left.plot(steps, losses, label=arm, linewidth=1)
        right.plot(run["nbytes_per_step"] / 1e3, run["auc"], "o")
        right.annotate(arm, (run["nbytes_per_step"] / 1e3, run["auc"]), fontsize=7,
                       xytext=(3, 3), textcoords="offset points")  # fmt: skip
    left.set(xlabel="step", ylabel="training loss")
    left.legend(fontsize=7)
    right.set(xlabel="kB a rank sends in a step", ylabel="AUC on unseen samples", xscale="log")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _smoothed(curve: list[list[float]], width: int = 10) -> list[tuple[float, float]]:
    windows = [curve[i : i + width] for i in range(max(1, len(curve) - width))]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in windows]
