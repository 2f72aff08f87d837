"""The tables of a measurement of the wire as Markdown: for the terminal and for
docs/benchmarks_wire.md.

They are a function of the JSON that `run.py wire` keeps; nothing is measured here. `SECTIONS` has
a function for each scenario.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common import figures
from benchmarks.wire import picture as drawing
from benchmarks.wire.crossover import RAW, crossover
from benchmarks.wire.picture import ALT, NAME

__all__ = ["PICTURE", "SECTIONS", "body", "document", "losses", "picture", "targets"]

Result = Mapping[str, Any]
Row = Mapping[str, Any]
PICTURE = NAME
# Ours in the targets: the first of these that was measured.
OUR_UPDATES = ("packhorse updates", "packhorse frames")
OUR_COLLECTIVES = ("packhorse",)
OURS = "packhorse"
PLAIN = "plain"
BEST_RAW = "raw, receives first"
REFERENCE = "1G"  # steps are shown at this rate
DRAWN = (
    *(
        RAW,
        "zstd-1",
        "XOR + zstd-1",
        "gaps + XOR + zstd-1",
        "rows, columns + zstd-1",
        "int32 + values",
    ),
    "zipnn delta",
)
DRAWN_DENSITY, DRAWN_WORLD = "1.2", 2
STEPS = (
    *(("payload", "payload"), ("encode", "encode"), ("decode", "decode")),
    *(("pause", "apply"), ("processor", "cpu")),
)
NOT_OF_RAW = ("encode", "decode")  # it has none of these steps
NEVER_BELOW, SLOW_GAIN, FSDP_GAIN, DLRM_GAIN = 0.98, 1.4, 1.25, 1.9
FP32, OUR_DLRM = "fp32", "bounded"
SLOW = ("100M",)
FASTEST_AT = ("100M", "1G", "5G")

INTRODUCTION = """# Benchmarks of the wire

Written by `make bench ARGS="wire --full --write"` from `benchmarks/results/wire.json`; do not edit
by hand.

- Each rank is a process in a network namespace of its own. Virtual links and a bridge connect them,
  and a token bucket (`tc tbf`) holds both directions of each link to the rate. Latency is that of
  the machine. TCP uses CUBIC, and queues are long, so that no packet is lost.
- All ways take turns, round by round. Every result is compared bit for bit after every run, and
  before the first timed one. Times are from the first rank's beginning until the slowest rank has
  ended: median, and in brackets the least and the greatest.
- Bytes "at the interface" are those of all ranks with all headers, also of acknowledgements.
- Packing, unpacking and the ranks themselves share the cores of one machine. "Busy" is the
  processor time of all ranks over the time that the cores had: near 100 % a way is bound by
  the processor, and a machine for each rank would be faster.
