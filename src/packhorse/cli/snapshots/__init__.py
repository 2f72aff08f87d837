"""`packhorse snapshot`: the verbs for snapshot stores, built like the verbs for files.

`app` declares the verbs, `actions` does the work and returns `rows`, and `render` draws them.
"""

from packhorse.cli.snapshots.app import snapshot_app

__all__ = ["snapshot_app"]
