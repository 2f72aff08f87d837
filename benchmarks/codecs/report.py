"""The tables of a measurement as Markdown: for the terminal, docs/benchmarks_codecs.md, README.md.

Everything here is a function of the JSON that run.py, memory.py and import_time.py keep; nothing is
measured. No ratio stands without both speeds, every target says whether it is met, and every figure
in which a rival is ahead of our default level is listed.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.codecs import plot
from benchmarks.codecs.targets import Verdict, judge

__all__ = [
    "CEILING",
    "KINDS",
    "OURS",
    "PICTURE",
    "PICTURE_ALT",
    "PLOTTED",
    "RIVAL",
    "Result",
    "Row",
    "conditions",
    "document",
    "find_row",
    "glance",
    "is_special",
    "load",
    "losses",
    "main_run",
    "of_set",
    "picture",
    "readme",
    "relative",
    "section",
    "summary",
    "targets",
    "verdict_table",
    "ways",
    "written_ratio",
    "written_speed",
]

# Kinds of tensors in a checkpoint, by the names that training.py gives them.
KINDS = {"w32": "fp32 masters", "w16": "bf16 copy", "m32": "first moments", "v32": "second moments"}
OURS = "packhorse"
RIVAL = "zipnn"
CEILING = "np.copyto"
Row = dict[str, Any]
Result = dict[str, Any]

# The part of the main run that the README shows: few codecs on few data sets, one thread.
README_BEGIN = "<!-- benchmarks: begin -->"
README_END = "<!-- benchmarks: end -->"
README_DATA = {
    "model_bf16": "bf16",
    "model_fp32": "fp32",
    "model_fp16": "fp16",
    "fp8_e4m3": "fp8 (e4m3)",
}
README_CODECS = {
    "packhorse": "**packhorse**",
    "packhorse-fast": "**packhorse**, level fast",
    "packhorse-max": "**packhorse**, level max",
    "zipnn": "zipnn",
    "openzl": "openzl",
    "pcodec": "pcodec",
    "blosc2-bitshuffle-lz4": "blosc2, bit shuffle and lz4",
    "zstandard-3": "zstd, level 3",
    CEILING: "memory copy",
}
PLOTTED = "model_bf16"
PICTURE = "benchmarks.svg"
PICTURE_ALT = "Ratio against decoding speed of every codec on bf16 weights, one thread"

INTRODUCTION = """# Benchmarks of codecs

All figures behind [benchmarks](benchmarks.md). Written by `make bench ARGS="--full --write"` from
`benchmarks/results/`; do not edit by hand.

- Ratio is original over packed bytes, headers counted. Speeds are 10^9 bytes of the original a
  second, through Python: the median of the rounds, with the least and the greatest in brackets.
- Every codec proves its round trip bit for bit first. Then the rounds go from codec to codec in one
  process. One thread is pinned to a core and timed by processor time, two threads by the clock.
- Memory is recycled: malloc keeps what is freed, and codecs that can write into existing memory do.
  A table of its own shows what fresh memory costs.
- `packhorse` is our default level; it gets all tensors in one call. The rivals get them end to end
  as one array, which suits them best.
- `x zipnn`: encode / decode speed over zipnn's with as many threads. `of copy`: the share of
  np.copyto's speed on one thread. `two threads`: speed over that of one thread, both by the clock.
- The machine's instruction sets are listed. packhorse takes one path for all it does: `avx512`
  (AVX-512 F, BW, DQ and VL), `avx512_vbmi2` (those and VBMI2), `avx2` (AVX2, BMI) or `portable`.
  Rivals choose for themselves.
