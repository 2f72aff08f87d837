"""What GPUs and the links to them can do: the figures that models of time use.

Each figure has its source beside it. Figures called "assumed" follow from arithmetic alone, and
await measurements.
"""

import re
from dataclasses import dataclass, replace

__all__ = [
    "GENERIC",
    "MEMORY_SHARE",
    "NVLINK3",
    "NVLINK4",
    "NVLINK_BRIDGE",
    "PCIE4",
    "PCIE5",
    "PRESETS",
    "DeviceModel",
    "Link",
    "model_of",
    "scale_model",
]


@dataclass(frozen=True)
class Link:
    """A connection between a GPU and the host, or between two GPUs.

    Attributes:
        name: its name.
        peak: bytes a second in each direction, by its specification; transfers reach less.
    """

    name: str
    peak: float


# PCI-SIG's base specifications: 16 lanes of 16 or 32 GT/s, of which 128 in 130 bits are data.
PCIE4 = Link("PCIe 4.0 x16", 16 * 16e9 * 128 / 130 / 8)
PCIE5 = Link("PCIe 5.0 x16", 16 * 32e9 * 128 / 130 / 8)
# NVIDIA's datasheets of A100 and H100 give both directions together: 600 and 900 GB/s between GPUs
# on one board, 600 GB/s for cards with a bridge.
NVLINK3 = Link("NVLink 3", 300e9)
NVLINK4 = Link("NVLink 4", 450e9)
NVLINK_BRIDGE = Link("NVLink bridge", 300e9)


@dataclass(frozen=True)
class DeviceModel:
    """What a GPU can do.

    Attributes:
        name: its name.
        capability: its compute capability: 90 for 9.0.
        n_processors: multiprocessors.
        clock: cycles a second, under load.
        bandwidth: bytes a second that kernels move to and from device memory.
        l2_nbytes: size of the L2 cache.
        l2_bandwidth: bytes a second from L2.
        bf16_rate: BF16 operations a second that cuBLAS reaches on large matrices.
        shared_nbytes: shared memory of a multiprocessor; a program may use all but 1 KiB of it.
        host_link: the connection to the host.
        peer_link: the connection to another GPU of the same machine; None if it is the host's.
        latency: seconds from a load instruction to its data, when the memory is busy.
        launch: seconds that a kernel in a CUDA graph takes in addition to its work.
    """

    name: str
    capability: int
    n_processors: int
    clock: float
    bandwidth: float
    l2_nbytes: int
    l2_bandwidth: float
    bf16_rate: float
    shared_nbytes: int
    host_link: Link = PCIE4
    peer_link: Link | None = None
    latency: float = 0.8e-6
    launch: float = 2.5e-6


# Multiprocessors, caches and peaks are those of NVIDIA's datasheets and architecture papers.
# Measured shares of the peaks: copies on an H200 ran at 4.3 of 4.8 TB/s, large BF16 products at 790
# of 989 TFLOP/s. The same shares, 0.9 and 0.8, are assumed for the other GPUs. Clocks are those
# under load, which are below the boost clock. Bandwidths of L2 come from microbenchmarks by Chips
# and Cheese: about 5.5 TB/s for H100, 4 TB/s for A100. A launch takes 2.5 us between dependent
# kernels of a graph, and a load 0.8 us under load; both are assumed. Links: the datasheets.
_H200 = DeviceModel("H200", 90, 132, 1.755e9, 4.3e12, 60 << 20, 5.7e12, 790e12, 228 << 10)
_H100_NVL = DeviceModel("H100 NVL", 90, 132, 1.6e9, 3.5e12, 60 << 20, 5.2e12, 640e12, 228 << 10)
_H100_PCIE = DeviceModel("H100 PCIe", 90, 114, 1.5e9, 1.8e12, 50 << 20, 4.5e12, 520e12, 228 << 10)
_H100 = DeviceModel("H100", 90, 132, 1.755e9, 3.0e12, 50 << 20, 5.5e12, 790e12, 228 << 10)
_A100_SXM = DeviceModel("A100-SXM4", 80, 108, 1.35e9, 1.4e12, 40 << 20, 4.0e12, 250e12, 164 << 10)
_A100_PCIE = DeviceModel("A100-PCIE", 80, 108, 1.2e9, 1.4e12, 40 << 20, 3.6e12, 220e12, 164 << 10)
PRESETS = (
    replace(_H200, host_link=PCIE5, peer_link=NVLINK4),
    replace(_H100_NVL, host_link=PCIE5, peer_link=NVLINK_BRIDGE),
    replace(_H100_PCIE, host_link=PCIE5, peer_link=NVLINK_BRIDGE),
    replace(_H100, host_link=PCIE5, peer_link=NVLINK4),
    replace(_A100_SXM, name="A100-SXM4-40GB", peer_link=NVLINK3),
    replace(_A100_PCIE, name="A100-PCIE-40GB", peer_link=NVLINK_BRIDGE),
    replace(_A100_SXM, name="A100", bandwidth=1.83e12, peer_link=NVLINK3),
)
MEMORY_SHARE = 0.9  # of the peak bandwidth of device memory that kernels reach
# For an unknown GPU: an A100, in proportion to the number of multiprocessors.
GENERIC = DeviceModel("generic", 80, 108, 1.35e9, 1.4e12, 40 << 20, 4.0e12, 220e12, 100 << 10)


def model_of(name: str) -> DeviceModel:
    """The preset for a GPU; `GENERIC` if there is none.

    Args:
        name: as the driver reports it. A preset's name must be whole words of it: "GH200" and
            "RTX A1000" are other cards than H200 and A100.
    """
    return next((model for model in PRESETS if _has_words(name, model.name)), GENERIC)


def _has_words(name: str, words: str) -> bool:
    pattern = rf"(?<![a-z0-9]){re.escape(words)}(?![a-z0-9])"
    return re.search(pattern, name, re.IGNORECASE) is not None


def scale_model(
    model: DeviceModel, n_processors: int, bandwidth: float | None = None
) -> DeviceModel:
    """The model of a GPU with another number of multiprocessors: a slice, or a related GPU.

    Args:
        model: the known GPU.
        n_processors: multiprocessors of the other one.
        bandwidth: bytes a second of device memory, for `GENERIC`; None if it is unknown.
    """
    share = n_processors / model.n_processors
    own = bandwidth if model.name == GENERIC.name else None
    return replace(
        model,
        n_processors=n_processors,
        bandwidth=own or model.bandwidth * min(share, 1.0),
        l2_bandwidth=model.l2_bandwidth * share,
        bf16_rate=model.bf16_rate * share,
    )
