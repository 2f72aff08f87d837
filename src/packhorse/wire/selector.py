"""Chooses how an operation runs: PyTorch's own, in pieces, or packed. All ranks choose the same.

Nobody knows beforehand which is faster: it depends on the link, on the values, and on what else the
processors do. So the selector measures. For each kind of call (operation, dtype, size) it runs
a *trial*: some calls each way, one after the other, timed from end to end. The ranks tell each
other their times, and the slowest rank counts. All then know the same times, so all draw the same
conclusion, without a vote.

The first call each way is not counted: it takes fresh memory. Then each way is timed three times,
and ways that are close to the fastest, or that noise does not tell from it, up to twelve times.
Another way than PyTorch's own must win by 2 %, and more often than by chance (`_is_clear`): a wrong
choice costs more than a gain that was missed, and stays for long.

Between trials, calls run the chosen way and nothing extra is sent. A trial costs what its slower
calls lose. The next one comes after so many calls that all trials together take at most 1 % of the
time, and never sooner than twice as many calls as the last time, up to 4096, unless the times have
changed, or a way seems faster and that is not clear yet. Times have changed if three in a row say
so, not one.

A rank tells its time of one call before the next one begins, in an *asking* exchange. It also lets
all ranks begin the call to be timed at once, so that waiting for a late rank is not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import sqrt
from statistics import median
from typing import NamedTuple

from packhorse.wire.carrier import Effort
from packhorse.wire.rounds import PIECE_NBYTES

__all__ = ["Arm", "Choice", "Key", "Rates", "Row", "Selector", "predict", "table_of"]

_MIN_GAIN = 0.02  # what another way than PyTorch's own must save
_MAX_TRIAL_SHARE = 0.01  # of all time, that trials may lose
_N_REPEATS = 3  # of each way in the first trial, after one that is not counted
_N_KEPT = 12  # latest times of each way, and the most repeats of a way in the first trial
_N_CLOSE = 7  # repeats of those that are close in the first trial, at least
_CLEAR = 1.64  # standard deviations of chance: one in twenty ways that are no faster seem so
_CLOSE = 1.15  # ways that take up to so many times as long as the fastest
_HOPELESS = 3  # a way that takes so many times as long is not timed again in a trial
_CHANGED = 1.5  # times that differ by this factor from before are measured anew
_N_DOUBTS = 3  # of which most must differ
_MIN_CALLS, _MAX_CALLS = 32, 4096  # between trials
_MIN_NBYTES = 4096  # less is not worth a trial


class Arm(IntEnum):
    """A way to run an operation."""

    TORCH = 0
    PIECES = 1
    PACKED = 2


class Key(NamedTuple):
    """Calls that are expected to take alike times.

    Attributes:
        operation: such as "all_gather".
        dtype: such as "bfloat16".
        size_class: log2 of the bytes that a rank holds, rounded up; None if ranks may have
            different sizes, so that they do not know each other's.
        label: what the caller calls them.
    """

    operation: str
    dtype: str
    size_class: int | None
    label: str = ""

    def __str__(self) -> str:
        size = "any size" if self.size_class is None else f"to {_size_words(1 << self.size_class)}"
        return " ".join(filter(None, (self.operation, self.dtype, size, self.label)))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a link and a codec do. Given to `Collectives`, they take the place of measurements.

    Attributes:
        link: GB/s that a rank sends and receives at the same time.
        ratio: bytes before packing, divided by those after it.
        encode: GB/s before packing.
        decode: GB/s before packing.
        latency: seconds that an exchange of a few bytes takes.
    """

    link: float
    ratio: float
    encode: float
    decode: float
    latency: float = 1e-4


class Choice(NamedTuple):
    """How the next call runs.

    Attributes:
        arm: the way.
        is_timed: whether it is timed.
    """

    arm: Arm
    is_timed: bool = False


