"""The benchmark of bounded codes: every arm on few rows, and the proof of the bound."""

import numpy as np
import pytest

from benchmarks.codecs import bounded


def test_every_arm_is_proved_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bounded.main(["--rows", "300", "--rounds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line[:24].strip() for line in lines if "ours" in line or "cast" in line]
    assert {"ours 4", "ours 6 stochastic", "ours 8 + models", "cast float16"} <= set(names)
    ours = [line for line in lines if line.startswith("ours")]
    assert len(ours) == 9
    assert not any("!" in line for line in ours)
    assert sum(line.startswith("26 of") for line in lines) == 3


def test_an_arm_that_breaks_its_bound_is_found() -> None:
    rows = bounded.table_rows(50, 16)
    arm = bounded.our_arm(rows, 6, bounded.Rounding.NEAREST)
    assert arm.bound is not None
    assert bounded.prove(rows, arm).error <= arm.bound
    wrong = arm._replace(decode=lambda packed: arm.decode(packed) + np.float32(2 * arm.bound))
    with pytest.raises(AssertionError, match="ours 6: the error is"):
        bounded.prove(rows, wrong)


def test_rows_are_heavy_tailed() -> None:
    rows = bounded.table_rows(2000, 32)
    kurtosis = float(((rows - rows.mean()) ** 4).mean() / rows.var() ** 2)
    assert kurtosis > 6  # a normal distribution has 3
