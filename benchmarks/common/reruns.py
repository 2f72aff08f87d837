"""Training runs that can be made again, bit for bit."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["check_same", "one_thread"]


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread and deterministic algorithms only, as long as the block lasts."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)


def check_same(path: Path, kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to go on with files that another recipe has written.

    Args:
        path: a file, for the message.
        kept: the record in it.
        wanted: what the record must have.

    Raises:
        ValueError: they differ.
    """
    # Compared as JSON, which has no tuples.
    for key, value in json.loads(json.dumps(wanted)).items():
        if kept.get(key) != value:
            raise ValueError(
                f"{path} was made with another {key}: {kept.get(key)}, now {value}; "
                "remove its folder to begin anew"
            )
