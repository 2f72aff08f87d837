"""Weight updates from a trainer to its inference workers (docs/updates.md).

`DeltaSender` packs each version of a model's weights as a difference from the one before, and
`DeltaReceiver` applies it exactly once. Both turn tensors into bytes and back; `UpdateFolder`,
`UpdateServer` with `UpdateClient`, and `GroupTransport` carry the bytes.
"""

from packhorse.wire.updates.chain import fold
from packhorse.wire.updates.contents import Contents, Unit
from packhorse.wire.updates.receiver import DeltaReceiver, StagedUpdate
from packhorse.wire.updates.refusals import Refusal, UpdateMismatchError
from packhorse.wire.updates.sender import DeltaSender
from packhorse.wire.updates.sharding import ShardedReceiver
from packhorse.wire.updates.tensors import Shards
from packhorse.wire.updates.transports.folder import UpdateFolder
from packhorse.wire.updates.transports.group import GroupTransport
from packhorse.wire.updates.transports.sockets import UpdateClient, UpdateServer
from packhorse.wire.updates.update import UnitReport, Update

__all__ = [
    "Contents",
    "DeltaReceiver",
    "DeltaSender",
    "GroupTransport",
    "Refusal",
    "ShardedReceiver",
    "Shards",
    "StagedUpdate",
    "Unit",
    "UnitReport",
    "Update",
    "UpdateClient",
    "UpdateFolder",
    "UpdateMismatchError",
    "UpdateServer",
    "fold",
]
