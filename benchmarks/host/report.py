"""The tables of a measurement of tables in host memory as Markdown: for the terminal and for
docs/benchmarks_host.md.

They are a function of the JSON that `run.py host` and `gpu.py host` keep, and of the model of time
for gathers on a GPU; nothing is measured here.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import figures
from benchmarks.data.table_formats import FORMATS
from benchmarks.data.wordnet import N_LABELS
from benchmarks.host import embeddings, kv, picture
from packhorse.gpu.models import PRESETS
from packhorse.host.device_cost import default_programs, predict_gather
from packhorse.kernels.tables import kernel_of
from packhorse.table_layout import TableFormat, TableMode

__all__ = ["document", "part", "targets"]

Result = dict[str, Any]
GATHERS = ("packhorse", "index_select", "take", "ibp")

_GPU_RESULTS = Path(__file__).resolve().parents[1] / "results" / "gpu"
_N_MEASURED = 1 << 17  # rows of the measured gathers that are shown
_N_IDS = 1 << 20
_PREDICTED = (
    *("BF16, codes of 4 bits", "BF16, three codes in 10 bits", "FP32, codes of 4 bits"),
    *("bitmap and indices", "list and row value"),
)

INTRODUCTION = """# Benchmarks of tables in host memory

Written by `make bench ARGS="host --write"` from `benchmarks/results/host.json`; do not edit by
hand.

- Every table that is listed was packed, and all its rows were gathered in another order and
  compared bit for bit, before a figure was kept.
- "Ratio" is bytes of the plain table over all bytes of the packed one, with exceptions.
- "Pulled" is bytes of a plain row over bytes of the granules that a fetch of a packed row touches,
  of 32 bytes (sectors) or 128 (lines). This is what a link carries.
- "Fast" is the share of the plain table that exceptions take in fast memory.
- IBP is Invariant Bit Packing by its published rules (EuroSys 2026), with the best of its
  thresholds and of words of 32 and 64 bits. Its rows stay at their places, so it saves no memory:
  its "ratio" is of the bytes that are read.
