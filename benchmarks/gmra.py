"""Measure GMRA on Fashion-MNIST against PCA: `python benchmarks/gmra.py`, after `make data`.

- Speed: fit, transform and inverse of 70,000 images, on one thread.
- Places: a fit in memory and on a shelf, with and without a small budget of memory.
- Storage: the error of GMRA and of PCA with as many stored numbers, on the images that they were
  found from and on new ones. All stored numbers count: bases, centres, planes and coefficients.
- Neighbours: the accuracy of the five nearest neighbours in coefficients.

`--json` prints the figures as JSON. `--write` keeps them in `benchmarks/results/gmra.json`, draws
the pictures of `docs/gmra.md`, and writes its tables; `--render` only writes the tables again.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsClassifier
from threadpoolctl import threadpool_limits

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import machine
from benchmarks.data import fashion_mnist
from benchmarks.learn import gmra_places
from packhorse.learn import GMRA

Array = NDArray[Any]
HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "gmra.json"
DOCS = HERE.parent / "docs"
DOCUMENT = DOCS / "gmra.md"
MARKS = ("<!-- figures: python benchmarks/gmra.py --write -->", "<!-- end of figures -->")
ROUNDS = 3
SEED = 0
N_FITTED = 60_000  # images that dictionaries are found from, where new ones are needed
N_NEIGHBOURS, N_ASKED = 5, 2_000
# Directions, and the points of the largest cells that are not cut.
STORED = ((4, 1024), (8, 1024), (16, 2048), (32, 4096), (16, 128))
SHOWN = (6, 9_000, 23)  # images: shoe, dress and bag-like shapes of the training part
SHOWN_SCALES = (0, 2, 4, 6, 8, 10, 12)


def main(argv: list[str]) -> int:
    """Run what the command line asks for.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", action="store_true", help="keep figures, pictures and tables")
    parser.add_argument("--render", action="store_true", help="only write the tables again")
    args = parser.parse_args(argv)
    if not args.render:
        if not fashion_mnist.is_there():
            parser.error(f"{fashion_mnist.FOLDER} is missing; {fashion_mnist.HOW}")
        images, labels = fashion_mnist.load()
        figures = measure(images.astype(np.float32) / 255, labels)
        print(json.dumps(figures, indent=1) if args.json else tables(figures))
        if args.write:
            RESULT.write_text(json.dumps(figures, indent=1) + "\n")
            draw(images.astype(np.float32) / 255, figures)
    if args.render or args.write:
        kept = json.loads(RESULT.read_text())
        DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), kept))
    return 0


def measure(images: Array, labels: Array) -> dict[str, Any]:
    """All figures.

    Args:
        images: a row for each; the last ones are new to dictionaries.
        labels: their classes.

    Returns:
        What is kept as JSON.
    """
    with threadpool_limits(1, "blas"):
        return {
            "kind": "gmra",
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine.describe(),
            "versions": {"numpy": np.__version__, "scikit-learn": sklearn.__version__},
            "shape": images.shape,
            "speed": [speed(images, n) for n in (8, 16)],
            "places": gmra_places.measure(),
            "storage": storage(images),
            "neighbours": neighbours(images, labels),
        }


# Speed.


def speed(images: Array, n_components: int) -> dict[str, Any]:
    """Seconds of the three steps: all rounds, from the fastest."""
    gmra = GMRA(n_components, random_state=SEED)
    codes = gmra.fit_transform(images)
    return {
        "n_components": n_components,
        "cells": len(gmra.nodes_),
        "scales": gmra.n_scales_,
        "fit": seconds(lambda: gmra.fit(images)),
        "transform": seconds(lambda: gmra.transform(images)),
        "inverse": seconds(lambda: gmra.inverse_transform(codes)),
    }