class Row(NamedTuple):
    """What is known of one kind of call.

    Attributes:
        key: the kind.
        arm: how it runs now.
        why: why, in one sentence.
        n_calls: how many there were.
        n_timed: how many of them were timed.
        nbytes: bytes of a call of the last trial, on the rank that has the most; 0 before one.
        seconds: what such a call takes each way, on the slowest rank.
        link: GB/s that a rank received in the faster way that does not pack.
        encode: GB/s of encoding on this rank; 0 if nothing was packed. The same for `decode`.
        decode: GB/s of decoding.
        ratio: what packing made of the bytes of this rank; 0 if nothing was packed.
    """

    key: Key
    arm: Arm
    why: str
    n_calls: int
    n_timed: int
    nbytes: int
    seconds: Mapping[Arm, float]
    link: float
    encode: float
    decode: float
    ratio: float


def predict(rates: Rates, nbytes: int) -> dict[Arm, float]:
    """The seconds that a call takes in theory.

    Args:
        rates: of the link and the codec.
        nbytes: bytes that a rank receives, before packing.

    Returns:
        The seconds without packing and with it. Packing overlaps with sending, apart from the
        first piece and the last; encoding and decoding take the same processor's time.
    """
    codec = 1 / rates.encode + 1 / rates.decode
    sending = nbytes / 1e9 / rates.link
    packing = nbytes / 1e9 * codec
    ends = min(nbytes, PIECE_NBYTES) / 1e9 * codec
    packed = 2 * rates.latency + max(sending / rates.ratio, packing) + ends
    return {Arm.TORCH: rates.latency + sending, Arm.PACKED: packed}


class _Course:
    """What happens with the calls of one kind."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.arms = arms
        self.arm = arms[0]
        self.why = "not tried yet"
        self.times: dict[Arm, deque[float]] = {arm: deque(maxlen=_N_KEPT) for arm in arms}
        self.queue = _in_turn(arms, 1 + _N_REPEATS)
        self.cold = set(arms)  # ways that have not run yet
        self.doubts: list[float] = []  # times of the way in use that differ from those before
        self.is_first = True  # the trial that goes on is the first one, or starts anew
        self.trial: list[tuple[Arm, float]] = []  # seconds for each byte
        self.timed: Arm | None = None  # its time is not told yet
        self.own_seconds = 0.0
        self.nbytes = 0  # of the timed call, on the rank that has the most
        self.calls_left = 0
        self.span = _MIN_CALLS // 2
        self.n_calls = self.n_timed = 0
        self.effort = Effort()

    def tell(self, arm: Arm, seconds: float) -> None:
        """Takes note of a joint time."""
        time = seconds / max(self.nbytes, 1)
        if arm in self.cold:
            self.cold.remove(arm)
            return
        if arm == self.arm and not self.is_first and self.doubt(time):
            return
        self.times[arm].append(time)
        self.trial.append((arm, time))
        if len(self.trial) == len(self.arms):  # all were tried once
            possible = self.within(_HOPELESS)
            self.queue = deque(arm for arm in self.queue if arm in possible)
        if self.is_first and not self.queue:
            self.queue.extend(self.unsure())

    def doubt(self, time: float) -> bool:
        """Whether a time of the way in use tells that times may have changed. Then the way is timed
        again, and if most of three times say so, all ways are."""
        usual = median(self.times[self.arm])
        is_usual = usual / _CHANGED <= time <= usual * _CHANGED
        if is_usual and not self.doubts:
            return False
        self.doubts.append(time)
        if len(self.doubts) < _N_DOUBTS:
            self.queue.appendleft(self.arm)
            return True
        time = median(self.doubts)
        self.doubts.clear()
        if not usual / _CHANGED <= time <= usual * _CHANGED:
            self.restart()
        return False

    def unsure(self) -> list[Arm]:
        """The ways that must be timed once more before a choice; none if it is clear."""
        times, known = self.times, self.known()
        chosen, close = _best_of(times), self.within(_CLOSE)
        if len(close) > 1 and min(len(times[arm]) for arm in close) < _N_CLOSE:
            return close
        best = min(known, key=lambda arm: known[arm])
        is_open = best != chosen and known[best] < known[chosen] * (1 - _MIN_GAIN)
        if is_open and min(len(times[arm]) for arm in (best, chosen)) < _N_KEPT:
            return [chosen, best]
        return []

    def within(self, factor: float) -> list[Arm]:
        """The ways that usually take at most so many times as long as the fastest."""
        known = self.known()
        best = min(known.values())
        return [arm for arm, time in known.items() if time <= best * factor]

    def restart(self) -> None:
        """Forgets all times, because they have changed."""
        for times in self.times.values():
            times.clear()
        self.trial.clear()
        self.queue = _in_turn(self.arms, _N_REPEATS)
        self.is_first = True
        self.span = _MIN_CALLS // 2

    def known(self) -> dict[Arm, float]:
        """The usual time of each way, for each byte."""
        return {arm: median(times) for arm, times in self.times.items() if times}

    def settle(self) -> None:
        """Draws the conclusion of a trial."""
        known = self.known()
        before, self.arm = self.arm, _best_of(self.times)
        self.why = _why(self.arm, known)
        best = known[self.arm]
        loss = sum(max(time - best, 0) for _, time in self.trial)
        is_sure = before == self.arm and min(known.values()) >= best * (1 - _MIN_GAIN)
        self.span = min(2 * self.span, _MAX_CALLS) if is_sure else _MIN_CALLS
        self.calls_left = max(self.span, int(loss / best / _MAX_TRIAL_SHARE))
        self.trial.clear()
        self.queue = deque(self.arms)
        self.is_first = False


def _in_turn(arms: Sequence[Arm], n_repeats: int) -> deque[Arm]:
    """Each way so many times; every time another one begins, so that none always follows the
    same one."""
    arms, n = list(arms), len(arms)
    return deque(arms[(i + shift) % n] for shift in range(n_repeats) for i in range(n))


def _fastest(known: Mapping[Arm, float]) -> Arm:
    """The way to take; one that is not PyTorch's own must be 2 % faster."""
    best = min(known)
    for arm in sorted(known):
        if known[arm] < known[best] * (1 - _MIN_GAIN):
            best = arm
    return best


