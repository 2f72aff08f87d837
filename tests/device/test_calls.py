"""The number of calls from a packed layer to the kernel, a path that every token of a model
takes."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from triton import knobs

import packhorse
from packhorse.device import PackedLinear, operators, pack_weight, products
from packhorse.device.strategy import Choice, Strategy

PACKAGE = str(Path(packhorse.__file__).parent)
MOST_CALLS = 6
INTERPRETED = pytest.mark.skipif(not knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")


def is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


def is_triton(frame: FrameType) -> bool:
    return "/triton/" in frame.f_code.co_filename


def longest_path(call: Callable[[], object]) -> list[str]:
    """The package's own functions in the deepest call, down to a launch. Functions that Triton
    calls, such as the kernel itself, are left out."""
    longest: list[str] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        path, at = [], frame if event == "call" else None
        while at is not None and at.f_code is not longest_path.__code__:
            if is_triton(at):
                return
            path.append(at.f_code.co_name) if is_ours(at) else None
            at = at.f_back
        longest[:] = max(longest, path[::-1], key=len)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return longest


@INTERPRETED
@pytest.mark.parametrize("strategy", [*(s for s in Strategy if s is not Strategy.STREAM), None])
def test_a_product_is_six_calls_from_its_layer(
    strategy: Strategy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit holds from the second product of a shape on, for the choice and for each kernel
    that the interpreter runs."""
    monkeypatch.setattr(operators, "_has_kernels", lambda _: True)
    if strategy is not None:
        monkeypatch.setattr(products, "choose", lambda *_: Choice(strategy))
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    layer = PackedLinear(pack_weight(weight.bfloat16()))
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)
        path = longest_path(lambda: layer(x))
    assert path[:3] == ["forward", "multiply", "multiply"]
    assert len(path) <= MOST_CALLS, path
