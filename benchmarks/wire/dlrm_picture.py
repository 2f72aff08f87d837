"""The results of `dlrm_training.py` as a table in docs/dlrm.md, and as curves in SVG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["draw", "write_table"]

_BEGIN, _END = "<!-- training: ", "<!-- training ends -->"


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
        arm, ranks, seed = name.split(" | ")
        if (ranks, seed) != ("2 ranks", "seed 0"):
            continue
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


def write_table(found: Mapping[str, Any], page: Path) -> None:
    """Puts the results in the place that the page keeps for them.

    Args:
        found: the content of benchmarks/results/dlrm.json.
        page: docs/dlrm.md.
    """
    text = page.read_text()
    begin = text.index("\n", text.index(_BEGIN)) + 1
    end = text.index(_END)
    page.write_text(text[:begin] + "\n" + _section(found["runs"]) + "\n" + text[end:])


def _section(runs: Mapping[str, Mapping[str, Any]]) -> str:
    settings = next(iter(runs.values()))["settings"]
    lines = [
        f"A DLRM with the 26 tables of Criteo Kaggle, at most {settings['cap']:,} rows of "
        f"{settings['dim']} in each, ids by Zipf's law, labels of a teacher: "
        f"{settings['steps']:,} steps of {settings['batch']:,} samples; kB are what a rank sends. "
        "Runs of one seed begin with the same weights, and all see the same batches once. In the "
        "last third the learning rates fall to zero. AUC is that of 98,304 samples that no run "
        "saw. Some hundredths of a percent are chance, up or down. `bounded` has the default "
        "bounds, `bounded as the paper` the paper's both ways, `forward only` the paper's for rows "
        "alone.",
        "",
        "| embeddings travel | ranks, seed | AUC | from fp32, % | kB a step | times fewer |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for name, run in runs.items():
        arm, ranks, seed = name.split(" | ")
        exact = runs.get(f"fp32 | {ranks} | {seed}") or runs.get(f"fp32 | 2 ranks | {seed}")
        off = "" if exact is None else f"{100 * (run['auc'] / exact['auc'] - 1):+.3f}"
        sent = run["nbytes_per_step"]
        # With more ranks, more rows come from others.
        is_alike = f"fp32 | {ranks} | {seed}" in runs
        fewer = f"{exact['nbytes_per_step'] / sent:.1f}" if exact and is_alike else ""
        cells = [f"{ranks}, {seed}", f"{run['auc']:.5f}", off, f"{sent / 1e3:.0f}", fewer]
        lines.append("| " + " | ".join([arm, *cells]) + " |")
    return "\n".join([*lines, "", "![Loss and accuracy of each way](dlrm_training.svg)", ""])


def _smoothed(curve: list[list[float]], width: int = 10) -> list[tuple[float, float]]:
    windows = [curve[i : i + width] for i in range(max(1, len(curve) - width))]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in windows]
