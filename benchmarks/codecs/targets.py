"""The targets of Packhorse, and whether the figures of a run reach them.

`TARGETS` is the whole list: for each kind of data some checks against a fixed bar, or against
a rival in the same run on the same data. `SNAPSHOT_TARGETS` is the list for pairs of checkpoints.
A check whose data or rivals are not in the run says so; it never passes by being left out.
Speeds are the medians of one thread, unless the check says otherwise.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "DATA",
    "FIRST_48_MB",
    "RIVALS",
    "SNAPSHOT_TARGETS",
    "TARGETS",
    "Check",
    "Target",
    "Verdict",
    "judge",
]

Row = dict[str, Any]
OURS = "packhorse"
COPY = "np.copyto"
FIRST_48_MB = "model_fp32_first_48mb"
WAYS = ("encode", "decode")


@dataclass(frozen=True)
class Verdict:
    """One line of the table.

    Attributes:
        target: the kind of data.
        data: name of the data set.
        codec: our level.
        figure: the figure that is compared.
        bar: the value that it must reach.
        measured: its value, or why there is no figure.
        met: whether that is enough; None without a figure.
    """

    target: str
    data: str
    codec: str
    figure: str
    bar: str
    measured: str
    met: bool | None


class Check(Protocol):
    """One demand on one of our rows."""

    @property
    def figure(self) -> str:
        """What is compared."""

    @property
    def demand(self) -> str:
        """The demand, in words that need no figures."""

    def compare(self, ours: Row, rows: list[Row]) -> tuple[float, float, str] | None:
        """Our figure, the least figure needed, and both in words; None if a rival is missing."""


@dataclass(frozen=True)
class MinimumRatio:
    """A ratio against a fixed bar."""

    bar: float
    figure: str = "ratio"

    @property
    def demand(self) -> str:
        return f"at least {self.bar:g}"

    def compare(self, ours: Row, rows: list[Row]) -> tuple[float, float, str]:
        return ours["ratio"], self.bar, _number(ours["ratio"])


@dataclass(frozen=True)
class MinimumSpeed:
    """A speed against a fixed bar, in GB/s."""

    figure: str
    bar: float

    @property
    def demand(self) -> str:
        return f"at least {self.bar:g} GB/s"

    def compare(self, ours: Row, rows: list[Row]) -> tuple[float, float, str]:
        speed = ours[self.figure][0]
        return speed, self.bar, f"{speed:.2f} GB/s"


@dataclass(frozen=True)
class Smaller:
    """How many times smaller we are than the smallest of some rivals, which must all take part."""

    factor: float
    rivals: tuple[str, ...]
    figure: str = "ratio"

    @property
    def demand(self) -> str:
        times = "not below" if self.factor == 1 else f"at least {self.factor:g} times"
        return f"{times} the best of {', '.join(self.rivals)}"

    def compare(self, ours: Row, rows: list[Row]) -> tuple[float, float, str] | None:
        others = [row for row in _rivals(rows) if row["codec"] in self.rivals]
        if len(others) < len(self.rivals):
            return None
        best = max(others, key=lambda row: row["ratio"])
        gain = ours["ratio"] / best["ratio"]
        words = f"{gain:.3f} times: {_number(ours['ratio'])}; {best['codec']} "
        return gain, self.factor, words + _number(best["ratio"])


@dataclass(frozen=True)
class Denser:
    """A ratio against a rival's, which it may miss by a factor of `within`."""

    rival: str
    within: float = 0.0
    figure: str = "ratio"

    @property
    def demand(self) -> str:
        slack = f"within {self.within:.1%} of" if self.within else "not below"
        return f"{slack} {self.rival}'s"

    def compare(self, ours: Row, rows: list[Row]) -> tuple[float, float, str] | None:
        rival = _find(rows, self.rival)
        if rival is None:
            return None
        words = f"{_number(ours['ratio'])}; {self.rival} {_number(rival['ratio'])}"
        return ours["ratio"], rival["ratio"] * (1 - self.within), words


@dataclass(frozen=True)
class DensestBut:
    """A ratio against those of all rivals, except one and its variants.

    `dense` must take part, so that nothing is gained by leaving out the best rival.
    """

    exempt: str
    dense: str
    figure: str = "ratio"

    @property
    def demand(self) -> str:
        return f"above every rival's but {self.exempt}'s"

    def compare(self, ours: Row, rows: list[Row]) -> tuple[float, float, str] | None:
        others = [row for row in _rivals(rows) if not row["codec"].startswith(self.exempt)]
        if _find(others, self.dense) is None:
            return None
        best = max(others, key=lambda row: row["ratio"])
        words = f"{_number(ours['ratio'])}; {_best(best, others)} {_number(best['ratio'])}"
        return ours["ratio"], best["ratio"], words


