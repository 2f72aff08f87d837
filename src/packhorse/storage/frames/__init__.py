"""The frame store, which snapshots, checkpoints and the Shelf share.

`interface` says what a store does, `packs` is the store of files; `refs` names frames, `chain`
decodes them, and `packer` makes them, with `casts`, `cache` and `scratch` as its parts.
"""

__all__: list[str] = []
