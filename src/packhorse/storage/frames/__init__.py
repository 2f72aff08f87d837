"""The frame store, which snapshots, checkpoints and the Shelf share.

`frame_store` says what a store does, and `pack_store` is the store of files. `refs` names frames,
`chain` decodes them, and `packer` makes them with the help of `casts`, `base_cache` and `scratch`.
"""

__all__: list[str] = []