@dataclass(frozen=True)
class Faster:
    """A speed against a rival's times a factor."""

    figure: str
    rival: str
    factor: float = 1.0

    @property
    def demand(self) -> str:
        times = "not below" if self.factor == 1 else f"at least {self.factor:g} times"
        return f"{times} {self.rival}'s"

    def compare(self, ours: Row, rows: list[Row]) -> tuple[float, float, str] | None:
        rival = _find(rows, self.rival)
        if rival is None:
            return None
        mine, theirs = ours[self.figure][0], rival[self.figure][0]
        return mine / theirs, self.factor, f"{mine / theirs:.2f} times"


@dataclass(frozen=True)
class FastestAbove:
    """A speed against those of all rivals above a ratio."""

    figure: str
    ratio: float

    @property
    def demand(self) -> str:
        return f"above every rival's of ratio over {self.ratio}"

    def compare(self, ours: Row, rows: list[Row]) -> tuple[float, float, str] | None:
        others = [row for row in _rivals(rows) if row["ratio"] > self.ratio]
        if not others:
            return None
        best = max(others, key=lambda row: row[self.figure][0])
        words = f"{ours[self.figure][0]:.2f}; {_best(best, others)} {best[self.figure][0]:.2f} GB/s"
        return ours[self.figure][0], best[self.figure][0], words


@dataclass(frozen=True)
class Gain:
    """The gain from a second thread, with both measured by the wall clock."""

    way: str
    factor: float

    @property
    def figure(self) -> str:
        return f"{self.way}, two threads"

    @property
    def demand(self) -> str:
        return f"at least {self.factor:g} times one thread's"

    def compare(self, ours: Row, rows: list[Row]) -> tuple[float, float, str] | None:
        two = _find(rows, ours["codec"], threads=2)
        if two is None:
            return None
        gain = two[f"{self.way}_wall"] / ours[f"{self.way}_wall"]
        return gain, self.factor, f"{gain:.2f} times"


@dataclass(frozen=True)
class Target:
    """Checks of one level of ours on some data.

    Attributes:
        name: the kind of data, and the level if it is not the default one.
        data: names of data sets.
        checks: the demands on each of them.
        codec: our level.
        forced_only: whether only runs on a forced code path must reach it.
    """

    name: str
    data: tuple[str, ...]
    checks: tuple[Check, ...]
    codec: str = OURS
    forced_only: bool = False


def _faster(rival: str, encode: float, decode: float) -> tuple[Check, Check]:
    return Faster("encode", rival, encode), Faster("decode", rival, decode)


_BF16 = (
    DensestBut("pcodec", dense="openzl-fse"),
    Denser("pcodec", within=0.001),
    *(FastestAbove(way, 1.4) for way in WAYS),
    *_faster("zipnn", 2.8, 2.4),
    Faster("decode", COPY, 0.6),
    *(Gain(way, 1.85) for way in WAYS),
)
_BF16_MAX = (Denser("pcodec"), Denser("pcodec-12"), Faster("decode", "zipnn"))
_BF16_FAST = (
    MinimumRatio(1.40),
    Denser("blosc2-bitshuffle-lz4"),
    *_faster("blosc2-bitshuffle-lz4", 1.5, 1.5),
)
_FP32 = (Denser("pcodec"), *_faster("zipnn", 2.4, 1.4))
_FIRST_MOMENT = (Denser("zipnn"), Denser("openzl"), Denser("openzl-fse"))
_SECOND_MOMENT = (Denser("planes+bz2"), Faster("decode", "zipnn"))
_BF16_DATA = ("model_bf16", "train_w16", "llm_bf16")
_FP32_DATA = ("model_fp32", FIRST_48_MB, "train_w32")

