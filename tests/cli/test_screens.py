"""Tables on terminals of several widths: one line for each row, cut but never folded."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cli_samples import Ended, run_on_terminal
from rich.cells import cell_len
from rich.text import Text
from safetensors.numpy import save_file

from packhorse.cli import actions
from packhorse.cli.grid import Grid, shorten

Run = Callable[..., Ended]
RNG = np.random.default_rng(0)
NAMES = [f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 11)]


def screen(columns: int, *args: object) -> list[str]:
    """The lines that a run prints on a terminal with this number of columns."""
    code, text = run_on_terminal(*args, columns=columns)
    assert code == 0, text
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "").splitlines()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from packhorse.disk import Shelf, SnapshotStore, pack_file

    folder = tmp_path_factory.mktemp("screens")
    for k in range(2):
        tensors = {
            name: RNG.normal(0, 0.02, (320, 1024)).astype(ml_dtypes.bfloat16) for name in NAMES
        }
        tensors["ids"] = RNG.integers(0, 1 << 40, 1000)
        save_file(tensors, folder / f"m{k}.safetensors")
        SnapshotStore(folder / "store").take_files(f"step-{k}", [folder / f"m{k}.safetensors"])
    pack_file(folder / "m0.safetensors", folder / "m.ph.safetensors")
    with Shelf(folder / "shelf") as shelf:
        shelf.save("state", {name: np.float32([1, 2]) for name in NAMES})
        for name in NAMES:
            shelf[name] = RNG.normal(0, 0.02, (320, 1024)).astype(ml_dtypes.bfloat16)
    return {
        "model": folder / "m0.safetensors",
        "packed": folder / "m.ph.safetensors",
        "store": folder / "store",
        "shelf": folder / "shelf",
    }


def commands(places: dict[str, Path]) -> dict[str, list[object]]:
    store = places["store"]
    return {
        "inspect": ["inspect", places["packed"]],
        "plan": ["pack", "--dry-run", places["model"]],
        "list": ["snapshot", "list", store],
        "plot": ["snapshot", "show", store],
        "show": ["snapshot", "show", store, "step-1"],
        "diff": ["snapshot", "diff", store, "step-0", "step-1"],
        "shelf": ["shelf", "list", places["shelf"]],
        "tensor": ["shelf", "show", places["shelf"], NAMES[0]],
        "state": ["shelf", "show", places["shelf"], "state"],
        "export": ["shelf", "export", places["shelf"], "x.zarr", "-n"],
        "bench": ["bench", places["model"], "-r", "1"],
        "tune": ["tune", "--shape", "4096x4096", "-n", "--gpu", "H200"],
    }


def test_every_table_fits(places: dict[str, Path], run: Run, monkeypatch: pytest.MonkeyPatch):
    """Run in this process, with a terminal that rich's own environment variables describe."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    texts = {}
    for width in (10, 13, 20, 31, 40, 60, 80, 120, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        for verb, words in commands(places).items():
            if verb == "tune" and width not in (20, 40):
                continue  # its imports and predictions take long
            text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", run(*words).out)
            lines = texts[verb, width] = text.splitlines()
            assert all(cell_len(line) <= width for line in lines), (verb, width, text)
    for (verb, width), lines in texts.items():
        one_line = verb in {"inspect", "plan", "list", "plot", "export"}
        if (verb, 200) in texts and one_line and width < 200:
            n_notes = sum(line.startswith("    ") for line in lines)
            assert len(lines) - n_notes == len(texts[verb, 200]), (verb, width)


def test_every_width(places: dict[str, Path]):
    """Even on a narrow terminal, no line is wider than it, and no row is folded or lost."""
    inspected = actions.inspect(places["packed"])[0]
    for width in range(10, 201):
        for ascii_only in (True, False):
            grid = Grid(
                "a title that is long enough", ("~tensor", "dtype", ">packed", ">ratio"),
                drops=("dtype",), last_drops=(">packed", ">ratio"), note="planes",
            )  # fmt: skip
            for row in inspected.tensors:
                grid.row(row.name, row.dtype, "1234567 kB", "1.234", note="rans 1.23x, stored")
            lines = [line.plain for line in grid.lines(width, ".." if ascii_only else "…")]
            assert max(map(cell_len, lines)) <= width
            rows = [line for line in lines[4:] if line.strip() and not line.startswith("    ")]
            assert len(rows) == len(inspected.tensors)


def test_the_legend_is_cut(places: dict[str, Path]):
    lines = screen(20, "inspect", places["packed"])
    assert re.match(r"bar: █ stored .*…$", lines[-1])
    assert cell_len(lines[-1]) == 20


def test_inspect_at_80_columns(places: dict[str, Path]):
    lines = screen(80, "inspect", places["packed"])
    (head,) = [line for line in lines if line.startswith(" tensor ")]
    assert head.split() == ["tensor", "dtype", "shape", "size", "packed", "ratio"]
    at = next(i for i, line in enumerate(lines) if "q_proj" in line)
    assert re.match(r" model\.\S*…\S*weight +BF16 +320x1024 +655 kB +\d+ kB +1\.\d{3}$", lines[at])
    assert re.match(r"    ▓+█+·+  exponent rans \d\.\d\dx, mantissa\+sign stored$", lines[at + 1])
    assert any(line.startswith("bar: ") and "delta" not in line for line in lines)
    assert len(lines) == 4 + 2 * 3 + 2 + 2


def test_a_wide_terminal_and_a_pipe_have_all_in_one_line(places: dict[str, Path], run: Run):
    wide = screen(180, "inspect", places["packed"])
    for lines in (wide, run("inspect", places["packed"]).out.splitlines()):
        for name in NAMES:
            (line,) = [line for line in lines if name in line]
            assert "exponent rans" in line
            assert "320x1024" in line
    (line,) = [line for line in wide if line.startswith(" ids ")]
    assert line.endswith("…")
    assert cell_len(line) <= 180


def test_what_is_left_out_is_in_the_json(places: dict[str, Path], run: Run):
    done = run("snapshot", "list", places["store"], "--json")
    (row,) = json.loads(done.out)["results"]
    assert row["snapshots"][0]["time"].endswith("+00:00")


def test_names_give_way_before_columns_do():
    grid = Grid("title", ("~name", ">size", "kind"), drops=("kind",))
    grid.row("a" * 30 + "b" * 30, "1", "k" * 8)
    for width, kept in ((100, True), (45, True), (38, False)):
        lines = [line.plain for line in grid.lines(width, "…")]
        assert all(cell_len(line) <= width for line in lines)
        assert ("kkkk" in lines[4]) is kept
        assert ("…" in lines[4]) is (width < 76)
        assert lines[4].split()[1] == "1"
    assert "a" * 30 + "b" * 30 in [*grid.lines(None, "…")][4].plain


def test_wide_letters_count_twice():
    for width in range(1, 20):
        assert cell_len(shorten("名前が長い層の重み" * 3, width, "…")) <= width
    assert shorten("short", 5, "…") == "short"
    assert shorten("abcdefghij", 6, "..") == "ab..ij"
    grid = Grid("", ("~name", ">n"))
    grid.row("層", "1")
    grid.row("xx", "2", note=Text("because"))
    first, second, third = [line.plain for line in grid.lines(20, "…")][4:7]
    assert cell_len(first) == cell_len(second)
    assert third == "    because"
