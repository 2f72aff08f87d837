"""The hop from the host to a GPU: memory of the host that GPUs read directly."""

from packhorse.gpu.host_memory import HostMemory, MemoryKind, host_memory

__all__ = ["HostMemory", "MemoryKind", "host_memory"]