- Rivals are made again from their sources, vectorised, with as many threads as ours.
"""

UPDATES_TEXT = """A trainer sends the difference of two states of the weights to all others, one
step after the other: encode, wire (gloo's broadcast in pieces of 1 MiB), decode, apply. Decoding
goes on beside the old weights ("background"), applying needs them to be still ("pause"). Steps are
those at {reference}, medians of the slowest rank."""

CROSSOVER_TEXT = """Above this rate of the wire, raw is ahead: bytes saved over the seconds that
packing takes more than raw. The rate is what raw reached, not what was set. In brackets: at how
many of the measured rates the winner is the one that this says."""


def body(result: Result) -> str:
    """All tables, for the terminal."""
    parts = [f"## {title}\n\n{make(result)}" for title, make in _parts()]
    return "\n\n".join(parts)


def document(result: Result) -> str:
    """The whole of docs/benchmarks_wire.md.

    Args:
        result: what `run.py wire` keeps of a run.
    """
    parts = [INTRODUCTION, f"## Machine\n\n{_conditions(result)}\n"]
    parts += [f"## {title}\n\n{make(result)}\n" for title, make in _parts()]
    return "\n".join(parts)


def picture(result: Result) -> str:
    """The SVG of docs/."""
    found = _cases(result, "updates")
    key = (DRAWN_WORLD, DRAWN_DENSITY)
    cases = list(found[key if key in found else next(iter(found))].values())
    ours = _ours(cases[0]["rows"], OUR_UPDATES)
    arms = [arm for arm in (*DRAWN, ours) if arm in cases[0]["rows"]]
    what = (
        f"An update of {cases[0]['nbytes'] / 1e6:.0f} MB of weights, "
        f"{100 * cases[0]['density']:.1f} % changed"
    )
    return drawing.picture(cases, arms, ours, what)


def _parts() -> list[tuple[str, Callable[[Result], str]]]:
    return [
        ("Targets", targets),
        ("Links", _links),
        *SECTIONS.values(),
        ("Where a rival is ahead of ours", losses),
        ("How each way works", _ways),
    ]


def _conditions(result: Result) -> str:
    rounds, shaped = result["rounds"], result["not_shaped"]
    dropped = sum(run["dropped"] for run in result["runs"])
    how = f", {rounds} rounds, {3 * rounds} of a DLRM, at most 3 at 100 Mb/s"
    return (
        figures.conditions(result, how=how)
        + f"\nAll interfaces together dropped {dropped} packets."
        + (f"\nThe links are not shaped, all ranks used the loopback: {shaped}." if shaped else "")
    )


def _links(result: Result) -> str:
    runs = [run for run in result["runs"] if run["scenario"] == "rates"]
    if not runs:
        return "Not in this run."
    names = list(runs[0]["result"])
    lines = [
        "Gb/s of payload at rank 0. TCP goes from rank 0 to rank 1 alone; the rest is gloo. In an "
        "all-to-all every rank sends to all others at once, and a broadcast to three ranks passes "
        "some links twice. gloo's own all-to-all uses one direction of a link at a time for "
        "messages of this size; with all receives posted first, both are busy.",
        "",
        _line("ranks, rate set", names),
        _rule(len(names)),
    ]
    for run in runs:
        cells = [f"{8 * run['result'][name] / 1e9:.3f}" for name in names]
        lines.append(_line(f"{run['world']}, {_rate(run)}", cells))
    return "\n".join(lines)


def _cases(result: Result, scenario: str) -> dict[tuple[int, str], dict[str, Row]]:
    """By ranks and name of the case: the case at each rate."""
    out: dict[tuple[int, str], dict[str, Row]] = {}
    for run in result["runs"]:
        if run["scenario"] != scenario:
            continue
        for case in run["result"]["cases"]:
            out.setdefault((run["world"], case["name"]), {})[run["rate"]] = case
    return out


def _reference(rates: Mapping[str, Row]) -> str:
    return REFERENCE if REFERENCE in rates else next(iter(rates))


def _updates(result: Result) -> str:
    found = _cases(result, "updates")
    if not found:
        return "Not in this run."
    reference = _reference(next(iter(found.values())))
    lines = [UPDATES_TEXT.format(reference=reference), "", f"![{ALT}]({PICTURE})"]
    for (world, _), rates in found.items():
        case = rates[_reference(rates)]
        lines += [
            "",
            f"### {100 * case['density']:.2f} % of the elements changed, {world} ranks",
            "",
            f"{case['source'].capitalize()}: {case['nbytes'] / 1e6:.1f} MB of bf16, "
            f"{100 * case['byte_density']:.2f} % of the bytes changed.",
            "",
            *_update_table(result, rates),
        ]
    wins = [*_crossovers(found)]
    return "\n".join([*lines, *(["", "### Where raw wins", "", *wins] if wins else [])])


def _update_table(result: Result, rates: Mapping[str, Row]) -> Iterator[str]:
    case = rates[_reference(rates)]
    heads = ["payload, MB", "ratio", "at the interface, MB", "encode, ms", "wire", "decode"]
    heads += ["apply (pause)", "processor", "busy", *(f"end to end, ms: {rate}" for rate in rates)]
    yield _line("way", heads)
    yield _rule(len(heads))
    for name, row in case["rows"].items():
        cells = [
            _mb(row["payload"]),
            f"{case['nbytes'] / row['payload']:.1f}",
            _mb(row["nbytes"]),
            *(_ms(row[step]) for step in ("encode", "wire", "decode", "apply", "cpu")),
            _busy(result, row),
            *(_spread(at["rows"][name]["seconds"]) for at in rates.values()),
        ]
        yield _line(_own(name), cells)


def _crossovers(found: Mapping[tuple[int, str], Mapping[str, Row]]) -> Iterator[str]:
    rows = _any(next(iter(found.values())))["rows"]
    arms = [arm for arm in rows if not arm.startswith(RAW)]
    if RAW not in rows or not arms:
        return
    yield CROSSOVER_TEXT
    yield ""
    yield _line("Gb/s; ranks, changed", [_own(arm) for arm in arms])
    yield _rule(len(arms))
    for (world, _), rates in found.items():
        cells = []
        for arm in arms:
            at = crossover(list(rates.values()), arm)
            words = "never" if at.rate is None else f"{8 * at.rate / 1e9:.2f}"
            cells.append(f"{words} ({at.agrees} of {at.total})")
        yield _line(f"{world}, {100 * _any(rates)['density']:.2f} %", cells)


def _collectives(result: Result) -> str:
    found = _cases(result, "collectives")
    if not found:
        return "Not in this run."
    lines = [
        "Values in and values out, bit for bit those of PyTorch. Embeddings are rows of tables "
        "that the ids of a batch ask for, popular ones more than once; each rank owns some tables. "
        "Weights are shards of a real model in bf16. “Times raw” is the time of raw over the way's "
        "own: above 1 the way is faster."
    ]
    for (world, name), rates in found.items():
        case = rates[_reference(rates)]
        kind = case["kind"].replace("_", "-")
        lines += [
            "",
            f"### {name[0].upper()}{name[1:]}: {kind} of {world} ranks",
            "",
            f"All ranks together hold {case['nbytes'] / 1e6:.1f} MB.",
            "",
            *_collective_table(result, rates),
        ]
    return "\n".join(lines)


def _collective_table(result: Result, rates: Mapping[str, Row]) -> Iterator[str]:
    case = rates[_reference(rates)]
    heads = ["at the interface, MB", "ratio", "processor, ms", "busy"]
    heads += [head for rate in rates for head in (f"{rate}: ms", "times raw")]
    yield _line("way", heads)
    yield _rule(len(heads))
    for name, row in case["rows"].items():
        ratio = case["rows"][RAW]["nbytes"] / row["nbytes"] if RAW in case["rows"] else 1.0
        cells = [_mb(row["nbytes"]), f"{ratio:.2f}", _ms(row["cpu"]), _busy(result, row)]
        for at in rates.values():
            cells.append(_spread(at["rows"][name]["seconds"]))
            cells.append(f"{_times(at['rows'], name):.2f}" if RAW in at["rows"] else "")
        yield _line(_own(name), cells)


def _fsdp(result: Result) -> str:
    found = _cases(result, "fsdp")
    if not found:
        return "Not in this run."
    lines = [
        "A small language model, AdamW. Weights travel in bf16, for the forward and again for the "
        "backward pass, and gradients in bf16; the weights are random, so that they pack as real "
        "ones do. “Same bits”: after every step all weights are those of plain FSDP2."
    ]
    for (world, _), rates in found.items():
        case = rates[_reference(rates)]
        heads = ["at the interface, MB", "processor, ms", "busy", "same bits"]
        heads += [head for rate in rates for head in (f"{rate}: ms a step", "times plain")]
        lines += ["", f"### {world} ranks, {case['parameters'] / 1e6:.1f} million parameters", ""]
        lines += [_line("way", heads), _rule(len(heads))]
        for name, row in case["rows"].items():
            same = all(at["rows"][name]["equal"] for at in rates.values())
            cells = [
                _mb(row["nbytes"]),
                _ms(row["cpu"]),
                _busy(result, row),
                "yes" if same else "no",
            ]
            for at in rates.values():
                times = _times(at["rows"], name, PLAIN) if PLAIN in at["rows"] else 1.0
                cells += [_spread(at["rows"][name]["seconds"]), f"{times:.2f}"]
            lines.append(_line(_own(name), cells))
    return "\n".join(lines)


def _dlrm(result: Result) -> str:
    found = _cases(result, "dlrm")
    if not found:
        return "Not in this run."
    lines = [
        "26 tables with the cardinalities of Criteo Kaggle, capped at 100,000 rows, spread over "
        "the ranks; ids follow Zipf's law; dense layers are averaged by all-reduce. A step is ids, "
        "rows, forward and backward pass, gradients and optimizer. “Payload” is ids, rows and "
        "gradients. What each way does to the accuracy is in [dlrm.md](dlrm.md)."
    ]
    for (world, _), rates in found.items():
        case = rates[_reference(rates)]
        heads = ["payload, MB", "at the interface, MB", "processor, ms", "busy"]
        heads += [head for rate in rates for head in (f"{rate}: ms a step", f"times {FP32}")]
        lines += ["", f"### {world} ranks, {case['batch']:,} samples a step", ""]
        lines += [_line("way", heads), _rule(len(heads))]
        for name, row in case["rows"].items():
            cells = [_mb(row["payload"]), _mb(row["nbytes"]), _ms(row["cpu"]), _busy(result, row)]
            for at in rates.values():
                times = _times(at["rows"], name, FP32) if FP32 in at["rows"] else 1.0
                cells += [_spread(at["rows"][name]["seconds"]), f"{times:.2f}"]
            lines.append(_line(name, cells))
    return "\n".join(lines)


SECTIONS: dict[str, tuple[str, Callable[[Result], str]]] = {
    "updates": ("Weight updates", _updates),
    "collectives": ("Collectives without loss", _collectives),
    "fsdp": ("A training step under FSDP2", _fsdp),
    "dlrm": ("A training step of a DLRM", _dlrm),
}


def targets(result: Result) -> str:
    """A table of the targets and whether they are met; empty where nothing was measured."""
    parts = (_update_targets, _collective_targets, _fsdp_targets, _dlrm_targets)
    rows = [row for part in parts for row in part(result)]
    lines = ["| target | measured | limit | |", "|---|--:|--:|---|"]
    for words, value, limit, met in rows:
        lines.append(f"| {words} | {value} | {limit} | {'met' if met else 'MISSED'} |")
    return "\n".join(lines) if rows else "Not in this run."


def _update_targets(result: Result) -> Iterator[tuple[str, str, str, bool]]:
    smallest, fastest, n_cases, n_points = 0, 0, 0, 0
    for rates in _cases(result, "updates").values():
        rows = _any(rates)["rows"]
        ours = _ours(rows, OUR_UPDATES)
        if ours is None:
            continue
        n_cases += 1
        smallest += all(rows[ours]["payload"] <= row["payload"] for row in _rivals(rows))
        for rate in (rate for rate in rates if rate in FASTEST_AT):
            found = rates[rate]["rows"]
            n_points += 1
            fastest += all(found[ours]["seconds"][0] <= r["seconds"][0] for r in _rivals(found))
    if n_cases:
        yield (
            "weight updates: cases in which ours has the fewest bytes",
            f"{smallest}",
            f"{n_cases}",
            smallest == n_cases,
        )
    if n_points:
        yield (
            "weight updates: cases and rates, 100 Mb/s to 5 Gb/s, in which ours is the fastest",
            f"{fastest}",
            f"{n_points}",
            fastest == n_points,
        )


def _collective_targets(result: Result) -> Iterator[tuple[str, str, str, bool]]:
    slow: list[float] = []
    for raw in (RAW, BEST_RAW):
        gains: dict[str, list[float]] = {}
        for (_, name), rates in _cases(result, "collectives").items():
            for rate, case in rates.items():
                rows = case["rows"]
                ours = _ours(rows, OUR_COLLECTIVES)
                if ours is None or raw not in rows:
                    continue
                gains.setdefault(name, []).append(_times(rows, ours, raw))
                if rate in SLOW and raw == RAW and name.startswith("embeddings"):
                    slow.append(_times(rows, ours))
        for name, found in gains.items():
            least = min(found)
            words = f"{name}: least, times `{raw}`"
            yield words, f"{least:.2f}", f">= {NEVER_BELOW}", least >= NEVER_BELOW
    if slow:
        words = f"embeddings below 1 Gb/s: least, times `{RAW}`"
        yield words, f"{min(slow):.2f}", f">= {SLOW_GAIN}", min(slow) >= SLOW_GAIN


def _fsdp_targets(result: Result) -> Iterator[tuple[str, str, str, bool]]:
    for (world, _), rates in _cases(result, "fsdp").items():
        rows = rates.get(REFERENCE, {}).get("rows", {})
        ours = _ours(rows, OUR_COLLECTIVES)
        if ours is not None and PLAIN in rows:
            gain = _times(rows, ours, PLAIN)
            words = f"FSDP2 step, bf16, {world} ranks, 1 Gb/s: times plain"
            yield words, f"{gain:.2f}", f">= {FSDP_GAIN}", gain >= FSDP_GAIN


def _dlrm_targets(result: Result) -> Iterator[tuple[str, str, str, bool]]:
    for (world, _), rates in _cases(result, "dlrm").items():
        rows = rates.get(REFERENCE, {}).get("rows", {})
        if OUR_DLRM not in rows or FP32 not in rows:
            continue
        gain = _times(rows, OUR_DLRM, FP32)
        words = f"DLRM step, {world} ranks, 1 Gb/s, `{OUR_DLRM}`: times {FP32}"
        yield words, f"{gain:.2f}", f">= {DLRM_GAIN}", gain >= DLRM_GAIN
        rivals = {name: row for name, row in rows.items() if not name.startswith("bounded")}
        best = min(rivals, key=lambda name: rivals[name]["seconds"][0])
        ahead = rivals[best]["seconds"][0] / rows[OUR_DLRM]["seconds"][0]
        yield f"... times the best rival, `{best}`", f"{ahead:.2f}", ">= 1", ahead >= 1


def losses(result: Result) -> str:
    """Every figure in which a rival is ahead of ours, as a list."""
    lines = [*_update_losses(result), *_collective_losses(result)]
    return "\n".join(lines) if lines else "Nowhere in this run."


def _update_losses(result: Result) -> Iterator[str]:
    for (world, _), rates in _cases(result, "updates").items():
        case = _any(rates)
        ours = _ours(case["rows"], OUR_UPDATES)
        if ours is None:
            continue
        stem = f"- update, {100 * case['density']:.2f} %, {world} ranks"
        compared = [(words, case["rows"], key) for words, key in STEPS]
        compared += [(f"end to end at {rate}", at["rows"], "seconds") for rate, at in rates.items()]
        for words, rows, key in compared:
            ahead = _ahead(rows, ours, key)
            if ahead:
                yield f"{stem}, {words}, times ours: {ahead}."


def _collective_losses(result: Result) -> Iterator[str]:
    found = _cases(result, "collectives") | {
        (world, "FSDP2 step"): rates for (world, _), rates in _cases(result, "fsdp").items()
    }
    for (world, name), rates in found.items():
        for rate, case in rates.items():
            ours = _ours(case["rows"], OUR_COLLECTIVES)
            if ours is None:
                continue
            ahead = _ahead(case["rows"], ours, "seconds")
            if ahead:
                yield f"- {name}, {world} ranks, {rate}, time, times ours: {ahead}."


def _ahead(rows: Mapping[str, Row], ours: str, key: str) -> str:
    """The rivals whose figure is less than ours, with the quotient of both."""
    own = _first(rows[ours][key])
    return ", ".join(
        f"{name} {_first(row[key]) / own:.2f}"
        for name, row in rows.items()
        if not name.startswith(OURS)
        and not (name.startswith(RAW) and key in NOT_OF_RAW)
        and _first(row[key]) < own
    )


def _first(value: float | Sequence[float]) -> float:
    return value[0] if isinstance(value, Sequence) else value


def _ways(result: Result) -> str:
    lines = []
    absent: dict[str, str] = {}
    for run in result["runs"]:
        absent |= run["result"].get("absent", {})
    for scenario, arms in result["arms"].items():
        lines += [f"{SECTIONS[scenario][0]}:", ""]
        for name, how in arms.items():
            gone = f" Not measured: {absent[name]}." if name in absent else ""
            lines.append(f"- `{name}`: {how}.{gone}")
        lines.append("")
    return "\n".join(lines).strip()


def _ours(rows: Mapping[str, Row], names: Sequence[str]) -> Any:
    return next((name for name in names if name in rows), None)


def _rivals(rows: Mapping[str, Row]) -> list[Row]:
    return [row for name, row in rows.items() if not name.startswith(OURS)]


def _times(rows: Mapping[str, Row], name: str, raw: str = RAW) -> float:
    return float(rows[raw]["seconds"][0] / rows[name]["seconds"][0])


def _any(rates: Mapping[str, Row]) -> Row:
    return rates[_reference(rates)]


def _own(name: str) -> str:
    return f"**{name}**" if name.startswith(OURS) else name


def _rate(run: Row) -> str:
    return "no limit" if run["bits"] is None else f"{run['bits'] / 1e9:g} Gb/s"


def _busy(result: Result, row: Row) -> str:
    return f"{100 * row['cpu'] / row['seconds'][0] / result['machine']['cores']:.0f} %"


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g}" if nbytes < 1e8 else f"{nbytes / 1e6:,.0f}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else _figures(1e3 * seconds)


def _spread(seconds: Sequence[float]) -> str:
    middle, least, greatest = (_figures(1e3 * value) for value in seconds)
    return f"{middle} ({least}-{greatest})"


def _figures(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _line(first: str, cells: Sequence[str]) -> str:
    return f"| {first} | {' | '.join(cells)} |"


def _rule(n: int) -> str:
    return f"|---|{'--:|' * n}"