"""
FRESH_NOTE = (
    "Every output goes into new memory, ours too, and malloc is not changed. Callers that pass no "
    "memory to decode into see these figures."
)
FORCED_NOTE = (
    "The targets again, as far as this run has figures for them. Ratios do not depend on the path, "
    "so the rivals that are demanding in ratio alone were left out; decoding must still beat zipnn."
)
SLOW_NOTE = (
    "† Slow, so timed in {rounds} on the {mb:.1f} MB in the middle of the data, "
    "which caches flatter a little; the round trip and the ratio are those of the whole."
)


def section(dataset: Row, rows: list[Row], rival: str = RIVAL) -> str:
    """The heading and the table of one data set, one line for each codec and number of threads.

    Args:
        dataset: the entry of the set in a run's figures.
        rows: the rows of the set, in the order of the table.
        rival: whose speed ours is compared with.
    """
    lines = [
        _heading(dataset),
        "",
        f"| codec | threads | ratio | encode GB/s | decode GB/s | x {rival} | of copy |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    slow = [row for row in rows if row.get("timed_nbytes", dataset["nbytes"]) < dataset["nbytes"]]
    for row in rows:
        cells = [
            f"**{row['codec']}**" if row["codec"].startswith(OURS) else row["codec"],
            str(row["threads"]),
            written_ratio(row["ratio"]),
            _spread(row["encode"]),
            _spread(row["decode"]),
            relative(row, find_row(rows, rival, row["threads"]), "{:.2f}"),
            relative(row, find_row(rows, CEILING, 1), "{:.0%}"),
        ]
        cells[0] += " †" if row in slow else ""
        lines.append(f"| {' | '.join(cells)} |")
    if slow:
        rounds = "1 round" if slow[0]["rounds"] == 1 else f"{slow[0]['rounds']} rounds"
        lines += ["", SLOW_NOTE.format(rounds=rounds, mb=slow[0]["timed_nbytes"] / 1e6)]
    return "\n".join(lines)


def _heading(dataset: Row) -> str:
    count = dataset.get("n_tensors", 1)
    tensors = f", {count} tensors" if count > 1 else ""
    return f"### {dataset['name']} ({dataset['nbytes'] / 1e6:.1f} MB{tensors}): {dataset['source']}"


def written_ratio(ratio: float) -> str:
    """A ratio as all tables have it."""
    return f"{ratio:.4f}" if ratio < 100 else f"{ratio:.0f}"


def _spread(speeds: list[float]) -> str:
    median, low, high = (written_speed(speed) for speed in speeds)
    return f"{median} ({low}-{high})"


def written_speed(speed: float) -> str:
    """A speed in GB/s as all tables have it."""
    return f"{speed:.2f}" if speed >= 0.1 else f"{speed:.3f}"


def relative(row: Row, other: Row | None, form: str) -> str:
    """Encoding and decoding speed over those of another row, written with `form`."""
    if other is None:
        return ""
    return " / ".join(form.format(row[way][0] / other[way][0]) for way in ("encode", "decode"))


def find_row(rows: list[Row], codec: str, threads: int) -> Row | None:
    """The row of a codec, if it was measured."""
    found = (row for row in rows if row["codec"] == codec and row["threads"] == threads)
    return next(found, None)


def of_set(result: Result, name: str) -> list[Row]:
    """The rows of one data set."""
    return [row for row in result["rows"] if row["data"] == name]


def summary(result: Result) -> str:
    """Our default level on every data set beside zipnn's speed, then the packed files."""
    parts = ["## Our default level at a glance", "", glance(result)]
    if result["files"]:
        parts += ["", "## The model as whole files, packed and unpacked byte for byte", ""]
        parts.append(_files(result["files"]))
    return "\n".join(parts)


