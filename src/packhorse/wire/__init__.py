"""The hop between workers: collectives and weight updates that send fewer bytes (docs/wire.md).

`Collectives` has PyTorch's collectives, values in and values out, packed where that is faster.
`ByteExchange` gives every rank some bytes of every other one.
`compression_hook` and `shard_traffic` plug into DDP and FSDP2. PyTorch is imported at first use.
"""

from typing import TYPE_CHECKING, Any

from packhorse.late_import import late_name

if TYPE_CHECKING:
    from packhorse.wire.collectives import Collectives
    from packhorse.wire.data_parallel import (
        PackedAllGather,
        PackedReduceScatter,
        compression_hook,
        shard_traffic,
    )
    from packhorse.wire.exchange import ByteExchange
    from packhorse.wire.pending import Pending
    from packhorse.wire.selector import Arm, Key, Rates, Row

__all__ = [
    "Arm",
    "ByteExchange",
    "Collectives",
    "Key",
    "PackedAllGather",
    "PackedReduceScatter",
    "Pending",
    "Rates",
    "Row",
    "compression_hook",
    "shard_traffic",
]

_MODULES = {
    "Arm": "selector",
    "ByteExchange": "exchange",
    "Collectives": "collectives",
    "Key": "selector",
    "PackedAllGather": "data_parallel",
    "PackedReduceScatter": "data_parallel",
    "Pending": "pending",
    "Rates": "selector",
    "Row": "selector",
    "compression_hook": "data_parallel",
    "shard_traffic": "data_parallel",
}


def __getattr__(name: str) -> Any:
    return late_name(__name__, _MODULES, name)
