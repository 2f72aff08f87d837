"""How often a request to S3 is made before it counts as failed.

By default three layers repeat a read: botocore asks five times and waits up to a quarter of a
minute meanwhile, s3fs does that five times, and where a body is read five times that again. So a
server that closes every connection is asked 125 times, for minutes, and is refused no better for
it. Here s3fs repeats everything once, which is what it must do for a body that is cut short and for
its other special cases, and botocore asks four times. What S3 asks to be repeated (it is too busy,
or has a fault of its own) still is, for some fifteen seconds.

What the user has set stays: the variables and the file of AWS, `config_kwargs`, a session of their
own, and `S3FileSystem.retries`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from packhorse.late_import import import_late

__all__ = ["with_few_attempts"]

_RETRIES_OF_S3FS = 5  # its default; any other number is somebody's wish
_RETRIES = 2
_ATTEMPTS = 4
_MODE = "legacy"  # what botocore does if nobody says; in any other it gives up sooner by itself


def with_few_attempts(fs: Any) -> Any:
    """A file system that gives up sooner, if this is one of s3fs; else itself.

    Args:
        fs: a file system of fsspec. It is not changed: others may use it.
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
    """The class with another number; its own, as instances are shared with all of a process."""
    return type(kind.__name__, (kind,), {"retries": _RETRIES})


def _are_set(options: dict[str, Any]) -> bool:
    """Whether the user says how often botocore asks."""
    session = options.get("session")
    if session is None:
        session = import_late("botocore.session").Session(profile=options.get("profile"))
    mode = session.get_config_variable("retry_mode")
    return session.get_config_variable("max_attempts") is not None or mode != _MODE
