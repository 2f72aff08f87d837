"""The hop to and from disk: packed files, reading them lazily, model folders, and snapshots.

`safetensors_header`, `packed_header` and `folder_index` turn text into text. `container`, `verify`
and `folder` pack, unpack, plan and verify, with `base_files` if there is a base, and `cluster` does
so for many files. `packed_file` reads tensors and slices. `snapshots` stores training states.
`shelf` is a store of tensors that are changed in place. `dcp` is a storage for
`torch.distributed.checkpoint`; it and `ShelfDataset` are the only parts that need PyTorch.
All names are imported at first use.
"""

from typing import TYPE_CHECKING, Any

from packhorse.late_import import late_name

if TYPE_CHECKING:
    from packhorse.disk.cluster import (
        FileReport,
        ManyResult,
        pack_many,
        unpack_many,
        verify_many,
    )
    from packhorse.disk.container import (
        logical_nbytes,
        pack_file,
        plan_file,
    )
    from packhorse.disk.dcp import PackhorseReader, PackhorseWriter
    from packhorse.disk.folder import (
        folder_logical_nbytes,
        pack_folder,
        packed_files,
        plan_folder,
        unpack_folder,
        verify_folder,
    )
    from packhorse.disk.packed_file import PackedFile, PackedSlice
    from packhorse.disk.results import FileResult, FolderResult, Problem, TensorPlan, TensorResult
    from packhorse.disk.shelf import (
        ReaderInfo,
        Shelf,
        ShelfInfo,
        ShelfProblem,
        ShelfTensor,
        ShelfView,
        TagInfo,
        TensorInfo,
    )
    from packhorse.disk.shelf.dataset import ShelfDataset
    from packhorse.disk.snapshots import (
        Change,
        Lineage,
        PruneResult,
        RestoredFile,
        SnapshotInfo,
        SnapshotProblem,
        SnapshotStore,
        SnapshotSummary,
        StoredTensor,
        StoreOverview,
        TensorDiff,
        model_files,
    )
    from packhorse.disk.unpack import unpack_file
    from packhorse.disk.verify import verify_file

__all__ = [
    "Change",
    "FileReport",
    "FileResult",
    "FolderResult",
    "Lineage",
    "ManyResult",
    "PackedFile",
    "PackedSlice",
    "PackhorseReader",
    "PackhorseWriter",
    "Problem",
    "PruneResult",
    "ReaderInfo",
    "RestoredFile",
    "Shelf",
    "ShelfDataset",
    "ShelfInfo",
    "ShelfProblem",
    "ShelfTensor",
    "ShelfView",
    "SnapshotInfo",
    "SnapshotProblem",
    "SnapshotStore",
    "SnapshotSummary",
    "StoreOverview",
    "StoredTensor",
    "TagInfo",
    "TensorDiff",
    "TensorInfo",
    "TensorPlan",
    "TensorResult",
    "folder_logical_nbytes",
    "logical_nbytes",
    "model_files",
    "pack_file",
    "pack_folder",
    "pack_many",
    "packed_files",
    "plan_file",
    "plan_folder",
    "unpack_file",
    "unpack_folder",
    "unpack_many",
    "verify_file",
    "verify_folder",
    "verify_many",
]


# Nothing is imported before its first use: most programs need one or two of these.
_MODULES = {
    "Change": "snapshots",
    "FileReport": "cluster",
    "FileResult": "results",
    "FolderResult": "results",
    "Lineage": "snapshots",
    "ManyResult": "cluster",
    "PackedFile": "packed_file",
    "PackedSlice": "packed_file",
    "PackhorseReader": "dcp",
    "PackhorseWriter": "dcp",
    "Problem": "results",
    "PruneResult": "snapshots",
    "ReaderInfo": "shelf",
    "RestoredFile": "snapshots",
    "Shelf": "shelf",
    "ShelfDataset": "shelf.dataset",
    "ShelfInfo": "shelf",
    "ShelfProblem": "shelf",
    "ShelfTensor": "shelf",
    "ShelfView": "shelf",
    "SnapshotInfo": "snapshots",
    "SnapshotProblem": "snapshots",
    "SnapshotStore": "snapshots",
    "SnapshotSummary": "snapshots",
    "StoreOverview": "snapshots",
    "StoredTensor": "snapshots",
    "TagInfo": "shelf",
    "TensorDiff": "snapshots",
    "TensorInfo": "shelf",
    "TensorPlan": "results",
    "TensorResult": "results",
    "folder_logical_nbytes": "folder",
    "logical_nbytes": "container",
    "model_files": "snapshots",
    "pack_file": "container",
    "pack_folder": "folder",
    "pack_many": "cluster",
    "packed_files": "folder",
    "plan_file": "container",
    "plan_folder": "folder",
    "unpack_file": "unpack",
    "unpack_folder": "folder",
    "unpack_many": "cluster",
    "verify_file": "verify",
    "verify_folder": "folder",
    "verify_many": "cluster",
}


def __getattr__(name: str) -> Any:
    return late_name(__name__, _MODULES, name)