def glance(result: Result) -> str:
    """Our default level on every data set beside zipnn's speed, as a table."""
    lines = [
        "| data | ratio | zipnn | encode GB/s | decode GB/s | x zipnn | of copy | two threads |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for dataset in result["data"]:
        rows = of_set(result, dataset["name"])
        ours, rival = find_row(rows, OURS, 1), find_row(rows, RIVAL, 1)
        if ours is None:
            continue
        cells = [
            dataset["name"],
            written_ratio(ours["ratio"]),
            written_ratio(rival["ratio"]) if rival else "",
            written_speed(ours["encode"][0]),
            written_speed(ours["decode"][0]),
            relative(ours, rival, "{:.2f}"),
            relative(ours, find_row(rows, CEILING, 1), "{:.0%}"),
            _gain(ours, find_row(rows, OURS, 2)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _gain(one: Row, two: Row | None) -> str:
    """Encode and decode speed of two threads over one, both by the wall clock."""
    if two is None:
        return ""
    ways = ("encode_wall", "decode_wall")
    return " / ".join(f"{two[way] / one[way]:.2f}" for way in ways)


def _files(rows: list[Row]) -> str:
    lines = ["| file | size | packed | ratio |", "|---|--:|--:|--:|"]
    lines += [
        f"| {row['file']} | {row['nbytes']:,} | {row['packed_nbytes']:,} | {row['ratio']:.4f} |"
        for row in rows
    ]
    return "\n".join(lines)


def losses(result: Result) -> str:
    """Every figure in which a rival is ahead of our default level, as a table."""
    lines = ["| data | threads | rival | ahead in | rival's | ours |", "|---|--:|---|---|--:|--:|"]
    for dataset in result["data"]:
        rows = of_set(result, dataset["name"])
        for row in rows:
            ours = find_row(rows, OURS, row["threads"])
            if ours and not row["codec"].startswith((OURS, CEILING)):
                lines += _ahead(row, ours)
    return "\n".join(lines) if len(lines) > 2 else "None in this run."


def _ahead(rival: Row, ours: Row) -> list[str]:
    """Lines for figures that are better and also look better at the precision of the tables."""
    ratio = written_ratio(rival["ratio"])
    pairs = [("ratio", rival["ratio"], ours["ratio"], written_ratio)]
    for way in ("encode", "decode"):
        pairs.append((f"{way} (ratio {ratio})", rival[way][0], ours[way][0], written_speed))
    return [
        f"| {rival['data']} | {rival['threads']} | {rival['codec']} | {note} "
        f"| {form(theirs)} | {form(mine)} |"
        for note, theirs, mine, form in pairs
        if theirs > mine and form(theirs) != form(mine)
    ]


def targets(run: Result, *, gaps: bool = True) -> str:
    """The targets and whether they are met, as a sentence and a table.

    Args:
        run: what run.py keeps of a run.
        gaps: also show targets for which the run has no figures.
    """
    verdicts = judge(run["rows"], forced=run["simd"] != "auto")
    if not gaps:
        verdicts = [verdict for verdict in verdicts if verdict.met is not None]
    return verdict_table(verdicts)


def verdict_table(verdicts: list[Verdict]) -> str:
    """A sentence with the number of targets that are met, and a table with a line for each."""
    counts = Counter(verdict.met for verdict in verdicts)
    sentence = f"{counts[True]} met, {counts[False]} not met"
    if counts[None]:
        sentence += f", {counts[None]} without a figure in this run"
    lines = [
        f"{sentence}.",
        "",
        "| target | data | codec | figure | must be | measured | met |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [_verdict_line(verdict) for verdict in verdicts])


def _verdict_line(v: Verdict) -> str:
    met = {True: "yes", False: "**no**", None: ""}[v.met]
    return f"| {v.target} | {v.data} | {v.codec} | {v.figure} | {v.bar} | {v.measured} | {met} |"


def picture(results: Path) -> str | None:
    """The SVG of docs/, from the main run; None if there is no such run, or it lacks the data.

    Args:
        results: the folder of JSON files that `--write` keeps.
    """
    run = main_run(results)
    rows = [row for row in of_set(run, PLOTTED) if row["threads"] == 1] if run else []
    if run is None or not rows:
        return None
    nbytes = next(d["nbytes"] for d in run["data"] if d["name"] == PLOTTED)
    return plot.svg(
        rows,
        title="bf16 weights, one thread",
        subtitle=f"{nbytes / 1e6:.1f} MB of a trained model on {run['machine']['cpu']}",
    )


def document(results: Path) -> str:
    """The whole of docs/benchmarks_codecs.md.

    Args:
        results: the folder of JSON files that `--write` keeps.
    """
    loaded = load(results)
    runs = sorted((r for r in loaded if r["kind"] == "codecs"), key=is_special)
    parts = [INTRODUCTION]
    for run in runs:
        parts.append(_forced(run) if is_special(run) else _main(run))
    parts += [_costs(r) for r in loaded if r["kind"] in _COSTS]
    return "\n".join(parts).rstrip() + "\n"


def readme(text: str, results: Path) -> str:
    """README.md with the table between its two markers made again from the main run.

    Args:
        text: README.md as it is.
        results: the folder of JSON files that `--write` keeps.

    Returns:
        The new text; the same text if there is no main run yet.

    Raises:
        ValueError: a marker is missing.
    """
    before, begin, rest = text.partition(README_BEGIN)
    _, end, after = rest.partition(README_END)
    if not begin or not end:
        raise ValueError(f"README.md needs the lines {README_BEGIN!r} and {README_END!r}")
    run = main_run(results)
    if run is None:
        return text
    return f"{before}{begin}\n{_readme_table(run)}\n{end}{after}"


def _readme_table(run: Result) -> str:
    m = run["machine"]
    names = " | ".join(README_DATA.values())
    lines = [f"| one thread | {names} |", "|---|" + "---|" * len(README_DATA)]
    for codec, label in README_CODECS.items():
        found = [find_row(of_set(run, name), codec, 1) for name in README_DATA]
        if any(found):
            lines.append(f"| {label} | {' | '.join(_readme_cell(row) for row in found)} |")
    if of_set(run, PLOTTED):
        lines += ["", f"![{PICTURE_ALT}](docs/{PICTURE})"]
    lines += ["", f"{m['cpu']}, {run['path']} path."]
    return "\n".join(lines)


def _readme_cell(row: Row | None) -> str:
    if row is None:
        return ""
    speeds = " / ".join(written_speed(row[way][0]) for way in ("encode", "decode"))
    return f"{row['ratio']:.3f} ({speeds})"


def load(results: Path) -> list[Result]:
    """What runs have kept in the folder `results`, sorted by the names of the files."""
    return [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]


def main_run(results: Path) -> Result | None:
    """The run of all data on the machine's best path; None if there is none yet."""
    runs = (run for run in load(results) if run["kind"] == "codecs" and not is_special(run))
    return next(runs, None)


def is_special(run: Result) -> bool:
    """Whether the run had a path forced on it, or fresh memory."""
    return bool(run["simd"] != "auto" or run["fresh_memory"])


def conditions(run: Result) -> str:
    """The conditions of a run: machine, versions, code path, rounds, load."""
    m = run["machine"]
    packages = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    sizes = ", ".join([*m.get("caches", []), f"{m['memory_gib']} GiB"])
    limit = f" on the first {run['limit_nbytes'] / 1e6:.0f} MB" if run["limit_nbytes"] else ""
    sentences = [
        f"{m['cpu']} (family/model/stepping {m['family_model_stepping']}), {m['cores']} cores, "
        f"{sizes}; {' '.join(m['flags'])}",
        f"{m['system']}, Python {m['python']}; {packages}",
        f"packhorse on its {run['path']} path",
        f"{run['rounds']} rounds{limit}; load {run['load_before']:.1f} before, "
        f"{run['load_after']:.1f} after",
    ]
    if "core_scaling" in run:
        before, after = run["core_scaling"]
        sentences.append(
            f"Two threads of SHA-256 in the cache did {before:.2f} times the work of one before, "
            f"and {after:.2f} after: that is what the machine gives a second thread"
        )
    return ".\n".join(sentences) + "."


def _main(run: Result) -> str:
    parts = ["## Machine", "", conditions(run), ""]
    if of_set(run, PLOTTED):
        parts += [f"![{PICTURE_ALT}]({PICTURE})", ""]
    parts += ["## Targets", "", targets(run), "", summary(run), ""]
    parts += ["## How each codec is run", "", ways(run), "", "## Every codec", "", _sections(run)]
    parts += ["## Where a rival is ahead of our default level", "", losses(run), ""]
    parts += ["## Data", "", _hashes(run), ""]
    return "\n".join(parts)


def ways(run: Result) -> str:
    """How each codec of a run is run, and which was not measured."""
    lines = [f"- `{name}`: {how}." for name, how in run.get("codecs", {}).items()]
    lines += [f"- `{name}` was not measured: {why}." for name, why in run["absent"].items()]
    return "\n".join(lines) or "This run did not keep it."


def _sections(run: Result) -> str:
    return "\n".join(section(d, of_set(run, d["name"])) + "\n" for d in run["data"])


def _hashes(run: Result) -> str:
    lines = ["| data | dtype | bytes | SHA-256 |", "|---|---|--:|---|"]
    lines += [
        f"| {d['name']} | {d['dtype']} | {d['nbytes']:,} | `{d['sha256']}` |" for d in run["data"]
    ]
    return "\n".join(lines)


def _forced(run: Result) -> str:
    """The short section about a run on a forced code path, or with fresh memory."""
    if run["simd"] == "auto":
        head = ["## The same, fresh memory", "", FRESH_NOTE, "", conditions(run), ""]
    else:
        head = [f"## The same, forced to the {run['simd']} path", "", conditions(run), ""]
        head += [FORCED_NOTE, "", targets(run, gaps=False), ""]
    return "\n".join([*head, _sections(run)])


def _memory(cost: Result) -> str:
    mib = {key: f"{cost[key] / 2**20:.0f} MiB" for key in cost if key.endswith("_nbytes")}
    return (
        "## Memory of packing\n\n"
        f"`python benchmarks/memory.py --write`: a file of {cost['n_tensors']} tensors of "
        f"{mib['tensor_nbytes']} is packed with a peak of {mib['pack_above_nbytes']} above the "
        f"interpreter with the package loaded, and unpacked with {mib['unpack_above_nbytes']}.\n"
    )


def _import_time(cost: Result) -> str:
    return (
        "## Time of importing\n\n"
        "`python benchmarks/import_time.py --write`: `import packhorse` takes "
        f"{cost['above_numpy_s'] * 1e3:.0f} ms more than `import numpy` (medians of "
        f"{cost['rounds']} runs each) and loads no torch.\n"
    )


_COSTS = {"memory": _memory, "import_time": _import_time}


def _costs(cost: Result) -> str:
    return _COSTS[cost["kind"]](cost)
