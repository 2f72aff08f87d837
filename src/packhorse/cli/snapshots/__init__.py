"""`packhorse snapshot`: the verbs of the snapshot store, built as those of files are.

`app` declares the verbs, `actions` does the work, `rows` is what it hands to `render`, which draws.
"""

from packhorse.cli.snapshots.app import snapshot_app

__all__ = ["snapshot_app"]
