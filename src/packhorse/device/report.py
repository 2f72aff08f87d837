"""Reports on packing a model and on moving its weights, weight by weight."""

from dataclasses import dataclass

__all__ = ["LeftWeight", "PackReport", "PlacedWeight", "PlacementReport", "WeightReport"]

_MIB = 1 << 20


@dataclass(frozen=True)
class WeightReport:
    """A weight that was packed.

    Attributes:
        name: names of the modules that have it, joined by " = ".
        shape: rows and columns.
        format: name of its format; for rows in memory of the host "host", and in what way.
        nbytes: bytes of the packed weight.
        element_nbytes: bytes of a plain element.
        is_in_host: whether its rows lie in memory of the host as a packed table.
    """

    name: str
    shape: tuple[int, int]
    format: str
    nbytes: int
    element_nbytes: int = 2
    is_in_host: bool = False

    @property
    def plain_nbytes(self) -> int:
        """Bytes of the plain matrix."""
        return self.element_nbytes * self.shape[0] * self.shape[1]

    @property
    def bits_per_weight(self) -> float:
        """Bits that an element takes."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])


@dataclass(frozen=True)
class LeftWeight:
    """A weight that was not packed.

    Attributes:
        name: the modules that have it, with " = " between them.
        shape: rows and columns; all dimensions of a parameter that is not a matrix.
        dtype: PyTorch's name of its dtype.
        nbytes: its bytes.
        reason: why it was not packed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    reason: str


@dataclass(frozen=True)
class PackReport:
    """The result of `pack_model_`; `str` makes a table of it.

    Attributes:
        packed: the weights that were packed, in the order of the modules.
        left: weights that were not packed.
        plain_nbytes: bytes of all parameters and buffers of the model before packing.
    """

    packed: tuple[WeightReport, ...]
    left: tuple[LeftWeight, ...]
    plain_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters and buffers of the model now."""
        return self.plain_nbytes - sum(w.plain_nbytes - w.nbytes for w in self.packed)

    @property
    def host_nbytes(self) -> int:
        """Bytes of these that lie in memory of the host, as packed tables."""
        return sum(weight.nbytes for weight in self.packed if weight.is_in_host)

    @property
    def ratio(self) -> float:
        """Bytes before packing to bytes now; 1 for a model without bytes."""
        return self.plain_nbytes / self.nbytes if self.nbytes else 1.0

    def __str__(self) -> str:
        rows = [("weight", "shape", "format", "bits", "MiB before", "MiB now")]
        for weight in self.packed:
            bits, before = f"{weight.bits_per_weight:.2f}", _mib(weight.plain_nbytes)
            rows.append(
                (weight.name, _by(weight.shape), weight.format, bits, before, _mib(weight.nbytes))
            )
        for left in self.left:
            size = _mib(left.nbytes)
            rows.append((left.name, _by(left.shape), left.dtype, "", size, size))
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        reasons = ["", *("" for _ in self.packed), *(f"  {left.reason}" for left in self.left)]
        lines = [_line(row, widths) + why for row, why in zip(rows, reasons, strict=True)]
        return "\n".join([*(line.rstrip() for line in lines), self._summary()])

    def _summary(self) -> str:
        n_packed, n_left = len(self.packed), len(self.left)
        sizes = f"{_mib(self.plain_nbytes)} MiB before, {_mib(self.nbytes)} MiB now"
        if self.host_nbytes:
            sizes += f" with {_mib(self.host_nbytes)} MiB in memory of the host"
        share = self.nbytes / self.plain_nbytes if self.plain_nbytes else 1.0
        return f"{n_packed} packed, {n_left} left; whole model: {sizes} ({share:.3f})"


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:.2f}"


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    left, right = zip(row, widths, strict=True), 2
    return "  ".join(
        text.ljust(width) if i <= right else text.rjust(width)
        for i, (text, width) in enumerate(left)
    )


@dataclass(frozen=True)
class PlacedWeight:
    """Where a packed weight is.

    Attributes:
        name: names of the modules that have it, joined by " = ".
        format: name of its format.
        host_nbytes: bytes of host memory; 0 if it is in device memory.
        device_nbytes: bytes of device memory.
    """

    name: str
    format: str
    host_nbytes: int
    device_nbytes: int

    @property
    def is_on_host(self) -> bool:
        """Whether its planes are in host memory."""
        return self.host_nbytes > 0


@dataclass(frozen=True)
class PlacementReport:
    """The result of `offload_model_`; `str` makes a table of it.

    Attributes:
        weights: all packed weights, in the order of the modules.
        device: the device that computes.
        ring_nbytes: bytes of device memory for weights on their way.
        view_tokens: products with at most so many tokens read weights where they are.
    """

    weights: tuple[PlacedWeight, ...]
    device: str
    ring_nbytes: int
    view_tokens: int

    @property
    def host_nbytes(self) -> int:
        """Bytes of packed weights in host memory."""
        return sum(weight.host_nbytes for weight in self.weights)

    @property
    def device_nbytes(self) -> int:
        """Bytes of packed weights in device memory, with the ring."""
        return self.ring_nbytes + sum(weight.device_nbytes for weight in self.weights)

    def __str__(self) -> str:
        rows = [("weight", "format", "planes in", "MiB host", "MiB device")]
        for weight in self.weights:
            where = "host memory" if weight.is_on_host else self.device
            sizes = _mib(weight.host_nbytes), _mib(weight.device_nbytes)
            rows.append((weight.name, weight.format, where, *sizes))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join([*(_line(row, widths).rstrip() for row in rows), self._summary()])

    def _summary(self) -> str:
        n_moved = sum(weight.is_on_host for weight in self.weights)
        n_left = len(self.weights) - n_moved
        return (
            f"{n_moved} in host memory, {_mib(self.host_nbytes)} MiB; {n_left} on {self.device}; "
            f"{_mib(self.device_nbytes)} MiB there, of which {_mib(self.ring_nbytes)} MiB for "
            f"weights on their way; up to {self.view_tokens} tokens read weights where they are"
        )
