"""The tables and the picture of the wire: from figures that are known, and from a small run."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_modules import import_afresh
from forked_ranks import fork_ranks

ROOT = Path(__file__).resolve().parents[2]
RATES = {"100M": 100_000_000, "1G": 1_000_000_000, "5G": 5_000_000_000, "unshaped": None}
MB = 1_000_000


@pytest.fixture(scope="module")
def wire() -> Iterator[dict[str, ModuleType]]:
    """The modules that make tables and run scenarios, on ranks that are forked."""
    names = ("crossover", "fsdp", "links", "measure", "ranks", "report", "rounds", "scenarios")
    with (
        import_afresh(*(f"wire.{name}" for name in names)) as modules,
        pytest.MonkeyPatch.context() as patch,
    ):
        fork_ranks(patch, modules["wire.ranks"])
        yield {name.partition(".")[2]: module for name, module in modules.items()}


def _row(payload: float, encode: float, decode: float, rate: float) -> dict[str, Any]:
    """What an arm takes if the wire carries `rate` bytes a second."""
    seconds = encode + payload / rate + decode + 0.001
    steps = {"encode": encode, "wire": payload / rate, "decode": decode, "apply": 0.001}
    return steps | {
        "payload": payload,
        "nbytes": 1.05 * payload,
        "cpu": encode + decode,
        "seconds": [seconds, 0.9 * seconds, 2 * seconds],
    }


def _updates(rate: float) -> dict[str, Any]:
    rows = {
        "raw": _row(30 * MB, 0, 0, rate),
        "gaps + XOR + zstd-1": _row(MB, 0.01, 0.002, rate),
        "packhorse updates": _row(MB / 2, 0.02, 0.01, rate),
    }
    case = {"name": "1.2", "source": "stand-in", "nbytes": 30 * MB, "rows": rows}
    return {"cases": [case | {"density": 0.012, "byte_density": 0.006}], "absent": {}}


def _collectives(rate: float) -> dict[str, Any]:
    rows = {
        name: {"seconds": [nbytes / rate + more] * 3, "nbytes": nbytes, "cpu": more}
        for name, nbytes, more in (
            ("raw", 8 * MB, 0.0),
            ("raw, receives first", 4 * MB, 0.0),
            ("packhorse", 5 * MB, 0.001),
        )
    }
    case = {"name": "embeddings, fp32", "kind": "all_to_all", "nbytes": 8 * MB, "rows": rows}
    return {"cases": [case], "absent": {"packhorse raw": "no module"}}


@pytest.fixture
def result() -> dict[str, Any]:
    """Figures that follow from what each way costs."""
    runs = []
    for name, bits in RATES.items():
        rate = (bits or 40_000_000_000) / 8
        known = {"world": 2, "rate": name, "bits": bits, "dropped": 0}
        runs.append(known | {"scenario": "rates", "result": {"TCP": rate}})
        runs.append(known | {"scenario": "updates", "result": _updates(rate)})
        runs.append(known | {"scenario": "collectives", "result": _collectives(rate)})
    return {
        "date": "2026-01-01",
        "path": "avx2",
        "machine": dict.fromkeys(("cpu", "family_model_stepping", "system", "python"), "?")
        | {"cores": 2, "memory_gib": 8},
        "versions": {"torch": "2"},
        "rounds": 3,
        "not_shaped": None,
        "load_before": 0.0,
        "load_after": 0.0,
        "core_scaling": [2.0, 2.0],
        "arms": {"updates": {"raw": "as it is"}, "collectives": {"packhorse raw": "ours"}},
        "runs": runs,
    }


def _cases(result: dict[str, Any]) -> list[Any]:
    return [run["result"]["cases"][0] for run in result["runs"] if run["scenario"] == "updates"]


def test_raw_wins_above_the_rate_at_which_packing_takes_as_long_as_it_saves(
    wire: dict[str, ModuleType], result: dict[str, Any]
) -> None:
    found = wire["crossover"].crossover(_cases(result), "packhorse updates")
    assert found.rate == pytest.approx(29.5 * MB / 0.03)
    assert (found.agrees, found.total) == (4, 4)
    found = wire["crossover"].crossover(_cases(result), "gaps + XOR + zstd-1")
    assert found.rate == pytest.approx(29 * MB / 0.012)


def test_a_point_that_contradicts_the_crossover_is_counted(
    wire: dict[str, ModuleType], result: dict[str, Any]
) -> None:
    cases = _cases(result)
    cases[0]["rows"]["packhorse updates"]["seconds"] = [10.0] * 3
    found = wire["crossover"].crossover(cases, "packhorse updates")
    assert (found.agrees, found.total) == (3, 4)


def test_an_arm_that_costs_nothing_never_loses(
    wire: dict[str, ModuleType], result: dict[str, Any]
) -> None:
    cases = _cases(result)
    for case in cases:
        case["rows"]["packhorse updates"] |= {"encode": 0, "decode": 0}
    assert wire["crossover"].crossover(cases, "packhorse updates").rate is None


def test_targets_and_losses_are_told(wire: dict[str, ModuleType], result: dict[str, Any]) -> None:
    told = wire["report"].targets(result)
    assert "in which ours has the fewest bytes | 1 | 1 | met |" in told
    # 20 ms more than the rival are saved at 100 Mb/s only.
    assert "in which ours is the fastest | 1 | 3 | MISSED |" in told
    assert "| embeddings, fp32: least, times `raw` | 0.80 | >= 0.98 | MISSED |" in told
    assert "| embeddings below 1 Gb/s: least, times `raw` | 1.60 | >= 1.4 | met |" in told
    lost = wire["report"].losses(result)
    assert "end to end at 100M" not in lost
    assert (
        "- update, 1.20 %, 2 ranks, end to end at 1G, times ours: gaps + XOR + zstd-1 0.60." in lost
    )
    assert "- update, 1.20 %, 2 ranks, encode, times ours: gaps + XOR + zstd-1 0.50." in lost
    assert "payload" not in lost
    assert "- embeddings, fp32, 2 ranks, 100M, time, times ours: raw, receives first 0.80." in lost


def test_document_has_all_columns(wire: dict[str, ModuleType], result: dict[str, Any]) -> None:
    text = wire["report"].document(json.loads(json.dumps(result)))
    row = next(line for line in text.splitlines() if line.startswith("| **packhorse updates**"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # Payload, ratio, interface, encode, wire, decode, apply, processor, busy, then the rates.
    assert cells[1:8] == ["0.5", "60.0", "0.525", "20.0", "4.00", "10.0", "1.00"]
    assert cells[8:10] == ["30.0", "43 %"]
    assert cells[10:12] == ["71.0 (63.9-142)", "35.0 (31.5-70.0)"]
    assert "| 2, 1.20 % | 19.33 (4 of 4) | 7.87 (4 of 4) |" in text
    assert "| 2, no limit | 40.000 |" in text
    assert "- `packhorse raw`: ours. Not measured: no module." in text
    assert "All interfaces together dropped 0 packets." in text
    assert wire["report"].body(result)


def test_picture_marks_where_raw_wins(wire: dict[str, ModuleType], result: dict[str, Any]) -> None:
    drawn = wire["report"].picture(result)
    assert drawn.startswith("<svg ")
    assert "raw wins above 7.9 Gb/s" in drawn
    assert drawn.count("<circle") == 3 * 4 + 1
    places = [float(y) for y in re.findall(r'cy="([0-9.]+)"', drawn)]
    assert all(76 <= y <= 430 for y in places)


def test_bytes_and_time_of_ranks_are_combined(wire: dict[str, ModuleType]) -> None:
    def one(begin: float, end: float, sent: int) -> dict[str, Any]:
        return {"begin": begin, "end": end, "cpu": 1.0, "sent": sent, "marks": {"a": begin + 1}}

    reports = [{"x": [one(0, 5, 10), one(10, 12, 30)]}, {"x": [one(1, 4, 5), one(9, 13, 7)]}]
    row = wire["rounds"].combine(reports, shared=False)["x"]
    assert row == {"seconds": [4.5, 4, 5], "cpu": 2.0, "nbytes": 26.0}
    assert wire["rounds"].combine(reports, shared=True)["x"]["nbytes"] == 20.0
    assert wire["rounds"].slowest(reports, "x", "a", "begin", [0, 1]) == 1
    assert wire["rounds"].slowest(reports, "x", "b", "begin", [0, 1]) is None


def test_a_small_run_on_the_loopback_becomes_a_document(
    wire: dict[str, ModuleType], result: dict[str, Any]
) -> None:
    arms = ("raw", "int32 + values", "packhorse frames")
    settings = wire["scenarios"].Settings(
        rounds=1, nbytes=1 << 20, threads=1, densities=("1.2",), arms=arms
    )
    with wire["links"].loopback() as links:
        found = wire["scenarios"].measure("updates", links, 2, settings, timeout=120)
    rows = found["cases"][0]["rows"]
    assert tuple(rows) == arms
    assert rows["raw"]["payload"] == 2 << 20
    assert rows["raw"]["nbytes"] > 2 << 20
    for row in rows.values():
        least = max(row[step] for step in ("encode", "wire", "decode", "apply"))
        assert 0 < least <= row["seconds"][2] + 1e-9
        assert row["cpu"] > 0
    known = {"world": 2, "rate": "unshaped", "bits": None, "dropped": 0}
    result["runs"] = [known | {"scenario": "updates", "result": json.loads(json.dumps(found))}]
    text = wire["report"].document(result)
    assert "| raw | 2.1 | 1.0 |" in text
    assert wire["report"].picture(result).startswith("<svg ")


def test_collectives_on_the_loopback_agree(wire: dict[str, ModuleType]) -> None:
    settings = wire["scenarios"].Settings(rounds=1, nbytes=1 << 18, threads=1, densities=())
    with wire["links"].loopback() as links:
        found = wire["scenarios"].measure("collectives", links, 2, settings, timeout=120)
    assert [case["name"] for case in found["cases"]] == [
        "embeddings, fp32",
        "embeddings, bf16",
        "weights, bf16",
    ]
    for case in found["cases"]:
        assert {"raw", "raw, one piece", "raw, receives first", "zstd-1"} <= set(case["rows"])
        assert case["rows"]["zstd-1"]["seconds"][0] > 0


def _take(
    monkeypatch: pytest.MonkeyPatch, wire: dict[str, ModuleType], name: str, **options: Any
) -> None:
    """Give a scenario more options than the command line does."""
    plan = wire["scenarios"].SCENARIOS
    usual = plan[name].options
    more = replace(plan[name], options=lambda *given: usual(*given) | options)
    monkeypatch.setitem(plan, name, more)


def test_steps_of_fsdp_keep_the_bits(
    wire: dict[str, ModuleType], result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _take(monkeypatch, wire, "fsdp", warm_ups=4)
    settings = wire["scenarios"].Settings(rounds=1, nbytes=1, threads=1, densities=())
    with wire["links"].loopback() as links:
        found = wire["scenarios"].measure("fsdp", links, 2, settings, timeout=120)
    (case,) = found["cases"]
    assert set(case["rows"]) == {*wire["fsdp"].ARMS} - {*found["absent"]}
    assert all(row["equal"] for row in case["rows"].values())
    known = {"world": 2, "rate": "1G", "bits": 10**9, "dropped": 0, "scenario": "fsdp"}
    result["runs"] = [known | {"result": json.loads(json.dumps(found))}]
    text = wire["report"].document(result)
    assert "### 2 ranks, 1.3 million parameters" in text
    assert re.search(r"\| plain \| .* \| yes \| [^|]* \| 1\.00 \|", text)


def test_steps_of_a_dlrm_have_a_table_and_targets(
    wire: dict[str, ModuleType], result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _take(monkeypatch, wire, "dlrm", batch=2048, cap=2000)
    arms = ("fp32", "dedup", "bounded")
    settings = wire["scenarios"].Settings(rounds=1, nbytes=1, threads=1, densities=(), arms=arms)
    with wire["links"].loopback() as links:
        found = wire["scenarios"].measure("dlrm", links, 2, settings, timeout=120)
    (case,) = found["cases"]
    assert tuple(case["rows"]) == arms
    fp32, dedup, bounded = (case["rows"][name]["payload"] for name in arms)
    assert fp32 > 2 * dedup > 4 * bounded
    known = {"world": 2, "rate": "1G", "bits": 10**9, "dropped": 0, "scenario": "dlrm"}
    result["runs"] = [known | {"result": json.loads(json.dumps(found))}]
    text = wire["report"].document(result)
    assert "### 2 ranks, 2,048 samples a step" in text
    assert re.search(r"\| DLRM step, 2 ranks, 1 Gb/s, .*: times fp32 \|", text)


def test_a_scenario_without_any_chosen_arm_has_no_table(
    wire: dict[str, ModuleType], result: dict[str, Any]
) -> None:
    for run in result["runs"]:
        if run["scenario"] != "rates":
            run["result"]["cases"] = []
    assert wire["report"].document(result).count("Not in this run.") == 5


def test_document_is_what_the_kept_figures_give(wire: dict[str, ModuleType]) -> None:
    path = wire["measure"].RESULT
    if not path.exists():
        pytest.skip("no figures are kept yet")
    kept = json.loads(path.read_text())
    assert wire["measure"].DOCUMENT.read_text() == wire["report"].document(kept)
    assert wire["measure"].PICTURE.read_text() == wire["report"].picture(kept)


def test_keeping_figures_needs_a_whole_run(
    wire: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        wire["measure"].main(["--write", "--rate", "1G"])
    assert "--write needs a whole run" in capsys.readouterr().err
