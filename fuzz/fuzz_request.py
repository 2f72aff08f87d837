"""Fuzz `unpack_request`: any message must become rows that are there, or raise a `CorruptionError`.

An input is a control byte, which chooses the tables of a holder, and the message of another rank
(src/packhorse/wire/embeddings/requests.py). Messages have no checksums of their own, since those of
the exchange cover them. What is accepted asks for ids of the tables and must come back when it is
packed again.
"""

import harness
import numpy as np

with harness.instrumented():
    from packhorse.errors import CorruptionError
    from packhorse.wire.embeddings.requests import Wanted, pack_request, unpack_request

__all__ = ["HOLDERS", "unpack"]

# Rows of the shards of a holder.
HOLDERS = ([3, 1000, 1_000_000, 50, 200_000], [1], [1, 2, 1 << 40, 7], [40] * 12)


def main(data: bytes) -> None:
    """Run one input."""
    if not data:
        return
    rows = HOLDERS[data[0] % len(HOLDERS)]
    wanted = unpack(data[1:], rows)
    if wanted is None:
        return
    for one, n_rows in zip(wanted, rows, strict=True):
        check(one, n_rows)
    again = unpack_request(pack_request(wanted, rows), rows)
    for one, other in zip(wanted, again, strict=True):
        assert np.array_equal(one.ids, other.ids), "other ids came back"
        assert (one.lengths is None) == (other.lengths is None)
        assert one.lengths is None or np.array_equal(one.lengths, other.lengths)


def unpack(message: bytes, rows: list[int]) -> list[Wanted] | None:
    """What is asked for, or None for the documented error."""
    try:
        return unpack_request(np.frombuffer(message, np.uint8), rows)
    except CorruptionError:
        return None


def check(one: Wanted, n_rows: int) -> None:
    """Fails if a row is asked for that is not there."""
    if len(one.ids):
        assert one.ids.min() >= 0, "an id is negative"
        assert one.ids.max() < n_rows, "an id is outside"
    if one.lengths is None:
        assert (np.diff(one.ids) > 0).all(), "a set is not ascending"
    else:
        assert one.lengths.min() >= 1, "a bag is empty"
        assert one.lengths.sum() == len(one.ids), "bags have other ids"


if __name__ == "__main__":
    harness.fuzz(main)
