"""Fixtures that several test files share, and Triton's interpreter for all kernels.

Triton decides when it is imported whether kernels are interpreted, so this file sets the variable
before anything else can import Triton. On a machine with a GPU, TRITON_INTERPRET=0 runs the kernels
there. Tests that compile offline need a child process without the variable.
"""

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from cli_samples import Ended, write_folder, write_model
from disk_samples import write_sample


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run the command line in this process."""
    from packhorse.cli import main

    def call(*args: object) -> Ended:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ended(int(code), captured.out, captured.err)

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small safetensors file."""
    return write_model(tmp_path / "model.safetensors")


@pytest.fixture
def packed(model: Path, run: Callable[..., Ended]) -> Path:
    """The small file, packed beside it."""
    assert run("pack", model).code == 0
    return model.with_name("model.ph.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder."""
    return write_folder(tmp_path / "llama")


@pytest.fixture
def sample(tmp_path: Path) -> tuple[Path, Path]:
    """A safetensors file and its packed form."""
    from packhorse.disk import pack_file

    source, packed = tmp_path / "model.safetensors", tmp_path / "model.ph.safetensors"
    write_sample(source, metadata={"format": "np"})
    pack_file(source, packed)
    return source, packed
