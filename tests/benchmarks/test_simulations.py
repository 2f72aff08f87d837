"""The simulation of products: the machine on made-up instructions, the kernel that it reads, and
the kept figures beside what the model of time says today."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.samples.offline_kernels import run_offline

from benchmarks.gpu import issue, kept_simulations
from benchmarks.gpu.kept_simulations import Agreement, Kept, Row
from benchmarks.gpu.predictions import A100, H200, MODELS, SHARED_BATCHES, simulate_step
from packhorse.device.autotune import tune
from packhorse.device.cost import (
    conflicts_of_copies,
    predict_decode,
    predict_fused,
    predict_plain,
)
from packhorse.device.counts import INSTRUCTIONS
from packhorse.kernels.matmul import MatmulConfig
from packhorse.layout import W12

ROOT = Path(__file__).resolve().parents[2]
KEPT = kept_simulations.read()
KEPT_A100 = kept_simulations.read(kept_simulations.A100_PATH)
FREE = issue.Memory(math.inf, math.inf, 0.0, 0.0)


def step(kind: str = "pipe", **changes: Any) -> issue.Step:
    plain = issue.Step(kind, "misc", 1.0, 20.0, 4, -1, -1, (), 0.0, 0.0)
    return plain._replace(**changes)


def cycles(steps: list[issue.Step], n_warps: int = 1, memory: issue.Memory = FREE) -> float:
    start, _ = issue.run([step(stall=1)], 1, 1, 1, FREE)
    return issue.run(steps, n_warps, 1, 1, memory)[0] - start


# The machine.


def test_a_warp_waits_for_stalls_and_others_fill_the_gaps() -> None:
    one, four, eight = (issue.issue_rate([step()], n, 1, 100) for n in (4, 16, 32))
    assert one == pytest.approx(1 / 4, rel=0.02)
    assert four == pytest.approx(1.0, rel=0.05)
    assert eight == pytest.approx(1.0, rel=0.05)


def test_a_pipe_of_half_rate_takes_an_instruction_in_two_cycles() -> None:
    slow = step(pipe="alu", busy=2.0, stall=1)
    assert issue.issue_rate([slow], 32, 1, 100) == pytest.approx(0.5, rel=0.05)


def test_results_are_waited_for() -> None:
    load = step("load", pipe="lsu", busy=2.0, write=0)
    use = step(waits=(0,))
    slow = issue.Memory(math.inf, math.inf, load_latency=650.0)
    assert cycles([load, use, use]) < 100
    assert 650 < cycles([load, use, use], memory=slow) < 700
    assert cycles([load, step(), step()], memory=slow) < 20


def test_copies_take_their_share_of_memory_and_groups_are_waited_for() -> None:
    copies = [step("copy", pipe="lsu", busy=4.0, nbytes=512.0, l2_nbytes=512.0)] * 100
    memory = issue.Memory(16.0, 64.0, latency=900.0)
    all_done = [*copies, step("commit"), step("wait", nbytes=0.0), step()]
    one_left = [*copies, step("commit"), step("wait", nbytes=1.0), step()]
    assert cycles(all_done, memory=memory) == pytest.approx(100 * 512 / 16 + 900, rel=0.02)
    assert cycles(one_left, memory=memory) < 1000
    switched_off = [step("nothing", pipe="lsu")] * 100
    assert cycles(switched_off, memory=memory) < 500


def test_warps_meet_at_barriers() -> None:
    late = issue.run([step(stall=15)] * 10 + [step("barrier"), step()], 2, 1, 1, FREE)[0]
    assert late > issue.run([step(stall=15)] * 10 + [step(), step()], 2, 1, 1, FREE)[0]


def test_bank_conflicts_are_those_that_the_emulator_counted() -> None:
    counted = {(32, 4): 3.5, (32, 2): 2.0, (64, 4): 1.75, (128, 4): 1.0, (128, 2): 1.0}
    for (steps, n_warps), expected in counted.items():
        assert conflicts_of_copies(W12, MatmulConfig(32, 8, steps, n_warps)) == expected


# A kernel.


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    script = ROOT / "tests" / "samples" / "simulate_division.py"
    found: dict[str, Any] = json.loads(run_offline(script))
    return found


def test_a_program_that_starts_early_loads_nothing_before_it_waits(
    compiled: dict[str, Any],
) -> None:
    operations = compiled["operations"]
    waits, launches = operations.index("ACQBULK"), operations.index("PREEXIT")
    loads = [i for i, name in enumerate(operations) if name in ("LDG", "LDGSTS", "LD")]
    stores = [i for i, name in enumerate(operations) if name in ("STG", "ST")]
    prefetches = [i for i, name in enumerate(operations) if name == "CCTL"]
    assert waits < min(loads)
    assert waits < launches < compiled["loop"][0] < min(stores)
    assert len(prefetches) > 0
    assert max(prefetches) < waits


def test_a_simulated_product_takes_what_was_kept(compiled: dict[str, Any]) -> None:
    division = [32, 8, 64, 4, 1, 4, 1]
    kept = next(row for row in KEPT.compared if row.division == division and row.n_rows == 4096)
    # Versions of Triton differ in instructions.
    assert compiled["seconds"] == pytest.approx(kept.simulated, rel=0.15)
    assert compiled["early"] < compiled["seconds"]
    assert compiled["fewer_tokens"] <= compiled["seconds"]
    counted = INSTRUCTIONS["W12", 32, 8, 64, 1]
    assert compiled["registers"] == pytest.approx(counted.registers, abs=40)


# The kept figures.


def test_kept_predictions_are_those_of_today() -> None:
    """Otherwise run `python benchmarks/gpu.py simulate --write`."""
    for kept, device in ((KEPT, H200), (KEPT_A100, A100)):
        for row in (*kept.rows, *kept.compared, *kept.unfitted):
            product = row.n_rows, row.n_columns, row.n_tokens
            config = MatmulConfig(*row.division)
            assert row.predicted == pytest.approx(predict_fused(*product, W12, config, device)), row
            assert row.plain == pytest.approx(predict_plain(*product, device)), row


def test_what_is_chosen_untuned_was_simulated() -> None:
    for shape in MODELS[0].shapes:
        rows = [row for row in KEPT.rows if row.matrix == shape.name]
        assert [row.n_tokens for row in rows] == [1, 8, 32]
        found = tune(shape.n_rows, shape.n_columns, W12, H200, buckets=[1, 8, 32])
        for row in rows:
            assert found[row.n_tokens].choice.config == MatmulConfig(*row.division), row


def test_the_choice_for_an_a100_was_simulated_and_beats_decoding_first() -> None:
    for shape in MODELS[0].shapes:
        size = shape.n_rows, shape.n_columns
        rows = [row for row in KEPT_A100.rows if row.matrix == shape.name]
        assert [row.n_tokens for row in rows] == list(SHARED_BATCHES)
        found = tune(*size, W12, A100, buckets=SHARED_BATCHES)
        for row in rows:
            assert found[row.n_tokens].choice.config == MatmulConfig(*row.division), row
            assert row.simulated < predict_decode(*size, row.n_tokens, W12, A100) / 1.1, row


@pytest.mark.parametrize("kept", [KEPT, KEPT_A100], ids=["H200", "A100"])
def test_the_model_agrees_with_the_simulation(kept: Kept) -> None:
    assert Agreement.of(kept.compared) == kept.agreement
    assert kept.agreement.n >= 32
    assert kept.agreement.rank_correlation > 0.9
    assert kept.agreement.mean_error < 0.1
    assert kept.agreement.loss < 0.05


def test_the_model_agrees_with_products_that_it_was_not_fitted_to() -> None:
    fitted = {(row.n_rows, row.n_columns) for row in KEPT.compared}
    assert not fitted & {(row.n_rows, row.n_columns) for row in KEPT.unfitted}
    assert {row.n_tokens for row in KEPT.unfitted} == {8, 16, 32}
    assert Agreement.of(KEPT.unfitted) == KEPT.unfitted_agreement
    assert KEPT.unfitted_agreement is not None
    assert KEPT.unfitted_agreement.n >= 60
    assert KEPT.unfitted_agreement.mean_error < 0.1


def test_agreement_is_that_of_order_and_distance() -> None:
    def rows(*times: tuple[float, float]) -> list[Row]:
        return [
            Row("o", 1, 1, 8, "W12", [], 1.0, predicted, simulated, 1.0, 1, 1, 1, 0.0)
            for predicted, simulated in times
        ]

    same = Agreement.of(rows((1.0, 1.0), (2.0, 2.0), (3.0, 3.0)))
    assert (same.rank_correlation, same.mean_error, same.loss) == (pytest.approx(1.0), 0.0, 0.0)
    turned = Agreement.of(rows((1.0, 2.0), (2.0, 1.0)))
    assert turned.rank_correlation == turned.within_matrices == pytest.approx(-1.0)
    assert turned.mean_error == pytest.approx(0.75)
    assert turned.largest_error == pytest.approx(1.0)
    assert turned.loss == pytest.approx(1.0)


def test_untuned_divisions_reach_their_aims_by_simulation() -> None:
    """Simulated, not measured on a GPU: W12 beside BF16, 8 tokens, untuned, started early."""
    wanted = {
        "attention output": 1.1,
        "query, key, value": 1.15,
        "down": 1.2,
        "gate and up": 1.2,
    }
    found = {row.matrix: row.plain / row.early for row in KEPT.rows if row.n_tokens == 8}
    for matrix, ratio in wanted.items():
        assert found[matrix] >= ratio, matrix
    model = MODELS[0]
    step = simulate_step(model, 8)
    assert step is not None
    matrices = (s.count * predict_plain(s.n_rows, s.n_columns, 8, H200) for s in model.shapes)
    assert (model.rest + sum(matrices)) / step["early"] >= 1.18


def test_kept_figures_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text('{"kind": "gpu"}')
    with pytest.raises(ValueError, match="of kind 'gpu', not 'simulated'"):
        kept_simulations.read(path)
