"""What a report says, as plain data: the page, the tables of Markdown and `--json` draw it.

Sizes are in bytes and times in seconds. A ratio is original bytes / packed bytes. Shares are
between 0 and 1. Whatever was sampled carries the error of sampling with it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "ChangeRow",
    "Changes",
    "EngineRow",
    "EngineTable",
    "Estimate",
    "ExponentRow",
    "Findings",
    "MemoryFormat",
    "MemoryRow",
    "PlaneRow",
    "Policy",
    "PolicyRow",
    "Problem",
    "Series",
    "Settings",
    "SourceRow",
    "StepKindRow",
    "StepRow",
    "StepSizeRow",
    "TensorRow",
    "total",
]


@dataclass(frozen=True)
class Estimate:
    """A number of bytes.

    Attributes:
        nbytes: the expected value.
        error: how far off it may be: two standard errors of sampling, and what it may change that
            the runs of a sample are packed together; 0 if everything was measured.
    """

    nbytes: int
    error: int = 0


def total(estimates: list[Estimate]) -> Estimate:
    """The sum. Errors add up as if they had one cause, which those of alike tensors may have."""
    return Estimate(sum(each.nbytes for each in estimates), sum(each.error for each in estimates))


@dataclass(frozen=True)
class Settings:
    """What the caller asked for.

    Attributes:
        full: whether everything was measured, instead of a sample.
        sample_nbytes: bytes that were looked at of each source, at most.
        checkpoints_per_day: for what is saved in a year.
        seconds: how long the analysis took.
        threads: how many threads it used.
    """

    full: bool
    sample_nbytes: int
    checkpoints_per_day: float
    seconds: float
    threads: int


@dataclass(frozen=True)
class Problem:
    """Something that could not be read or compared; the rest of the report is without it.

    Attributes:
        source: the source.
        tensor: the tensor's name; None if the source as a whole is concerned.
        message: the complete description.
        is_note: whether all data is there and good, and this is only worth knowing.
    """

    source: str
    tensor: str | None
    message: str
    is_note: bool = False

    @property
    def line(self) -> str:
        """The description as one line, which names the source and the tensor."""
        line = " ".join(self.message.split())
        if self.tensor is not None and self.tensor not in line:
            line = f"tensor {self.tensor!r}: {line}"
        return line if self.source in line else f"{self.source}: {line}"


@dataclass(frozen=True)
class SourceRow:
    """A source: a model, one checkpoint of a series, or one snapshot of a store.

    Attributes:
        name: a short name, different for all sources of a report.
        path: its path or URL.
        form: "plain file", "packed file", "folder" or "snapshot".
        step: its number in the series; None outside of a series.
        n_tensors: how many tensors it has.
        nbytes: bytes of the tensors, unpacked.
        packed_nbytes: bytes that it takes as it lies there, if it is packed; otherwise None. Equals
            what `packhorse inspect` says of a file. Of a snapshot, the bytes that a restore reads,
            some of which other snapshots share.
    """

    name: str
    path: str
    form: str
    step: int | None
    n_tensors: int
    nbytes: int
    packed_nbytes: int | None


@dataclass(frozen=True)
class PlaneRow:
    """One plane of a tensor.

    Attributes:
        name: as `packhorse inspect` names it.
        bits: bits of an element in this plane.
        entropy: entropy of its values, in bits an element: of order 0, in each piece as long as a
            chunk, on average.
        packed_bits: bits an element that it takes when packed at the level "default"; None if the
            tensor is not packed plane by plane.
        modes: chunks by mode, at the level "default"; of the sample, or of the packed file.
    """

    name: str
    bits: int
    entropy: float
    packed_bits: float | None
    modes: dict[str, int]


@dataclass(frozen=True)
class TensorRow:
    """One tensor of the newest source.

    Attributes:
        source: the `SourceRow.name`.
        name: the tensor's name.
        dtype: safetensors' name of its dtype.
        shape: its shape.
        role: "weights", "masters", "first moments" or "second moments".
        kind: "embedding", "attention", "feed-forward", "norm", "output", "bias" or "other".
        layer: the number of its layer, from its name; None if it is in no layer.
        nbytes: its bytes.
        sampled_nbytes: how many of them were looked at.
        levels: expected bytes by level: "fast", "default" and "max".
        bound: what its planes would take at their entropy: no coder does better that has one table
            for each plane of a chunk and codes values one by one. Contexts can.
        packed_nbytes: bytes of its frame if the source is packed; otherwise None.
        split: how elements become planes, as `packhorse inspect` says.
        reason: why it is packed so, in one line.
        planes: its planes, the most significant first.
        bit_entropies: entropy of each bit of an element, the most significant first.
        noise_bits: bits of an element that are noise: whose entropy is above .99.
    """

    source: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    kind: str
    layer: int | None
    nbytes: int
    sampled_nbytes: int
    levels: dict[str, Estimate]
    bound: Estimate
    packed_nbytes: int | None
    split: str
    reason: str
    planes: tuple[PlaneRow, ...]
    bit_entropies: tuple[float, ...]
    noise_bits: int


@dataclass(frozen=True)
class ExponentRow:
    """How often each exponent occurs, among floats of one role, kind and dtype.

    Attributes:
        role, kind, dtype: as in `TensorRow`.
        first: the power of two of the first count. Values of exponent e are from 2^e to below
            2^(e+1). Zeros and subnormal numbers are left out.
        shares: the share of all values with this exponent, and the ones after it.
        zeros: the share of zeros and subnormal numbers.
    """

    role: str
    kind: str
    dtype: str
    first: int
    shares: tuple[float, ...]
    zeros: float


@dataclass(frozen=True)
class StepKindRow:
    """Tensors of one role, kind and dtype in one checkpoint of a series.

    Attributes:
        role, kind, dtype: as in `TensorRow`.
        nbytes: their bytes, without tensors that are damaged here or in the checkpoint before.
        full: bytes if packed on their own, at the level "default"; 0 if other tensors of the
            checkpoint equal them. A rounded copy is packed against its master.
        delta: bytes if packed as differences from the checkpoint before, or on their own where that
            is shorter; 0 if nothing changed; None for the first checkpoint.
        unchanged: share of their values whose bits are those of the checkpoint before; None if they
            cannot be compared.
    """

    role: str
    kind: str
    dtype: str
    nbytes: int
    full: Estimate
    delta: Estimate | None
    unchanged: float | None


@dataclass(frozen=True)
class StepRow:
    """One checkpoint of a series.

    Attributes:
        name, step: as in `SourceRow`.
        nbytes, full, delta, unchanged: as in `StepKindRow`, of all tensors.
        kinds: by role, kind and dtype.
        stored_nbytes: what the store grew by, as `packhorse snapshot show` says; None outside of a
            store.
        max_deltas: the longest chain of deltas that a restore decodes; None outside of a store.
        needed_nbytes: bytes that a restore reads; None outside of a store.
    """

    name: str
    step: int
    nbytes: int
    full: Estimate
    delta: Estimate | None
    unchanged: float | None
    kinds: tuple[StepKindRow, ...]
    stored_nbytes: int | None = None
    max_deltas: int | None = None
    needed_nbytes: int | None = None


@dataclass(frozen=True)
class StepSizeRow:
    """How far the values of one exponent moved from the last checkpoint but one to the last.

    Attributes:
        role: as in `TensorRow`.
        dtype: as in `TensorRow`.
        exponent: the power of two of the values before.
        share: share of the role's values that have it.
        median, high: half and nine tenths of them moved at most so many representable values.
    """

    role: str
    dtype: str
    exponent: int
    share: float
    median: float
    high: float


@dataclass(frozen=True)
class Series:
    """A series of checkpoints, or a store of snapshots.

    Attributes:
        steps: the checkpoints in order.
        gaps: bytes of the newest checkpoint as a delta against the checkpoint so many steps before:
            (steps, bytes) for each earlier checkpoint, the nearest first; of more than 32, for
            about four to each doubling.
        step_sizes: how far values moved at the end, by exponent.
    """

    steps: tuple[StepRow, ...]
    gaps: tuple[tuple[int, Estimate], ...]
    step_sizes: tuple[StepSizeRow, ...]


@dataclass(frozen=True)
class PolicyRow:
    """Taking a snapshot every `every` steps, with chains of at most `chain` deltas.

    Attributes:
        every: steps from one snapshot to the next.
        chain: how many deltas build on one another before a snapshot is stored in full.
        nbytes: bytes that the store grows by in 1,000 steps.
        write_seconds: seconds of packing in 1,000 steps.
        stall_seconds: seconds in 1,000 steps that the job waits: for copies, if packing goes on in
            the background, and for packing that is not done when the next snapshot is due.
        restore_seconds: seconds of reading and decoding, on average over the chain.
        lost_steps: steps that a failure costs, on average.
    """

    every: int
    chain: int
    nbytes: int
    write_seconds: float
    stall_seconds: float
    restore_seconds: float
    lost_steps: float


@dataclass(frozen=True)
class Policy:
    """How often to take snapshots.

    Attributes:
        rows: all pairs that were computed.
        recommended: the number of the recommended row.
        reason: why, in one sentence.
        assumptions: what the figures rest on, each a sentence: measured rates, rate of the disk,
            seconds of a step, gaps that were extrapolated.
    """

    rows: tuple[PolicyRow, ...]
    recommended: int
    reason: str
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class EngineRow:
    """One way to pack a sample.

    Attributes:
        name: such as "zstd 3", "zstd 3, grouped" or "Packhorse default".
        is_ours: whether it is Packhorse.
        packed_nbytes: bytes of the packed sample.
        nbytes: bytes of the sample that this way got; slow ways get less.
        pack_gb_per_s, unpack_gb_per_s: 10^9 uncompressed bytes a second, on one thread; None if the
            way was only sized.
        loses: whether a way of ours packs shorter and unpacks and packs faster (of a rival), or
            whether a rival does (of ours).
        note: such as "size only"; empty if there is nothing to say.
    """

    name: str
    is_ours: bool
    packed_nbytes: int
    nbytes: int
    pack_gb_per_s: float | None
    unpack_gb_per_s: float | None
    loses: bool
    note: str = ""


@dataclass(frozen=True)
class EngineTable:
    """Ways to pack one sample, compared.

    Attributes:
        title: what was sampled, such as "weights, BF16" or "weights, BF16, against step 100".
        has_base: whether the ways had a base.
        rows: the ways.
        skipped: ways that were not tried, with the reason.
    """

    title: str
    has_base: bool
    rows: tuple[EngineRow, ...]
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryFormat:
    """A matrix of BF16 in one format of packed weights (docs/format.md, section 12).

    Attributes:
        nbytes: its bytes.
        exceptions: share of elements outside of the rows' windows.
    """

    nbytes: Estimate
    exceptions: float


@dataclass(frozen=True)
class MemoryRow:
    """What a tensor would take in memory, packed.

    Attributes:
        source, name, dtype, shape, nbytes: as in `TensorRow`.
        layer: as in `TensorRow`.
        device_nbytes: bytes in memory of a GPU, as `packhorse.device` packs matrices of BF16; None
            if it does not pack this tensor.
        device_note: the code's bits, or why it stays as it is.
        exceptions: share of elements outside of the rows' windows there; None likewise.
        formats: what the tensor takes in each format, "W12" and "W11", whichever is chosen; empty
            likewise.
        host_nbytes: bytes in memory of the host, as `packhorse.host` packs tables; None if the
            tensor is no table.
        host_note: the format of the rows, or why there is none.
        pulled: bytes pulled for a row of the table / bytes of a plain row; None likewise.
    """

    source: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    layer: int | None
    device_nbytes: Estimate | None
    device_note: str
    exceptions: float | None
    host_nbytes: Estimate | None
    host_note: str
    pulled: float | None
    formats: dict[str, MemoryFormat] = field(default_factory=dict)


@dataclass(frozen=True)
class ChangeRow:
    """A tensor of two models.

    Attributes:
        name: its name in the second model, or in the first if the second lacks it.
        change: "equal", "changed", "moved" (equal to a tensor of another name), "replaced" (another
            dtype or shape), "new" or "removed".
        was: its name in the first model if it moved, or its dtype and shape there if it was
            replaced; otherwise None.
        dtype, shape, nbytes, kind, layer: as in `TensorRow`.
        changed: share of its values that differ in their bits; None if they cannot be compared.
        full: bytes if packed on its own.
        delta: bytes in a file that is packed against the first model; None if that has no tensor
            that this one can be packed against. Bases are found by name, so a tensor that moved is
            packed on its own.
    """

    name: str
    change: str
    was: str | None
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kind: str
    layer: int | None
    changed: float | None
    full: Estimate
    delta: Estimate | None


@dataclass(frozen=True)
class Changes:
    """What changed from one model to another.

    Attributes:
        base: the first model's name.
        tuned: the second model's name.
        rows: the tensors, in the order of the second model, then those that it lacks.
    """

    base: str
    tuned: str
    rows: tuple[ChangeRow, ...]


@dataclass(frozen=True)
class Findings:
    """All that a report says. A section that the sources give no answer to is None or empty.

    Attributes:
        title: what the report is about.
        version: of Packhorse.
        made: when the report was made, in UTC, as ISO 8601.
        shape: "models", "series" or "pair".
        settings: what the caller asked for.
        sources: the sources, in order.
        tensors: the tensors: of all models, of the newest checkpoint, or of the second model.
        exponents: how often each exponent occurs.
        series: over training.
        policy: how often to take snapshots.
        engines: other ways to pack samples.
        memory: what the tensors would take in memory, packed.
        changes: what changed from one model to another.
        problems: what could not be read or compared.
    """

    title: str
    version: str
    made: str
    shape: str
    settings: Settings
    sources: tuple[SourceRow, ...]
    tensors: tuple[TensorRow, ...]
    exponents: tuple[ExponentRow, ...]
    series: Series | None
    policy: Policy | None
    engines: tuple[EngineTable, ...]
    memory: tuple[MemoryRow, ...]
    changes: Changes | None
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        """The findings as values of JSON: dicts, lists, text, numbers, None."""
        return asdict(self)