def seconds(work: Callable[[], object]) -> list[float]:
    """Seconds of some rounds, from the fastest."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        found.append(round(time.perf_counter() - start, 3))
    return sorted(found)


# Storage.


def storage(images: Array) -> list[dict[str, Any]]:
    """Errors at equal storage."""
    known, new = images[:N_FITTED], images[N_FITTED:]
    pca = PCA(svd_solver="covariance_eigh").fit(known)
    return [stored(known, new, pca, *setting) for setting in STORED]


def stored(known: Array, new: Array, pca: PCA, n: int, leaf_size: int) -> dict[str, Any]:
    """Both codes of one GMRA, and PCA with at most as many numbers as each."""
    gmra = GMRA(n, leaf_size=leaf_size, random_state=SEED).fit(known)
    codes, nodes, width = gmra.transform(known), gmra.nodes_, known.shape[1]
    n_leaves = int(nodes.is_leaf.sum())
    planes = (len(nodes) - n_leaves) * (width + 1)
    leaf_bases = int(nodes.n_directions[nodes.is_leaf].sum()) * width + n_leaves * width
    short = planes + leaf_bases + len(known) * (n + 1)  # each point has the number of its cell
    long = planes + (codes.shape[1] + 1) * width + codes.nnz
    return {
        "n_components": n,
        "leaf_size": leaf_size,
        "cells": n_leaves,
        "error": error(known, gmra.decode(gmra.encode(known)), pca),
        "new_error": error(new, gmra.decode(gmra.encode(new)), pca),
        "leaf_numbers": short,
        "leaf_pca": of_pca(pca, known, new, short),
        "all_numbers": long,
        "all_pca": of_pca(pca, known, new, long),
    }


def of_pca(pca: PCA, known: Array, new: Array, numbers: int) -> dict[str, Any]:
    """The errors of PCA with so many stored numbers."""
    width = known.shape[1]
    n = min((numbers - width) // (width + len(known)), width)
    basis = pca.components_[:n]
    found = [(part - pca.mean_) @ basis.T @ basis + pca.mean_ for part in (known, new)]
    return {
        "n_components": n,
        "error": error(known, found[0], pca),
        "new_error": error(new, found[1], pca),
    }


def error(points: Array, found: Array, pca: PCA) -> float:
    """The squared error, as a share of the squared distance from the mean."""
    whole = ((points - pca.mean_).astype(np.float64) ** 2).sum()
    return round(float(((points - found).astype(np.float64) ** 2).sum() / whole), 5)


# Neighbours.


def neighbours(images: Array, labels: Array) -> list[dict[str, Any]]:
    """The accuracy of the nearest neighbours, and the seconds of asking."""
    known, new = images[:N_FITTED], images[N_FITTED : N_FITTED + N_ASKED]
    classes = labels[:N_FITTED], labels[N_FITTED : N_FITTED + N_ASKED]
    rows = [asked("the images themselves", 784, known, new, *classes)]
    pca = PCA(64, random_state=SEED).fit(known)
    for n in (16, 64):
        parts = (pca.transform(part)[:, :n] for part in (known, new))
        rows.append(asked(f"PCA, {n} directions", n, *parts, *classes))
    gmra = GMRA(16, random_state=SEED).fit(known)
    codes = gmra.transform(known), gmra.transform(new)
    for scale in (0, 2, 4, gmra.n_scales_ - 1):
        n_columns = int(np.searchsorted(gmra.column_scales_, scale, side="right"))
        some = [part[:, :n_columns] for part in codes]
        name = f"GMRA's transform, scales 0 to {scale}"
        rows.append(asked(name, round(some[0].nnz / len(known)), *some, *classes))
    rows.extend(asked_in_cells(gmra, scale, known, new, *classes) for scale in (2, 4, 6))
    return rows


def asked(
    name: str, n: int, known: Any, new: Any, classes: Array, new_classes: Array
) -> dict[str, Any]:
    """Neighbours among all images, by comparing with each."""
    model = KNeighborsClassifier(N_NEIGHBOURS, algorithm="brute").fit(known, classes)
    start = time.perf_counter()
    right = float((model.predict(new) == new_classes).mean())
    took = round(time.perf_counter() - start, 2)
    return {"of": name, "numbers": n, "accuracy": round(right, 4), "seconds": took}


def asked_in_cells(
    gmra: GMRA, scale: int, known: Array, new: Array, classes: Array, new_classes: Array
) -> dict[str, Any]:
    """Neighbours in the cell of the image at a scale alone, by the coefficients in that cell."""
    cells = [cells_at(gmra, gmra.apply(part), scale) for part in (known, new)]
    right, took, n = 0, 0.0, gmra.nodes_[0].basis.shape[0]
    for cell in np.unique(cells[1]):
        node, there = gmra.nodes_[cell], cells[0] == cell
        model = KNeighborsClassifier(N_NEIGHBOURS, algorithm="brute")
        model.fit((known[there] - node.centre) @ node.basis.T, classes[there])
        start = time.perf_counter()
        here = cells[1] == cell
        found = model.predict((new[here] - node.centre) @ node.basis.T)
        took += time.perf_counter() - start
        right += int((found == new_classes[here]).sum())
    name = f"GMRA, inside the cell of scale {scale}"
    accuracy = round(right / len(new), 4)
    return {"of": name, "numbers": n, "accuracy": accuracy, "seconds": round(took, 2)}


def cells_at(gmra: GMRA, leaves: Array, scale: int) -> Array:
    """The cells of a scale that leaves lie in; a leaf of a coarser scale stays."""
    cells = leaves.copy()
    while (finer := gmra.nodes_.scale[cells] > scale).any():
        cells[finer] = gmra.nodes_.parent[cells[finer]]
    return cells


# The page.


def tables(figures: dict[str, Any]) -> str:
    """The tables of the page.

    Args:
        figures: what is kept.

    Returns:
        Markdown.
    """
    rows = figures["shape"][0]
    speeds = "".join(
        f"| {r['n_components']} | {r['cells']:,} | {r['scales']} | {_median(r['fit'])} "
        f"| {_median(r['transform'])} | {_median(r['inverse'])} |\n"
        for r in figures["speed"]
    )
    stored_rows = "".join(
        f"| {r['n_components']} | {r['cells']:,} | {r['leaf_numbers'] / 1e6:.2f} M "
        f"| **{r['error']:.3f}** / {r['new_error']:.3f} | {_pca(r['leaf_pca'])} "
        f"| {r['all_numbers'] / 1e6:.1f} M | {_pca(r['all_pca'])} |\n"
        for r in figures["storage"]
    )
    asked_rows = "".join(
        f"| {r['of']} | {r['numbers']} | {r['accuracy']:.1%} | {r['seconds']:.2f} |\n"
        for r in figures["neighbours"]
    )
    return (
        f"Seconds for {rows:,} images on one thread of {figures['machine']['cpu']}, the median of "
        f"{ROUNDS}:\n\n"
        "| directions | cells | scales | fit | transform | inverse |\n|---|---|---|---|---|---|\n"
        f"{speeds}\n"
        f"{gmra_places.table(figures['places'])}\n"
        f"Squared error as a share of the images' energy, of {N_FITTED:,} images / of new ones:\n\n"
        "| directions | finest cells | numbers, finest scale | GMRA | PCA with as many "
        "| numbers, all scales | PCA with as many |\n|---|---|---|---|---|---|---|\n"
        f"{stored_rows}\n"
        f"{N_NEIGHBOURS} nearest neighbours of {N_ASKED:,} new images among {N_FITTED:,}:\n\n"
        "| compared by | numbers of an image | right | seconds |\n|---|---|---|---|\n"
        f"{asked_rows}"
    )


def _median(times: list[float]) -> str:
    return f"{times[len(times) // 2]:.1f}"


def _pca(row: dict[str, Any]) -> str:
    return f"{row['error']:.3f} / {row['new_error']:.3f} ({row['n_components']} directions)"


def with_tables(page: str, figures: dict[str, Any]) -> str:
    """The page with the tables of these figures.

    Args:
        page: as it was.
        figures: what is kept.

    Returns:
        The page.
    """
    before, _, rest = page.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    return f"{before}{MARKS[0]}\n\n{tables(figures)}\n{MARKS[1]}{after}"


# The pictures.


def draw(images: Array, figures: dict[str, Any]) -> None:
    """Write the pictures of the page.

    Args:
        images: a row for each.
        figures: for the curve of errors.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    gmra = GMRA(16, random_state=SEED).fit(images[:N_FITTED])
    codes = gmra.transform(images[list(SHOWN)])
    titles = [f"scale {scale}" for scale in SHOWN_SCALES] + ["image"]
    shown = [gmra.inverse_transform(codes, scale) for scale in SHOWN_SCALES] + [images[list(SHOWN)]]
    side = fashion_mnist.SIDE
    figure, axes = plt.subplots(len(SHOWN), len(shown), figsize=(9, 3.7))
    for column, (title, points) in enumerate(zip(titles, shown, strict=True)):
        axes[0, column].set_title(title, fontsize=9)
        for axis, point in zip(axes[:, column], points, strict=True):
            axis.imshow(point.reshape(side, side), cmap="gray_r", vmin=0, vmax=1)
            axis.set_axis_off()
    figure.savefig(DOCS / "gmra_scales.png", dpi=80, bbox_inches="tight")

    figure, axis = plt.subplots(figsize=(6, 3.6))
    finest = sorted(figures["storage"], key=lambda row: row["leaf_numbers"])
    numbers = [row["leaf_numbers"] / 1e6 for row in finest]
    axis.plot(numbers, [row["error"] for row in finest], "o-", label="GMRA, finest scale")
    axis.plot(numbers, [row["new_error"] for row in finest], "o--", label="GMRA, new images")
    axis.plot(numbers, [row["leaf_pca"]["error"] for row in finest], "s-", label="PCA")
    axis.set(xscale="log", ylim=(0, None), xlabel="stored numbers, millions", ylabel="error")
    axis.legend()
    figure.savefig(DOCS / "gmra_storage.png", dpi=80, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