def _best_of(times: Mapping[Arm, Sequence[float]]) -> Arm:
    """The way to take by what was measured; another than PyTorch's own must be clearly faster."""
    first = min(arm for arm in times if times[arm])
    possible = {
        arm: median(found)
        for arm, found in times.items()
        if found and (arm == first or _is_clear(found, times[first]))
    }
    return _fastest(possible)


def _is_clear(times: Sequence[float], others: Sequence[float]) -> bool:
    """Whether times are shorter than others more often than chance makes them (Mann, Whitney)."""
    n, m = len(times), len(others)
    n_shorter = sum(time < other for time in times for other in others)
    deviation = sqrt((n + m + 1) / (12 * n * m))
    return n_shorter / (n * m) >= min(0.5 + _CLEAR * deviation, 1)


def _why(arm: Arm, known: Mapping[Arm, float]) -> str:
    others = {other: time for other, time in known.items() if other != arm}
    if not others:
        return "the only way for these tensors"
    nearest = min(others, key=lambda other: others[other])
    ratio = others[nearest] / known[arm]
    if ratio >= 1:
        return f"{ratio:.2f} times as fast as {nearest.name.lower()}"
    if ratio >= 1 - _MIN_GAIN:
        return f"{nearest.name.lower()} saves {1 - ratio:.1%} only; {_MIN_GAIN:.0%} are needed"
    return f"{nearest.name.lower()} seems to save {1 - ratio:.1%}, but times vary too much to tell"


