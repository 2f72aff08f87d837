"""Runs the kernels in the emulator: `python -m tests.ptx run` or `mutations`.

- `run` runs more kernels and shapes than the tests do, each in four ways.
- `mutations` damages every barrier, wait and fence of some kernels, and counts what is noticed.

Both take words that the names of kernels must have. PACKHORSE_TRITON may name the folder of another
Triton.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from tests.ptx import stream
from tests.ptx.faults import Fault
from tests.ptx.kernels import WAYS, Case, Emulation, is_right
from tests.ptx.mutations import is_noticed, mutations
from tests.ptx.program import parse

from packhorse.errors import MissingBackendError
from packhorse.gpu.nvrtc import compiler

AnyCase = Case | stream.StreamCase
RUN = [
    *(
        Case("few", "W12", (32, 8, 32, 4, 1, 4, 1), 100, 500, n, bias=True, early=True)
        for n in (1, 2, 7, 8, 9, 40)
    ),
    *(Case("few", "W12", (32, 16, 32, 4, 1, 3, 2), 100, 1024, n, early=True) for n in (5, 16, 17)),
    Case("few", "W12", (16, 8, 64, 4, 1, 4, 1), 48, 2048, 3, early=True),
    Case("few", "W12", (16, 8, 128, 2, 4, 2, 1), 31, 3001, 8, bias=True),
    Case("few", "W12", (64, 8, 32, 4, 1, 5, 1), 200, 256, 8, early=True),
    Case("few", "W12", (32, 32, 32, 4, 1, 3, 3), 100, 512, 31, early=True),
    Case("few", "W12", (32, 8, 32, 8, 8, 3, 1), 17, 4100, 2),
    *(Case("few", "W11", (32, 8, 32, 4, 1, 3, 1), 100, 1030, n, early=True) for n in (1, 8, 40)),
    Case("few", "W11", (16, 16, 64, 2, 2, 4, 1), 64, 4096, 13, bias=True),
    Case("few", "W11", (32, 8, 32, 2, 1, 3, 2), 65, 700, 8, bias=True, early=True),
    *(
        Case("few", form, (32, 16, 32, 4, 1, 3, 1), 50, 1024, 20, early=True, by_column=True)
        for form in ("W12", "W11")
    ),
    *(
        Case("many", "W12", (rows, 64, 32, 4, splits, 3, 1), 200, n, n_tokens, bias=True)
        for rows, splits, n, n_tokens in ((128, 1, 1024, 130), (128, 4, 3001, 33), (64, 2, 77, 65))
    ),
    Case("many", "W12", (64, 64, 64, 4, 1, 5, 1), 64, 2048, 64),
    Case("many", "W12", (64, 64, 32, 4, 1, 3, 1), 64, 1024, 40, patterns=True),
    Case("many", "W11", (64, 64, 32, 4, 1, 2, 1), 100, 1030, 70),
    Case("many", "W12", (64, 64, 32, 4, 1, 3, 1), 100, 1024, 70, by_column=True),
    *(Case("decode", form, (), 70, n, 0) for form in ("W12", "W11") for n in (1, 63, 999, 4100)),
    *(Case("decode", form, (), 70, 2100, 9) for form in ("W12", "W11")),
    *(Case("decode", form, (), 64, 1024, 0, patterns=True) for form in ("W12", "W11")),
]
STREAM_RUN = [*stream.CASES, *stream.default_cases()]
DAMAGED = [
    Case("few", "W12", (32, 8, 32, 4, 1, 4, 1), 64, 1024, 8, early=True),
    Case("few", "W11", (32, 16, 32, 4, 1, 3, 1), 50, 2100, 20, early=True),
    Case("decode", "W12", (), 70, 2100, 0),
]


def _said(run: Callable[..., np.ndarray], is_right: Callable[[np.ndarray], bool]) -> str:
    """Runs a kernel in all ways; returns what is wrong, or "right"."""
    results = []
    try:
        for way in WAYS:
            results.append(run(**way, track=True))
            if not is_right(results[-1]):
                return f"WRONG when {way}"
    except Fault as fault:
        return f"FAULT: {fault}"
    same = all(np.array_equal(result, results[0]) for result in results)
    return "right" if same else "DIFFERENT in different ways"


def _check(case: AnyCase, emulation: Emulation | None = None) -> tuple[str, float]:
    """What is said of a case, and the seconds it took."""
    begin = time.process_time()
    with np.errstate(all="ignore"):
        if isinstance(case, stream.StreamCase):
            said = _said(partial(stream.run_stream, case), partial(stream.is_right, case))
        else:
            assert emulation is not None
            said = _said(partial(emulation.run, case), partial(is_right, case))
    return said, time.process_time() - begin


def run_all(cases: list[Case], stream_cases: list[stream.StreamCase], folder: Path) -> int:
    """Runs cases in all ways, on all cores; returns how many are wrong."""
    with ProcessPoolExecutor() as pool:
        found = [pool.submit(_check, case) for case in stream_cases]
        if cases:
            emulation = Emulation(cases, folder)  # Triton compiles while the others run
            found += [pool.submit(_check, case, emulation) for case in cases]
        n_wrong = 0
        for case, future in zip([*stream_cases, *cases], found, strict=True):
            said, seconds = future.result()
            n_wrong += said != "right"
            print(f"{case.name}: {said} ({seconds:.1f} s)", flush=True)
    return n_wrong


def _compilable(cases: list[stream.StreamCase]) -> list[stream.StreamCase]:
    """The cases; none without NVRTC."""
    try:
        compiler()
    except MissingBackendError as error:
        print(f"the kernels in CUDA C++ are not run: {error}", file=sys.stderr)
        return []
    return cases


def damage_all(
    cases: list[Case], stream_cases: list[stream.StreamCase], folder: Path, *, verbose: bool
) -> None:
    """Damages kernels, and prints how much of it is noticed."""
    emulation = Emulation(cases, folder)
    print("| kernel | damage | noticed |\n|---|---|---|")
    total: Counter[bool] = Counter()
    for case in [*cases, *stream_cases]:
        seen: Counter[tuple[str, bool]] = Counter()
        is_stream = isinstance(case, stream.StreamCase)
        text = stream.stream_ptx(case) if is_stream else emulation.compiled(case.key()).ptx
        for mutation in mutations(text, "multiply" if is_stream else ""):
            if is_stream:
                run = partial(stream.run_stream, case, parse(mutation.ptx, "multiply"))
                how = is_noticed(run, partial(stream.is_right, case))
            else:
                run = partial(emulation.run, case, emulation.mutated(case, mutation.ptx))
                how = is_noticed(run, partial(is_right, case))
            seen[f"{mutation.kind} {mutation.change}", bool(how)] += 1
            if verbose:
                print(f"    {mutation}: {how[:160] or 'not noticed'}", file=sys.stderr)
        for kind in dict.fromkeys(kind for kind, _ in seen):
            yes, no = seen[kind, True], seen[kind, False]
            total.update({True: yes, False: no})
            print(f"| {case.name} | {kind} | {yes} of {yes + no} |", flush=True)
    print(f"\n{total[True]} of {total.total()} damages are noticed.")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.ptx", description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    parser.add_argument("form", choices=("run", "mutations"))
    parser.add_argument("words", nargs="*", help="words that a kernel's name must have")
    parser.add_argument("--verbose", action="store_true", help="print each damage")
    arguments = parser.parse_args()
    is_run = arguments.form == "run"

    def chosen(cases: list) -> list:
        return [case for case in cases if all(word in case.name for word in arguments.words)]

    cases = chosen(RUN if is_run else DAMAGED)
    stream_cases = _compilable(chosen(STREAM_RUN if is_run else stream.DAMAGED))
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        if not is_run:
            damage_all(cases, stream_cases, Path(folder), verbose=arguments.verbose)
            return 0
        begin = time.perf_counter()
        n_wrong = run_all(cases, stream_cases, Path(folder))
        used = os.times()
        print(
            f"{len(cases) + len(stream_cases)} kernels, {n_wrong} wrong; "
            f"{used.user + used.children_user:.0f} s of processor time, "
            f"{time.perf_counter() - begin:.0f} s"
        )
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
