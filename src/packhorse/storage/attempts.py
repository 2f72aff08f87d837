"""Limits how often a request to S3 is repeated before it counts as failed.

By default, three layers repeat a read: botocore tries five times, with pauses of up to a quarter of
a minute; s3fs repeats that five times; and when s3fs reads a body, it repeats all of this five
times. So it takes 125 attempts and several minutes to report a server that closes every connection.
Here, s3fs tries everything twice, which it must do for a body that is cut short and for its other
special cases, and botocore tries four times. If S3 itself asks for another attempt (because it is
too busy, or has an internal error), attempts still continue for about fifteen seconds.

Settings of the user are kept: the variables and the file of AWS, `config_kwargs`, a session, and
`S3FileSystem.retries`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from packhorse.late_import import import_late

__all__ = ["with_few_attempts"]

_RETRIES_OF_S3FS = 5  # its default; any other number was set by the user
_RETRIES = 2
_ATTEMPTS = 4
_MODE = "legacy"  # botocore's default; in other modes it gives up sooner anyway


def with_few_attempts(fs: Any) -> Any:
    """A file system of s3fs that gives up sooner; any other file system is returned as it is.

    Args:
        fs: a file system of fsspec. It is not changed, because others may use it.
    """
    kind: Any = type(fs)
    if kind.__module__ != "s3fs.core" or kind.retries != _RETRIES_OF_S3FS:
        return fs
    options = dict(fs.storage_options)
    config = dict(options.get("config_kwargs") or {})
    if "retries" not in config and not _are_set(options):
        options["config_kwargs"] = {**config, "retries": {"total_max_attempts": _ATTEMPTS}}
    return _kind_with_few(kind)(*fs.storage_args, **options)


@cache
def _kind_with_few(kind: Any) -> Any:
    """A subclass with another number of retries. It is a class of its own, because fsspec shares
    instances of a class with the whole process."""
    return type(kind.__name__, (kind,), {"retries": _RETRIES})


def _are_set(options: dict[str, Any]) -> bool:
    """Whether the user has set how often botocore tries."""
    session = options.get("session")
    if session is None:
        session = import_late("botocore.session").Session(profile=options.get("profile"))
    mode = session.get_config_variable("retry_mode")
    return session.get_config_variable("max_attempts") is not None or mode != _MODE