TARGETS: tuple[Target, ...] = (
    Target("bf16 weights", ("model_bf16", "train_w16"), (MinimumRatio(1.507), *_BF16)),
    Target("bf16 weights", ("llm_bf16",), _BF16),
    Target("bf16 weights, fast", _BF16_DATA, _BF16_FAST, codec="packhorse-fast"),
    Target(
        "bf16 weights, max",
        ("model_bf16",),
        (MinimumRatio(1.517), *_BF16_MAX),
        codec="packhorse-max",
    ),
    Target("bf16 weights, max", ("train_w16", "llm_bf16"), _BF16_MAX, codec="packhorse-max"),
    Target("fp32 weights", ("model_fp32",), _FP32),
    Target("fp32 weights", (FIRST_48_MB,), (MinimumRatio(1.235), *_FP32)),
    Target("fp32 weights", ("train_w32",), (MinimumRatio(1.2035), *_FP32)),
    Target(
        "fp16 weights",
        ("model_fp16",),
        (MinimumRatio(1.182), Denser("zipnn"), *_faster("zipnn", 1.6, 1.6)),
    ),
    Target("Adam's second moment, fp32", ("train_v32",), (MinimumRatio(1.29), *_SECOND_MOMENT)),
    Target("Adam's second moment, bf16", ("train_pv16",), (MinimumRatio(1.83), *_SECOND_MOMENT)),
    Target("Adam's first moment, fp32", ("train_m32",), (MinimumRatio(1.20), *_FIRST_MOMENT)),
    Target("Adam's first moment, bf16", ("train_pm16",), (MinimumRatio(1.51), *_FIRST_MOMENT)),
    Target(
        "fp8 weights",
        ("fp8_e4m3", "fp8_block", "fp8_e5m2"),
        (Denser("zipnn"), *_faster("zipnn", 2.0, 2.0)),
    ),
    Target("fp4 in pairs", ("mxfp4_blocks",), (Denser("zipnn"), Denser("zstandard-3"))),
    Target(
        "pairs of 4-bit numbers",
        ("nf4", "gptq_int4"),
        (Denser("zstandard-3"), Denser("pcodec-12"), *_faster("zstandard-1", 1.25, 1.25)),
    ),
    Target("random bytes", ("random_u8",), (MinimumRatio(0.9999), *_faster(COPY, 0.9, 0.9))),
    Target("zeros", ("zeros_bf16",), _faster(COPY, 1.0, 1.0)),
    Target(
        "token ids and masks",
        ("token_ids_int64", "masks_bool"),
        (Denser("zstandard-3"), Faster("decode", "zstandard-3")),
    ),
    Target(
        "integers that repeat or rise",
        (
            *("token_ids_int64", "token_ids_u16", "token_ids_padded", "event_times"),
            *("graph_pairs_int64", "graph_columns_int64"),
        ),
        (Denser("planes+zstandard-3"), Denser("openzl", within=0.1), *_faster("openzl", 3, 1)),
    ),
    Target(
        "integers that repeat, max",
        ("token_ids_int64", "token_ids_u16", "token_ids_padded"),
        (Denser("openzl", within=0.01), *_faster("openzl", 1, 1)),
        codec="packhorse-max",
    ),
    Target(
        "weights on a forced path",
        (*_BF16_DATA, *_FP32_DATA, "model_fp16"),
        (Faster("decode", "zipnn"),),
        forced_only=True,
    ),
)

_PAIR = (MinimumSpeed("encode", 1.3), MinimumSpeed("decode", 2.1), *_faster("zipnn-delta", 1, 1))
_NEIGHBOURS = ("zipnn-delta", "bitx-like", "xor+pcodec", "xor+openzl")


def _pair(bar: float, *rivals: str) -> tuple[Check, ...]:
    return MinimumRatio(bar), Smaller(1, (*_NEIGHBOURS, *rivals)), *_PAIR


SNAPSHOT_TARGETS: tuple[Target, ...] = (
    Target("bf16 weights, 1 step apart", ("bf16_1",), _pair(11.8)),
    Target("bf16 weights, 8 steps apart", ("bf16_8",), _pair(4.4)),
    Target("bf16 weights, 128 steps apart", ("bf16_128",), _pair(2.0)),
    Target("pure-bf16 training, 1 step apart", ("pure_bf16_1",), _pair(16.0)),
    Target("fp32 masters, 1 step apart", ("fp32_1",), _pair(1.92)),
    Target("1 % of bf16 values changed", ("bf16_sparse",), _pair(130.0, "index+value")),
    Target(
        "whole state, 128 steps apart",
        ("state_128",),
        (Smaller(1.35, ("zipnn", "zipnn-delta", "dcp-zstd")), Smaller(1, _NEIGHBOURS)),
    ),
)

DATA = tuple(dict.fromkeys(name for target in TARGETS for name in target.data))
# Enough for every demand on speed.
RIVALS = (COPY, "zipnn", "openzl", "zstandard-3", "blosc2-bitshuffle-lz4")


def judge(
    rows: Iterable[Row], *, forced: bool, targets: Iterable[Target] = TARGETS
) -> list[Verdict]:
    """Every demand, in order; one line for data that the run does not have.

    Args:
        rows: the rows of one run.
        forced: whether the run was on a forced code path.
        targets: the targets to check.
    """
    kept = list(rows)
    out = []
    for target in targets:
        for data in target.data if forced or not target.forced_only else ():
            of_set = [row for row in kept if row["data"] == data]
            if of_set:
                out += [_verdict(target, data, check, of_set) for check in target.checks]
            else:
                labels = (target.name, data, target.codec, "all", "")
                out.append(Verdict(*labels, "no such data in this run", None))
    return out


def _verdict(target: Target, data: str, check: Check, rows: list[Row]) -> Verdict:
    ours = _find(rows, target.codec)
    found = check.compare(ours, rows) if ours else None
    labels = (target.name, data, target.codec, check.figure, check.demand)
    if found is None:
        return Verdict(*labels, "a codec is missing in this run", None)
    have, need, words = found
    return Verdict(*labels, words, have >= need)


def _find(rows: list[Row], codec: str, *, threads: int = 1) -> Row | None:
    found = (row for row in rows if row["codec"] == codec and row["threads"] == threads)
    return next(found, None)


def _rivals(rows: list[Row]) -> list[Row]:
    return [
        row for row in rows if row["threads"] == 1 and not row["codec"].startswith((OURS, COPY))
    ]


def _best(best: Row, others: list[Row]) -> str:
    return f"best of {len(others)}, {best['codec']},"


def _number(ratio: float) -> str:
    return f"{ratio:.4f}" if ratio < 100 else f"{ratio:.0f}"
