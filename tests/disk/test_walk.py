"""Folders behind links: each folder is walked once, however many links lead to it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_samples import Ended, contents, write_folder, write_model

from packhorse.disk import (
    folder_logical_nbytes,
    pack_folder,
    packed_files,
    plan_folder,
    unpack_folder,
    verify_folder,
)
from packhorse.disk.walk import walk

Run = Callable[..., Ended]

LEVELS = 40  # each doubles the paths to the last one


def add_dag(folder: Path) -> None:
    """Folders that each have two links to the next one: 2^40 paths lead to the last one."""
    last = folder / f"level{LEVELS}"
    last.mkdir()
    (last / "note.txt").write_text("reached\n")
    for i in reversed(range(LEVELS)):
        level = folder / f"level{i}"
        level.mkdir()
        for name in ("a", "b"):
            (level / name).symlink_to(f"../level{i + 1}")


def test_a_web_of_links_takes_no_more_time_than_its_folders(tmp_path: Path, run: Run):
    model = write_folder(tmp_path / "llama")
    add_dag(model)
    packed, back = tmp_path / "llama.ph", tmp_path / "back"
    assert len(list(walk(model))) == 5 + 1 + 2 * (LEVELS + 1) - LEVELS
    pack_folder(model, packed)
    assert len(packed_files(packed)) == 2
    assert len(plan_folder(model)) == 2
    assert verify_folder(packed) == []
    sizes = [(f / "model.safetensors.index.json").stat().st_size for f in (model, packed)]
    assert folder_logical_nbytes(model) - sizes[0] == folder_logical_nbytes(packed) - sizes[1]
    for verb in ("inspect", "verify"):
        assert run(verb, packed).code == 0
    assert "no BF16 matrices" in run("tune", model).error
    unpack_folder(packed, back)
    assert os.readlink(back / "level0" / "b") == "../level1"
    assert (back / "level38" / "a" / "b" / "note.txt").read_text() == "reached\n"


def test_a_link_within_the_folder_stays_a_link(tmp_path: Path):
    """A real folder stays a folder, even if the name of a link to it comes first."""
    model = write_folder(tmp_path / "llama")
    (model / "a-link").symlink_to("tokenizer")
    (model / "z-link").symlink_to(model / "tokenizer")  # absolute, relative in the output
    (model / "tokenizer" / "deep").mkdir()
    (model / "tokenizer" / "deep" / "x").write_text("x")
    (model / "deep-link").symlink_to("tokenizer/deep")
    before = contents(model)
    pack_folder(model, tmp_path / "packed")
    unpack_folder(tmp_path / "packed", tmp_path / "back")
    back = tmp_path / "back"
    assert contents(back) == before
    for name, place in (
        ("a-link", "tokenizer"),
        ("z-link", "tokenizer"),
        ("deep-link", "tokenizer/deep"),
    ):
        assert os.readlink(tmp_path / "packed" / name) == place
        assert os.readlink(back / name) == place
    assert not (back / "tokenizer").is_symlink()
    assert (back / "a-link" / "vocab.txt").read_text() == "one\ntwo\n"


def test_a_folder_from_outside_comes_in_once(tmp_path: Path):
    """As in a download cache: the folder is copied, and a second link leads to the copy."""
    model = write_folder(tmp_path / "llama")
    outside = tmp_path / "outside"
    outside.mkdir()
    write_model(outside / "model.safetensors")
    for name in ("vae", "vae-too"):
        (model / name).symlink_to(outside)
    pack_folder(model, tmp_path / "packed")
    assert not (tmp_path / "packed" / "vae").is_symlink()
    assert os.readlink(tmp_path / "packed" / "vae-too") == "vae"
    unpack_folder(tmp_path / "packed", tmp_path / "back")
    for name in ("vae", "vae-too"):
        assert contents(tmp_path / "back" / name) == contents(outside)
    shutil.rmtree(outside)
    assert verify_folder(tmp_path / "packed") == []


def test_links_of_two_folders_to_each_other_are_no_circle(tmp_path: Path):
    model = write_folder(tmp_path / "llama")
    (model / "tokenizer" / "config").symlink_to("../config")
    (model / "config").mkdir()
    (model / "config" / "tokenizer").symlink_to("../tokenizer")
    pack_folder(model, tmp_path / "packed")
    assert os.readlink(tmp_path / "packed" / "config" / "tokenizer") == "../tokenizer"


@pytest.mark.parametrize("force", [False, True])
def test_a_link_counts_for_what_may_be_replaced(tmp_path: Path, run: Run, force: bool):
    model = write_folder(tmp_path / "llama")
    (model / "link").symlink_to("tokenizer")
    assert run("pack", model).code == 0
    again = run("pack", model, *(["--force"] if force else []))
    assert again.code == (0 if force else 2)
    assert (tmp_path / "llama.ph" / "link").is_symlink()
