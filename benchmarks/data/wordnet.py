"""WordNet as a graph with features, from Debian's package wordnet-base: `make data`.

    python benchmarks/data/wordnet.py              # apt-get downloads the package
    python benchmarks/data/wordnet.py FILE.deb     # or it is here already

A node is a synset, an edge a relation between two, the label of a node its lexicographer file (45
of them, such as noun.animal), and its features are the words of its gloss. (Princeton WordNet 3.1
or 3.0, whose licence allows any use; wndb(5WN) describes the files.)
"""

import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Run as a file, a command finds the package `benchmarks` only in the folder that holds it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.data import debian_package

PACKAGE = "wordnet-base"
FOLDER = Path(__file__).resolve().parents[2] / "build" / "data" / "wordnet"
HOW = "run: make data"
N_LABELS = 45
MAX_SHARE = 0.02  # of the glosses; words of more are left out, as is usual for bags of words
_INSIDE = "usr/share/wordnet"
_PARTS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
_WORD = re.compile(r"[a-z]{2,}")


class Graph(NamedTuple):
    """WordNet.

    Attributes:
        labels: int64, the lexicographer file of each synset.
        edges: int64, (2, n): from a synset, to a synset.
        glosses: the words of each synset's gloss, in lower case.
    """

    labels: NDArray[np.int64]
    edges: NDArray[np.int64]
    glosses: list[list[str]]


def is_there() -> bool:
    """Whether `make data` was run."""
    return FOLDER.is_dir()


@cache
def load() -> Graph:
    """Read the graph.

    Raises:
        FileNotFoundError: it is not here.
    """
    if not is_there():
        raise FileNotFoundError(f"{FOLDER} is missing; {HOW}")
    numbers: dict[tuple[str, str], int] = {}
    labels, glosses, pointers = [], [], []
    for name, part in _PARTS.items():
        for line in (FOLDER / f"data.{name}").read_text(encoding="latin-1").splitlines():
            if line.startswith("  "):  # the licence
                continue
            fields, _, gloss = line.partition(" | ")
            words = fields.split(" ")
            numbers[part, words[0]] = len(labels)
            labels.append(int(words[1]))
            glosses.append(_WORD.findall(gloss.lower()))
            at = 4 + 2 * int(words[3], 16)
            pointers.append([words[at + 1 + 4 * i :][:3] for i in range(int(words[at]))])
    edges = [
        (source, numbers[part.replace("s", "a"), offset])
        for source, found in enumerate(pointers)
        for _, offset, part in found
    ]
    return Graph(np.array(labels), np.array(edges).T.copy(), glosses)


def vocabulary(n_words: int) -> dict[str, int]:
    """The most frequent words of the glosses but for those nearly everywhere, most frequent
    first."""
    glosses = load().glosses
    counts = Counter(word for gloss in glosses for word in set(gloss))
    most = max(MAX_SHARE * len(glosses), 2)
    chosen = [word for word, count in counts.most_common() if count <= most]
    return {word: i for i, word in enumerate(chosen[:n_words])}


def features(n_words: int, kind: str, rows: slice = slice(None)) -> NDArray[np.float32]:
    """Bags of words.

    Args:
        n_words: columns.
        kind: "share" (1 / number of words), "present" (0 or 1) or "tf-idf".
        rows: the synsets.

    Returns:
        float32, (synsets, n_words).
    """
    places, glosses = vocabulary(n_words), load().glosses
    n_with = Counter(word for gloss in glosses for word in set(gloss) if word in places)
    chosen = glosses[rows]
    found = np.zeros((len(chosen), n_words), np.float32)
    for row, gloss in zip(found, chosen, strict=True):
        counts = Counter(word for word in gloss if word in places)
        for word, count in counts.items():
            if kind == "tf-idf":
                row[places[word]] = count * np.log(len(glosses) / n_with[word])
            else:
                row[places[word]] = 1 / len(counts) if kind == "share" else 1
    return found


def main(argv: list[str]) -> int:
    """Fetch the package, unless it is there.

    Args:
        argv: the package, if it is here already.

    Returns:
        The exit status.
    """
    status = debian_package.main(PACKAGE, _INSIDE, FOLDER, "benchmarks/data/wordnet.py", argv)
    if status == 0:
        graph = load()
        print(f"{FOLDER}: {len(graph.labels):,} synsets, {graph.edges.shape[1]:,} relations")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
