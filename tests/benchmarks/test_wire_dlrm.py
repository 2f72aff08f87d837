"""The training of the benchmarks: one process has the bits of real ranks; data are as described."""

from pathlib import Path

import dlrm_training_jobs as jobs
import numpy as np
import pytest
from wire_ranks import run_ranks, values

from benchmarks.wire.dlrm_arms import ARMS
from benchmarks.wire.dlrm_model import KAGGLE, Teacher, auc, capped


def test_one_process_has_the_bits_of_two_ranks(tmp_path: Path) -> None:
    arms = list(ARMS)
    alone = jobs.in_one_process(arms, 2)
    first, second = values(run_ranks(2, jobs.over_gloo, arms, store=tmp_path / "store", limit=120))
    for arm in arms:
        *common, of_first, of_second = alone[arm]
        assert [*common, of_first] == first[arm], arm
        assert [*common, of_second] == second[arm], arm


def test_sending_distinct_rows_has_the_bits_of_sending_all() -> None:
    alone = jobs.in_one_process(["fp32", "dedup", "bounded"], 4)
    assert alone["fp32"] == alone["dedup"]
    assert alone["fp32"] != alone["bounded"]


def test_batches_are_the_same_for_any_number_of_ranks() -> None:
    teacher = Teacher(capped(KAGGLE, 1000))
    whole = teacher.batch(3, 256)
    for world in (2, 4):
        parts = [teacher.batch(3, 256, rank, world) for rank in range(world)]
        assert np.array_equal(np.concatenate([part.ids for part in parts], 1), whole.ids)
        assert np.array_equal(np.concatenate([part.labels for part in parts]), whole.labels)


def test_auc_is_the_share_of_ordered_pairs() -> None:
    generator = np.random.default_rng(0)
    scores = generator.integers(0, 20, 200) / 20  # with ties
    labels = (generator.random(200) < 0.4).astype(np.float32)
    positive, negative = scores[labels > 0], scores[labels == 0]
    pairs = np.sign(positive[:, None] - negative[None]) / 2 + 0.5
    assert auc(scores, labels) == pytest.approx(pairs.mean())