- The bound is the ratio if exponents took their entropy, and all other bits were stored.
"""


def part(result: Result, name: str) -> str:
    """The section of one part of a run."""
    title, text = _PARTS[name]
    apart = result.get("apart", {}).get(name)
    conditions = f"{figures.conditions(apart)}\n\n" if apart else ""
    return f"## {title}\n\n{conditions}{text(result[name])}"


def document(result: Result) -> str:
    """The whole of docs/benchmarks_host.md."""
    parts = [
        INTRODUCTION,
        f"## Machine\n\n{figures.conditions(result)}\n",
        f"## Targets\n\n{targets(result)}\n",
        *(f"{part(result, name)}\n" for name in _PARTS if name in result),
        f"## Gathers on a GPU\n\n{_on_gpus()}\n",
    ]
    return "\n".join(parts)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _pair(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    return f"{found['ratio']:.3g} ({found['pulled']['32']:.3g} / {found['pulled']['128']:.3g})"


def _ratios(found: list[Result]) -> str:
    names = ("codes of 4 bits", "three codes in 10 bits", "codes of 3 bits", "bitmap", "list")
    lines = [
        f"![{picture.ALT}]({picture.NAME})",
        "",
        "Ratio, and in brackets how many times less is pulled, at 32 and at 128 bytes.",
        "",
        _line(["table", "row, B", "chosen", "what it is", "fast", "IBP", *names, "bound"]),
        _line(["---", "--:", "--:", "---", *["--:"] * (3 + len(names))]),
    ]
    for row in found:
        chosen = row["ways"]["chosen for 32"]
        bound = row["exponent_bound"]
        cells = [
            row["table"],
            str(row["row_nbytes"]),
            f"**{_pair(chosen)}**",
            chosen["words"],
            f"{100 * chosen['fast_share']:.2f} %",
            _pair(row["ibp"]),
            *(_pair(row["ways"].get(name)) for name in names),
            "-" if bound is None else f"{bound:.2f}",
        ]
        lines.append(_line(cells))
    return "\n".join(lines)


def _gathers(found: list[Result]) -> str:
    lines = [
        "GB/s of plain rows. Rows are gathered at random, from few rows that stay in the cache, "
        "and from a table of 512 MB. Times is ours over `torch.index_select`, in seconds: below 1 "
        "ours is faster. IBP reads rows on GPUs only; `benchmarks/host/ibp_rows.cpp` is a reader "
        "for CPUs with BMI2.",
        "",
        _line([*("table", "row, B", "rows", "threads"), *GATHERS, "times"]),
        _line(["---", "--:", "---", "--:", *["--:"] * len(GATHERS), "--:"]),
    ]
    for row in found:
        held = [row["gbps"].get(name) for name in GATHERS]
        speeds = ["-" if speed is None else f"{speed:.1f}" for speed in held]
        lines.append(
            _line(
                [
                    row["table"],
                    str(row["row_nbytes"]),
                    row["what"],
                    str(row["threads"]),
                    *speeds,
                    f"{row['times']:.2f}",
                ]
            )
        )
    return "\n".join(lines)


def _packing(found: list[Result]) -> str:
    lines = [
        "GB/s of plain rows on one core, and milliseconds for the choice from a sample.",
        "",
        _line(["table", "way", "GB/s", "choice, ms"]),
        _line(["---", "---", "--:", "--:"]),
    ]
    for row in found:
        cells = [row["table"], row["way"], f"{row['gbps']:.2f}", f"{row['plan_ms']:.0f}"]
        lines.append(_line(cells))
    return "\n".join(lines)


def _measured_on_gpus() -> Iterator[str]:
    """What `gpu.py host` has measured: 2^17 random rows, in GB/s of plain rows."""
    for path in sorted(_GPU_RESULTS.glob("host-*.json")):
        kept = json.loads(path.read_text())
        yield (
            f"**Measured on an {kept['card']}**, {kept['date']} (`python benchmarks/gpu.py host`): "
            f"{kept['weights']}, 131,072 random rows, GB/s of plain rows. *Packed, default* is the "
            "same with as many multiprocessors as a gather takes by itself. *IBP* reads as many "
            "bytes as Invariant Bit Packing would, and decodes nothing."
        )
        yield ""
        heads = ["rows", "ids", "multiprocessors", "plain, in place", "index_select", "packed"]
        yield _line([*heads, "times", "packed, default", "IBP"])
        yield _line(["---", "---", *["--:"] * 7])
        groups: dict[tuple[str, str, int], dict[str, float]] = {}
        for row in kept["parts"]["rows"]:
            if row.get("n") == _N_MEASURED:
                key = row["table"], row["ids"], row["programs"]
                groups.setdefault(key, {})[row["way"]] = row["per_s"] / 1e9
        for (table, ids, n), speeds in groups.items():
            plain, packed = speeds["plain, in place"], speeds["packed"]
            bound = speeds["the bytes of IBP, not decoded"]
            selected = speeds["plain, in place, index_select"]
            default = speeds["packed, default"]
            cells = [table, ids, str(n), f"{plain:.0f}", f"{selected:.0f}", f"{packed:.0f}"]
            yield _line([*cells, f"{packed / plain:.2f}", f"{default:.0f}", f"{bound:.0f}"])
        yield ""


def _on_gpus() -> str:
    """Random rows, plain and packed: what was measured, and predictions for two GPUs."""
    lines = [
        *_measured_on_gpus(),
        "**Predicted**, by the model of time (`packhorse.host.device_cost`): bytes over the link "
        "in packets, bytes on the way, counted instructions, device memory. It does not know "
        "that random rows of a large table come at some 40 million a second, as the table above "
        "shows. GB/s of plain rows, for 2^20 random rows in "
        "huge pages; rows pull all of their bytes. Plain rows are read in place by as many "
        "multiprocessors.",
        "",
        _line(["GPU", "rows", "multiprocessors", "plain", "packed", "times", "limit"]),
        _line(["---", "---", "--:", "--:", "--:", "--:", "---"]),
    ]
    for device in (PRESETS[0], PRESETS[-1]):
        for name in _PREDICTED:
            format = FORMATS[name]
            raw = TableFormat(
                TableMode.RAW, format.element_bits, format.n_columns, rest_bits=format.element_bits
            )
            block, plain_block = (kernel_of(f, True).constants["BLOCK_ROWS"] for f in (format, raw))
            for n in dict.fromkeys((16, default_programs(format, block, device))):
                plain = predict_gather(raw, _N_IDS, n, plain_block, device).seconds
                found = predict_gather(format, _N_IDS, n, block, device)
                speeds = [_N_IDS * raw.row_nbytes / time / 1e9 for time in (plain, found.seconds)]
                cells = [device.name, name, str(n), *(f"{speed:.0f}" for speed in speeds)]
                lines.append(_line([*cells, f"{speeds[1] / speeds[0]:.2f}", found.limit]))
    return "\n".join(lines)


def _training(found: Result) -> str:
    settings, limit = found["settings"], found["limit_nbytes"]
    lines = [
        f"GraphSAGE on WordNet: {found['n_nodes']:,} synsets, {found['n_edges']:,} relations, "
        f"{settings['n_words']:,} words of glosses as features in FP32, {N_LABELS} labels. PyTorch "
        "Geometric, one thread; only the features differ. Losses of all runs are the same, bit for "
        "bit. Own memory is a process's peak without pages of files; resident is with those. An "
        "epoch is the last one, and rows are the part of it that gathers features.",
        "",
        _line(["features", "take, MB", *(f"{what}, MB" for what in ("own memory", "resident"))])
        + " ready, s | epoch, s | rows, s | accuracy |",
        _line(["---", *["--:"] * 7]),
        *(_whole_run(run) for run in found["runs"] if not run["limited"]),
        "",
    ]
    if limit is None:
        return "\n".join([*lines, f"Not measured with a limit of memory: {found['not_limited']}."])
    return "\n".join([*lines, *_limited_runs(found, limit)])


def _whole_run(run: Result) -> str:
    epoch = run["epochs"][-1]
    sizes = (run[f"{what}_nbytes"] / 1e6 for what in ("features", "own", "resident"))
    seconds = run["ready"], epoch["seconds"], epoch["rows"]
    cells = [f"{size:,.0f}" for size in sizes] + [f"{s:.1f}" for s in seconds]
    return _line([run["arm"], *cells, f"{run['accuracy']:.4f}"])


def _limited_runs(found: Result, limit: int) -> Iterator[str]:
    yield (
        f"The first batches with {limit / 1e6:,.0f} MB of memory, pages of files included: what a "
        "run with packed features needs, and a quarter of the plain features. (A control group of "
        "Linux sets the limit.) The file of features begins outside of the cache. The system reads "
        f"{found['read_ahead_kib'] or '?'} KiB at a page fault, unless it was told that reads are "
        "random."
    )
    yield ""
    yield _line(["features", "a batch, ms", "of it rows, ms", "page faults", "read, MB"])
    yield _line(["---", *["--:"] * 4])
    for run in (run for run in found["runs"] if run["limited"]):
        if run["killed"]:
            yield _line([run["arm"], "killed: out of memory", "", "", ""])
            continue
        epoch = run["epochs"][0]
        n = epoch["batches"]
        ms = (f"{1e3 * epoch[name] / n:,.0f}" for name in ("seconds", "rows"))
        faults, read = epoch["faults"] / n, epoch["read_nbytes"] / n / 1e6
        yield _line([run["arm"], *ms, f"{faults:,.0f}", f"{read:,.0f}"])


_PARTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "ratios": ("What a fetch of a row touches", _ratios),
    "gathers": ("Gathers on the CPU", _gathers),
    "packing": ("Packing", _packing),
    "embeddings": ("Embedding bags on the CPU", embeddings.lines),
    "training": ("Training on a graph", _training),
    "kv": ("Keys and values", kv.section),
}


def targets(result: Result) -> str:
    """What was aimed at, what was measured."""
    lines = [_line(["target", "measured", "limit", ""]), _line(["---", "--:", "--:", "---"])]
    for name, measured, limit, met in _targets(result):
        lines.append(_line([name, measured, limit, "met" if met else "MISSED"]))
    return "\n".join(lines)


def _targets(result: Result) -> Iterator[tuple[str, str, str, bool]]:
    rows = {row["table"]: row for row in result.get("ratios", [])}
    wanted = {
        "MiniLM words, BF16": 1.333,
        "WordNet, 3,703 words, 1 / n": 450.0,
        "Fashion-MNIST / 255, FP32": 6.0,
    }
    for table, limit in wanted.items():
        if table in rows:
            pulled = rows[table]["ways"]["chosen for 32"]["pulled"]["32"]
            yield (
                f"{table}: times less pulled at 32 B",
                f"{pulled:.4g}",
                f">= {limit:g}",
                pulled >= limit - 5e-4,
            )
    if rows:
        worse = [
            name
            for name, row in rows.items()
            for granule in ("32", "128")
            if row["ibp"] is not None
            and row["ways"][f"chosen for {granule}"]["pulled"][granule]
            < row["ibp"]["pulled"][granule] - 5e-4
        ]
        yield "tables and granules where IBP pulls less", str(len(worse)), "0", not worse
    for what in ("rows in the cache", "larger than the cache"):
        times = [
            row["times"]
            for row in result.get("gathers", [])
            if row["what"] == what and row["row_nbytes"] >= 768
        ]
        if times:
            limit = 1.5 if what == "rows in the cache" else 1.0
            yield (
                f"gather, rows of 768 B and more, {what}: greatest times index_select",
                f"{max(times):.2f}",
                f"<= {limit}",
                max(times) <= limit,
            )
    speeds = [row["gbps"] for row in result.get("packing", [])]
    if speeds:
        slowest = min(speeds)
        yield "packing: slowest, GB/s a core", f"{slowest:.2f}", ">= 1.5", slowest >= 1.5
