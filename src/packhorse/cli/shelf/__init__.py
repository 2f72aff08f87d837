"""`packhorse shelf`: the verbs for shelves, built like the verbs for files.

`app` declares the verbs, `actions` and `exchange` do the work and return `rows`, and `render` draws
them. `selection` reads an index as NumPy would, and `statistics` describes values block by block.
"""

from packhorse.cli.shelf.app import shelf_app

__all__ = ["shelf_app"]
