"""Damages the order of a kernel, one place at a time, to see whether the emulator notices.

Every barrier, wait and fence in the PTX is removed; a wait for all but n groups becomes one for all
but n + 1; an mbarrier's expected arrivals or bytes stay as they are, but waits and arrivals go. A
kernel that is damaged must raise a fault, give a wrong result, or give different results in
different ways to run it. Some barriers of Triton's are not needed: nobody can notice those.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from tests.ptx.faults import Fault

_KINDS = re.compile(
    r"^[ \t]*(?:@!?%?\w+\s+)?("
    r"bar\.sync|barrier\.sync|bar\.warp\.sync|cp\.async\.wait_group|cp\.async\.wait_all|"
    r"cp\.async\.commit_group|wgmma\.wait_group|wgmma\.fence|wgmma\.commit_group|"
    r"fence\.proxy\.async|fence\.mbarrier_init|griddepcontrol\.wait|mbarrier\.arrive|"
    r"mbarrier\.init|mbarrier\.try_wait|mbarrier\.expect_tx)[^;\n]*;",
    re.M,
)
# Nobody can notice that they are missing: a fence of registers, which assemblers need, not values.
_NOT_EMULATED = {"wgmma.fence"}


@dataclass(frozen=True)
class Mutation:
    """A damaged kernel.

    Attributes:
        kind: the instruction, such as "bar.sync".
        change: "removed" or "weakened".
        line: number of its line in the text.
        ptx: the damaged text.
    """

    kind: str
    change: str
    line: int
    ptx: str

    def __str__(self) -> str:
        return f"{self.kind} {self.change} in line {self.line}"


def mutations(ptx: str) -> Iterator[Mutation]:
    """All mutations of a kernel."""
    start = ptx.index(".entry")
    for found in _KINDS.finditer(ptx, start):
        kind = found[1]
        if kind in _NOT_EMULATED:
            continue
        line = ptx.count("\n", 0, found.start()) + 1
        before, text, after = ptx[: found.start()], found[0], ptx[found.end() :]
        if kind == "mbarrier.try_wait":
            result = re.search(r"b64\s+([%\w]+)", text)
            assert result is not None, text
            removed = f"setp.eq.u32 {result[1]}, 0, 0;"
        else:
            removed = ""
        yield Mutation(kind, "removed", line, before + removed + after)
        if kind.endswith("wait_group") and (n := re.search(r"\b(\d+)\s*;", text)):
            weaker = text[: n.start()] + f" {int(n[1]) + 1};"
            yield Mutation(kind, "weakened", line, before + weaker + after)


def is_noticed(run: Callable[..., np.ndarray], is_right: Callable[[np.ndarray], bool]) -> str:
    """How a damaged kernel was noticed; "" if it was not.

    Args:
        run: runs it; takes `late`, `backwards` and `track`.
        is_right: whether a result is right.
    """
    first = None
    for late, backwards in ((True, False), (False, True), (True, True), (False, False)):
        try:
            result = run(late=late, backwards=backwards, track=True)
        except Fault as fault:
            return str(fault)
        if not is_right(result):
            return "a wrong result"
        if first is None:
            first = result
        elif not np.array_equal(result, first, equal_nan=True):
            return "different results"
    return ""
