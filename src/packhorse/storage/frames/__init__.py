"""The frame store, which snapshots, checkpoints and the Shelf share.

`frame_store` defines what a store does, and `pack_store` keeps frames in files. `refs` names
frames, `chain` decodes them, and `packer` makes them with the help of `casts`, `base_cache` and
`scratch`.
"""

__all__: list[str] = []
