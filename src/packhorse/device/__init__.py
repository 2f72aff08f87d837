"""The hop to the compute units: weights that stay packed in the memory of a GPU, or of the host.

`pack_model_` packs the linear layers of a model in place, and `unpack_model_` unpacks them.
`offload_model_` moves packed weights to memory of the host that a GPU reads.
`PackedWeight` is the packed matrix as a tensor, and `PackedLinear` is the layer. `operators` holds
the PyTorch operators on the arrays of packed weights, and `strategy` names the ways to run a
product. PyTorch is imported at first use.
"""

from typing import TYPE_CHECKING, Any

from packhorse.late_import import late_name

if TYPE_CHECKING:
    from packhorse.device.crossover import calibrate_offload
    from packhorse.device.description import describe_weights, join_weights
    from packhorse.device.linear import PackedLinear
    from packhorse.device.model import pack_model_, unpack_model_
    from packhorse.device.packed_arrays import check_arrays
    from packhorse.device.packed_weight import PackedWeight
    from packhorse.device.packing import empty_weight, join_arrays, pack_weight
    from packhorse.device.placement import offload_model_
    from packhorse.device.report import (
        LeftWeight,
        PackReport,
        PlacedWeight,
        PlacementReport,
        WeightReport,
    )
    from packhorse.kernels.arrays import WeightTensors

__all__ = [
    "LeftWeight",
    "PackReport",
    "PackedLinear",
    "PackedWeight",
    "PlacedWeight",
    "PlacementReport",
    "WeightReport",
    "WeightTensors",
    "calibrate_offload",
    "check_arrays",
    "describe_weights",
    "empty_weight",
    "join_arrays",
    "join_weights",
    "offload_model_",
    "pack_model_",
    "pack_weight",
    "unpack_model_",
]

_MODULES = {
    "LeftWeight": "report",
    "PackReport": "report",
    "PackedLinear": "linear",
    "PackedWeight": "packed_weight",
    "PlacedWeight": "report",
    "PlacementReport": "report",
    "WeightReport": "report",
    "WeightTensors": "operators",
    "calibrate_offload": "crossover",
    "check_arrays": "packed_arrays",
    "describe_weights": "description",
    "empty_weight": "packing",
    "join_arrays": "packing",
    "join_weights": "description",
    "offload_model_": "placement",
    "pack_model_": "model",
    "pack_weight": "packing",
    "rebuild_weight": "packed_weight",  # for pickles alone
    "unpack_model_": "model",
}


def __getattr__(name: str) -> Any:
    return late_name(__name__, _MODULES, name)
