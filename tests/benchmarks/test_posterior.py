"""The experiment with posteriors: its measures, its shifted images and its network."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.learn.posterior import metrics, network, rotated, table

ROOT = Path(__file__).resolve().parents[2]


def test_the_network_is_that_of_the_paper() -> None:
    assert sum(parameter.numel() for parameter in network().parameters()) == 2_797_010


def test_images_are_rotated() -> None:
    images = torch.rand(3, 784)
    torch.testing.assert_close(rotated(images, 0), images)
    turned = torch.rot90(images.view(3, 28, 28), 1, (1, 2)).reshape(3, 784)
    torch.testing.assert_close(rotated(images, 90), turned, atol=1e-4, rtol=0)


def test_measures() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.5, 0.5]])
    found = metrics(probabilities, torch.tensor([0, 1, 1, 0]))
    assert found["accuracy"] == 0.75
    assert found["nll"] == pytest.approx(-np.log([0.9, 0.1, 0.7, 0.5]).mean(), abs=1e-4)
    # bins of 1/15: two predictions of 0.9 of which one is right, one of 0.7, one of 0.5
    assert found["ece"] == pytest.approx((2 * 0.4 + 0.3 + 0.5) / 4, abs=1e-4)
    assert [count for count, _, _ in found["bins"] if count] == [1, 1, 2]


def test_the_page_has_the_table_of_the_figures() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "posterior.json").read_text())
    assert table(result) in (ROOT / "docs" / "posterior.md").read_text()