class Selector:
    """Chooses, for each kind of call, and can say why.

    Args:
        size: how many ranks the group has.
        rates: what to choose by, instead of measuring; the same on all ranks.
    """

    def __init__(self, size: int, rates: Rates | None = None) -> None:
        self._size = size
        self._rates = rates
        self._courses: dict[Key, _Course] = {}

    def glance(self, key: Key, arms: Sequence[Arm], nbytes: int) -> Choice | None:
        """How the next call runs, if the ranks need not ask each other.

        Args:
            key: the kind of the call.
            arms: the ways that there are, PyTorch's own first if it is one.
            nbytes: the bytes that this rank holds.

        Returns:
            The choice; None if the ranks must ask each other, and then `ask`.
        """
        course = self._course(key, arms)
        course.n_calls += 1
        if len(course.arms) == 1:
            course.why = "the only way for these tensors"
            return Choice(course.arm)
        if key.size_class is not None and nbytes < _MIN_NBYTES:
            course.why = f"less than {_MIN_NBYTES} bytes are not worth packing"
            return Choice(course.arm)
        if self._rates is not None:
            # Ranks that may have different sizes cannot choose by them.
            size = 1 << (30 if key.size_class is None else key.size_class)
            times = predict(self._rates, int(size * self._share(key)))
            known = {arm: time for arm, time in times.items() if arm in course.arms}
            course.arm = _fastest(known or {course.arm: 1.0})
            course.why = f"by the given rates: {_why(course.arm, known or {course.arm: 1.0})}"
            return Choice(course.arm)
        if not course.calls_left:
            return None
        course.calls_left -= 1
        return Choice(course.arm)

    def own_seconds(self, key: Key) -> float:
        """How long the last timed call took this rank, to tell the others."""
        return self._courses[key].own_seconds

    def ask(self, key: Key, seconds: float, nbytes: int) -> Choice:
        """Goes on with a trial. All ranks pass the same, and get the same.

        Args:
            key: the kind of the call.
            seconds: what the last timed call took the slowest rank.
            nbytes: the bytes that the rank with the most has in this call.

        Returns:
            The choice for this call.
        """
        course = self._courses[key]
        if course.timed is not None:
            course.tell(course.timed, seconds)
            course.timed = None
        if course.queue:
            course.timed, course.nbytes = course.queue.popleft(), nbytes
            course.n_timed += 1
            return Choice(course.timed, True)
        course.settle()
        course.calls_left -= 1
        return Choice(course.arm)

    def learn(self, key: Key, choice: Choice, seconds: float, effort: Effort) -> None:
        """Takes note of what a call took this rank."""
        course = self._courses[key]
        if choice.is_timed:
            course.own_seconds = seconds
        if choice.arm == Arm.PACKED:
            course.effort = course.effort.plus(effort)

    def note(self, key: Key, arm: Arm, why: str) -> None:
        """Takes note of a call that there was no choice for."""
        course = self._course(key, (arm,))
        course.n_calls += 1
        course.arm, course.why = arm, why

    def _course(self, key: Key, arms: Sequence[Arm]) -> _Course:
        course = self._courses.get(key)
        if course is None:
            course = self._courses[key] = _Course(arms)
        return course

    def rows(self) -> list[Row]:
        """What is known of each kind of call, in the order of their first calls."""
        return [_row_of(key, course, self._share(key)) for key, course in self._courses.items()]

    def _share(self, key: Key) -> float:
        """The bytes that a rank receives in a call, for each byte that it holds."""
        others = (self._size - 1) / self._size
        return {"broadcast": 1.0, "all_reduce": 2 * others}.get(key.operation, others)


def _row_of(key: Key, course: _Course, share: float) -> Row:
    effort, known = course.effort, course.known()
    raw = min((time for arm, time in known.items() if arm != Arm.PACKED), default=0.0)
    return Row(
        key, course.arm, course.why, course.n_calls, course.n_timed, course.nbytes,
        {arm: time * course.nbytes for arm, time in known.items()},
        _rate(share, raw), _rate(effort.nbytes, effort.encode_seconds),
        _rate(effort.decoded_nbytes, effort.decode_seconds),
        effort.nbytes / effort.encoded_nbytes if effort.encoded_nbytes else 0.0,
    )  # fmt: skip


def _rate(nbytes: float, seconds: float) -> float:
    return nbytes / seconds / 1e9 if seconds else 0.0


def table_of(rows: Sequence[Row]) -> str:
    """A table for people."""
    heads = ["calls of", "run", "torch ms", "pieces ms", "packed ms"]
    heads += ["link GB/s", "encode", "decode", "ratio", "calls", "timed", "why"]
    lines = [heads]
    for row in rows:
        times = [row.seconds.get(arm) for arm in Arm]
        figures = [None if time is None else f"{time * 1e3:.3f}" for time in times]
        rates = [f"{rate:.3f}" if rate else None for rate in (row.link, row.encode, row.decode)]
        ratio = f"{row.ratio:.2f}" if row.ratio else None
        cells = [str(row.key), row.arm.name.lower(), *figures, *rates, ratio]
        lines.append(
            [cell or "-" for cell in cells] + [str(row.n_calls), str(row.n_timed), row.why]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _size_words(nbytes: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes} {unit}"
        nbytes //= 1024
    return ""
