"""Rows, gradients and requests of a broken peer: each is refused, and all ranks hear of it."""

from collections.abc import Callable
from pathlib import Path

import embedding_jobs as jobs
import numpy as np
import pytest
import torch
from wire_ranks import run_ranks, values

from packhorse.codecs.bounded import Segment, encode_bounded
from packhorse.errors import CompatibilityError, CorruptionError
from packhorse.wire.bounds import TableBounds
from packhorse.wire.embeddings import BoundedRows, Piece, RawRows, RowCodec, on_rank
from packhorse.wire.embeddings.routes import Layout

LAYOUT = Layout([on_rank("t", 40, 8, 0)], ["t"], world=2)
CODECS: dict[str, Callable[[], RowCodec]] = {
    "exact": RawRows,
    "bounded": lambda: BoundedRows(TableBounds()),
}


def message_of(codec: RowCodec, n: int) -> np.ndarray:
    """What a peer sends that has `n` rows."""
    rows = torch.linspace(-1, 1, 8 * n).view(n, 8)
    message, _ = codec.encode([[Piece(0, rows, np.arange(n))], []])
    return message


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize(("n_sent", "n_asked"), [(3, 4), (5, 4), (0, 4), (4, 0)])
def test_other_numbers_of_rows_are_refused(kind: str, n_sent: int, n_asked: int) -> None:
    codec = CODECS[kind]()
    codec.attach(LAYOUT, rank=1)
    with pytest.raises(CorruptionError) as caught:
        codec.decode(message_of(codec, n_sent), [torch.empty(n_asked, 8)])
    assert any(words in str(caught.value) for words in ("asked for", "bytes, fewer", "cut"))


def test_damaged_bounded_rows_are_refused() -> None:
    codec = CODECS["bounded"]()
    codec.attach(LAYOUT, rank=1)
    message, asked = message_of(codec, 4), [torch.empty(4, 8)]
    halves = np.zeros(32, np.float16)
    with pytest.raises(CorruptionError, match=r"holds F16, not F32"):
        codec.decode(encode_bounded(halves, "F16", [Segment(32, 0.5, 4)]), asked)
    for at in range(0, 8 * len(message), 5):
        flipped = message.copy()
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises((CorruptionError, CompatibilityError)):
            codec.decode(flipped, asked)
    codec.decode(message, asked)


@pytest.mark.parametrize("what", ["request", "rows", "gradients"])
def test_a_false_message_fails_all_ranks(what: str, tmp_path: Path) -> None:
    words = {
        "request": "CorruptionError: a request wants [4] of [3] rows",
        "rows": "bytes of rows came",
        "gradients": "bytes of rows came",
    }
    found = values(run_ranks(2, jobs.send_falsely, what, store=tmp_path / "store", limit=60))
    assert all(words[what] in error for error, _ in found), found
    assert found[0][1] == (0 if what == "request" else 1)
