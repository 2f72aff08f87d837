"""Decides in which format a weight is packed to save memory, and whether it is packed at all.

Formats are judged by their exceptions, which are counted in a sample of rows first.
"""

from packhorse.codecs.weights import packed_nbytes
from packhorse.layout import W11, W12, WeightFormat

__all__ = [
    "MAX_RATIO",
    "MAX_W11_EXCEPTIONS",
    "SAMPLED_ROWS",
    "suits_w11",
    "was_misjudged",
    "why_no_gain",
]

MAX_RATIO = 0.9  # packed to plain bytes; above, a layer stays plain
# The share of exceptions up to which "auto" prefers W11. Each exception fetches an input of its
# own, and a program fetches them one block after the other. With normal rows, 1.2 % of the elements
# are exceptions, and W11 is predicted and simulated at half of BF16's speed; with one in 2000 it is
# predicted at 0.83 to 0.98 of W12's speed (8 tokens, matrices of a Llama of 8B, H200).
MAX_W11_EXCEPTIONS = 1 / 2000
SAMPLED_ROWS = 64  # of a weight, to estimate its exceptions
_PLAIN_NBYTES = 2  # of a BF16 element


def suits_w11(share: float, n_rows: int, n_columns: int) -> bool:
    """Whether W11 has few exceptions and is smaller than W12.

    Args:
        share: the share of elements that are exceptions in W11, in a sample of rows.
        n_rows: rows of the matrix.
        n_columns: its columns, 1 to 65,536.
    """
    # Padding to 128 columns instead of 32 may cost more than a bit saves.
    w11_nbytes = packed_nbytes(n_rows, n_columns, round(share * n_rows * n_columns), W11)
    w12_nbytes = packed_nbytes(n_rows, n_columns, 0, W12)
    return share <= MAX_W11_EXCEPTIONS and w11_nbytes < w12_nbytes


def was_misjudged(n_exceptions: int, numel: int) -> bool:
    """Whether a weight got W11 because the sample missed the rows with many exceptions.

    Args:
        n_exceptions: all its exceptions in W11.
        numel: its elements.
    """
    return n_exceptions > MAX_W11_EXCEPTIONS * numel


def why_no_gain(nbytes: int, numel: int, format: WeightFormat) -> str | None:
    """Why a weight is not worth packing; None if it is.

    Args:
        nbytes: bytes of the packed weight.
        numel: its elements.
        format: its format.
    """
    if nbytes <= MAX_RATIO * _PLAIN_NBYTES * numel:
        return None
    return f"no gain: {8 * nbytes / max(numel, 1):.2f} bits a weight in {format.name}"
