"""Recognises a place that holds a checkpoint of another format, and says what reads it.

The reader looks only if there is no manifest, so a good load costs no further request. The writer
looks before every save, because a folder with two checkpoints would be ambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from packhorse.disk.dcp.checkpoint_manifest import is_rank_manifest, manifest_name
from packhorse.disk.snapshots.names import STORE_FILE
from packhorse.errors import CompatibilityError
from packhorse.storage.foreign import PEEK_NBYTES, kind_of_file
from packhorse.storage.interface import Storage

__all__ = ["check_place", "explain_absence"]

# For each kind: one of its files, what it is, and what reads it.
_FOLDERS = (
    (
        r"\.metadata|.*\.distcp",
        "a checkpoint that PyTorch's own writer has written",
        "read it with torch.distributed.checkpoint.FileSystemReader; to convert it, load it so and "
        "save it with PackhorseWriter",
    ),
    (
        re.escape(STORE_FILE),
        "a store of snapshots",
        "read it with packhorse.disk.SnapshotStore",
    ),
    (
        r"(adapter_|pytorch_)?model(-\d+-of-\d+)?(\.ph)?\.(safetensors|bin)(\.index\.json)?",
        "a model folder of Hugging Face transformers",
        "read it with from_pretrained",
    ),
    (
        r"zero_to_fp32\.py|mp_rank_\d+_model_states\.pt",
        "a checkpoint of DeepSpeed",
        "read it with DeepSpeed",
    ),
)
_SAVED = re.compile(r".*\.(pt|pth|ckpt)")


def check_place(storage: Storage) -> None:
    """Refuse to write a checkpoint where there is something else.

    Raises:
        FileExistsError: there is a file, or a checkpoint of another format.
    """
    kind = _kind_of_file(storage)
    if kind is not None:
        raise FileExistsError(f"{storage.label()}: is a file{kind}; name a folder")
    found = _kind_of_folder(storage)
    if found is not None and not storage.exists(manifest_name()):
        raise FileExistsError(f"{storage.label()}: holds {found[0]}; choose another folder")


@contextmanager
def explain_absence(storage: Storage) -> Iterator[None]:
    """Says what is there, if the block finds no manifest.

    Args:
        storage: where the block looks.

    Yields:
        Nothing; the block reads a manifest.

    Raises:
        CompatibilityError: there is a checkpoint of another format.
        FileNotFoundError: there is no checkpoint.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        kind = _kind_of_file(storage)
        if kind is not None:
            raise CompatibilityError(
                f"{storage.label()}: is a file{kind}; a checkpoint of PackhorseWriter is a folder"
            ) from error
        found = _kind_of_folder(storage) or _kind_of_rest(storage.names())
        if found is None:
            raise
        raise CompatibilityError(f"{storage.label()}: holds {found[0]}: {found[1]}") from error


def _kind_of_folder(storage: Storage) -> tuple[str, str] | None:
    """What a folder holds and what reads it; None if it is nothing known."""
    names = storage.names()
    for pattern, what, advice in _FOLDERS:
        if any(re.fullmatch(pattern, name) for name in names):
            return what, advice
    return None


def _kind_of_rest(names: Sequence[str]) -> tuple[str, str] | None:
    """The same for files that may be in a folder beside a checkpoint."""
    if any(map(is_rank_manifest, names)):
        return (
            "a checkpoint of each rank, and none of all ranks",
            "load it as it was saved, with use_collectives=False",
        )
    for name in names:
        if _SAVED.fullmatch(name):
            return f"{name}, probably a file of torch.save", "read it with torch.load"
    return None


def _kind_of_file(storage: Storage) -> str | None:
    """A note on the file in place of a local folder; None if there is no such file."""
    path = Path(storage.label())
    if not storage.is_local or not path.is_file():
        return None
    with path.open("rb") as file:
        kind = kind_of_file(file.read(PEEK_NBYTES))
    return f" ({kind})" if kind else ""
