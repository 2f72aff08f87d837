"""The benchmark of the core alone, on a tiny tensor, and the benchmark of entropies."""

import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.samples.offline_kernels import KEPT_PROGRAMS

from benchmarks import core, entropy

PARTS = {"copy", "encode", "decode", "decode-unchecked", "hash", "crc"}
ON_A_PLANE = {"plane-encode", "plane-decode"}


@pytest.fixture(scope="module")
def program() -> Path:
    """The compiled program, kept for the next run. Nobody times it here, so the compiler need not
    optimise."""
    compiler = core.find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler: g++, clang++ or what CXX names")
    return core.build(compiler, KEPT_PROGRAMS / "core", "-O0")


def weights(n: int) -> np.ndarray:
    return (np.random.default_rng(1).standard_normal(n, np.float32) * 0.02).astype(
        ml_dtypes.bfloat16
    )


@pytest.mark.parametrize("level", core.Level)
def test_every_part_is_timed_on_every_code_path(program: Path, level: core.Level) -> None:
    array, found = weights(40_001), set()
    for isa in core.available_isas():
        packed_nbytes, timings = core.measure(program, array, 2, 14, level, isa, 2)
        found.add(packed_nbytes)
        assert set(timings) == PARTS | ON_A_PLANE
        assert all(len(timing.seconds) == 2 for timing in timings.values())
        assert {timings[name].nbytes for name in PARTS} == {array.nbytes}
    (nbytes,) = found
    assert array.nbytes / 1.6 < nbytes < array.nbytes / 1.3


def test_the_stages_of_the_encoder_are_timed_on_every_code_path(program: Path) -> None:
    for isa in core.available_isas():
        table = core.table_of_stages(program, weights(40_001), 2, 14, isa, 1).splitlines()
        assert table[0].startswith("| stage | us a chunk | cycles an element, at ")
        assert [line.split(" | ")[0] for line in table[2:5]] == [
            "| split-and-hash",
            "| first-look",
            "| histogram",
        ]
        assert table[-1].endswith(" GB/s")


def test_a_plane_of_noise_is_not_timed(program: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 1 << 16, 1 << 14, np.uint16)
    _, timings = core.measure(program, noise, 2, 14, core.Level.FAST, core.Isa.PORTABLE, 1)
    assert set(timings) == PARTS


def test_wrong_numbers_are_refused(program: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        core.measure(program, weights(99), 2, 3, core.Level.FAST, core.Isa.PORTABLE, 1)
    assert caught.value.stderr == "chunk_log is out of range\n"


def test_the_command_prints_a_table(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(core, "build", lambda compiler: program)
    assert core.main(["--first-mb", "1", "--rounds", "1", "--level", "fast"]) == 0
    head, settings, *_, last = capsys.readouterr().out.splitlines()
    assert head.split(", ")[-2] == core.best_isa().name.lower()
    assert settings.startswith("model_bf16, level fast, 2^17 units in a chunk, 1 rounds: ratio 1.4")
    assert last.startswith("| plane-decode | ")


def test_a_missing_compiler_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(core, "find_compiler", lambda: None)
    assert core.main([]) == 1
    assert "install g++ or clang++" in capsys.readouterr().out


def test_instructions_are_counted(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a program for this machine, as the emulator and its compiler may be missing."""
    emulator = tmp_path / "emulator"
    emulator.write_text('#!/bin/sh\nshift 2\n"$@"\nseq 0 8000 120000 >&2\n')
    emulator.chmod(0o755)
    monkeypatch.setattr(core, "EMULATOR", str(emulator))
    found = core.count(
        program, Path("none"), weights(8000), 2, 14, core.Level.FAST, core.Isa.PORTABLE
    )
    assert set(found) == PARTS | ON_A_PLANE
    assert {found[name] for name in PARTS} == {1.0}


def test_a_missing_emulator_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(core, "EMULATOR", "no-such-emulator")
    assert core.main(["--count"]) == 1
    assert "no-such-emulator is missing" in capsys.readouterr().out


def test_plane_0_is_the_exponent() -> None:
    values = np.array([1.0, -1.0, 0.5, -2.0], ml_dtypes.bfloat16)
    assert core.first_plane(values, 2, 4).tolist() == [127, 127, 126, 128]
    assert core.first_plane(values.astype(np.float32), 4, 2).tolist() == [127, 126]
    assert core.first_plane(np.array([0x81, 0x40], np.uint8), 1, 2).tolist() == [3, 0x80]


def test_entropies_of_known_symbols() -> None:
    assert entropy.entropy_bits(np.array([0, 4, 4])) == 8
    fp16 = np.array([0x3C00, 0xBC00, 0x4000, 0xC000], np.uint16)  # 1, -1, 2, -2
    assert entropy.upper_bits_ratio(fp16, 5, 4) == 16 / 12  # one bit for the exponent
    ratio, most = entropy.raw_bits_ratio(fp16, 0, 4)
    assert (ratio, most) == (4 * 16 / (4 + 4 * 8 + 2 * entropy.TABLE_BITS), 2)
