"""Many files at once: one task a file on a Dask cluster, or one after the other in this process.

`steps` says what there is to do, `work` does one step on a worker, `existing` finds out what was
done before, `run` decides which step follows, and `many` has what users call. The tasks themselves
are sent and gathered by `storage/tasks.py`, which knows nothing of files.
"""

from packhorse.disk.cluster.many import pack_many, unpack_many, verify_many
from packhorse.disk.cluster.results import FileReport, ManyResult

__all__ = ["FileReport", "ManyResult", "pack_many", "unpack_many", "verify_many"]
