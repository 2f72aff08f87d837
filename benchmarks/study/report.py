"""The page docs/compressibility.md, from the figures that `study.py` keeps; nothing is measured
here.

The sentences are fixed, their figures are not: every figure of the page is read from the result.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from benchmarks.common import figures
from benchmarks.study import pictures
from benchmarks.study.lookup import PARTS, PAYS, Case, Found, Row, ratio, total, way_ratio
from benchmarks.study.measure import KINDS
from benchmarks.study.runs import LAST, WARM_UP

__all__ = ["documents"]

FIRST = "base"  # the run that the others are compared with
MIDDLE = 512  # a step at the full learning rate
SHOWN_SHARE = 0.01  # of values or bytes; rarer exponents and kinds are left out of tables
SHORT = {"first moments": "first", "second moments": "second"}
DASHES = ("", "2 4", "10 5", "10 4 2 4", "5 3", "18 6")  # so that lines of one colour differ
ALONE: tuple[Case, ...] = (
    *(("weights", LAST, 0), ("masters", LAST, 0), ("first moments", LAST, 0)),
    *(("second moments", LAST, 0), ("BF16 sentence model", None, 0)),
    ("F32 sentence model", None, 0),
)
DIFFERENCES: tuple[Case, ...] = (
    *(("weights", MIDDLE, gap) for gap in (1, 16, 128)),
    *(("weights", LAST, 1), ("masters", MIDDLE, 1), ("second moments", MIDDLE, 1)),
)


def documents(result: dict[str, Any]) -> dict[str, str]:
    """The page and its pictures, by their names in docs/.

    Args:
        result: what `study.py` keeps.
    """
    found = Found(result)
    return {
        "compressibility.md": _page(found),
        pictures.STEPS_NAME: pictures.steps(_step_lines(found)),
        pictures.GAPS_NAME: pictures.gaps(_gap_lines(found)),
        pictures.BITS_NAME: pictures.bits(_flips(found)),
    }


def _page(found: Found) -> str:
    parts = (
        *(_introduction, _claims, _evolution, _ways_to_train, _planes, _distances, _gaps),
        *(_engines, _published, _advice, _limits, _remake),
    )
    return "\n\n".join(part(found) for part in parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], n_words: int = 1) -> str:
    """A table whose first columns are words and whose others are numbers."""
    marks = ["---"] * n_words + ["--:"] * (len(head) - n_words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, marks, *rows))


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _introduction(found: Found) -> str:
    run = found.run(FIRST)
    return f"""# What compresses in training

Written by `make study` from `benchmarks/results/study.json`; do not edit by hand.

The LMC paper ([arXiv 2505.09810](https://arxiv.org/abs/2505.09810)) asks how the data of
checkpoints and their compressibility evolve in training, and picks a codec from the answer. This
page asks the same for Packhorse. A language model of {run["n_parameters"] / 1e6:.1f} million
parameters learns the sources of Python's standard library for {LAST:,} steps,
in {len(found.runs)} ways: the first, and others that change one thing (SGD also needs another rate
and has no weight decay). A ratio is plain bytes / packed bytes, at the level "default" if nothing
else is said. Every packed tensor was unpacked again and compared."""


def _claims(found: Found) -> str:
    claims = (_claim_alone, _claim_bits, _claim_steps, _claim_gaps, _claim_engines, _claim_sparse)
    numbered = (f"{i}. {claim(found)}" for i, claim in enumerate(claims, 1))
    return "## In short\n\n" + "\n".join(numbered)


def _claim_alone(found: Found) -> str:
    alone = [ratio(row) for run in found.runs for row in found.series(run, "weights")]
    states = (found.state(FIRST, "weights", step) for step in (0, LAST))
    start, end = (f"{ratio(state):.3f}" for state in states)
    return f"""**Alone, a trained model packs like a new one.** bf16 weights have
   a ratio of {min(alone):.2f} to {max(alone):.2f} at every step of every run;
   in the first run {start} before the first step and {end} after the last."""


def _claim_bits(found: Found) -> str:
    exponent, mantissa = found.state(FIRST, "weights", LAST)["planes"]
    return f"""**The exponent is what packs.** At the end it has {exponent:.2f} bits
   of entropy out of 8, sign and mantissa have {mantissa:.2f} out of 8."""


def _claim_steps(found: Found) -> str:
    fast, slow = (_number(found.delta_ratio(run, "weights", MIDDLE)) for run in (FIRST, "slow"))
    ends = [_number(found.delta_ratio(run, "weights", LAST)) for run in (FIRST, "slow")]
    return f"""**Between steps, the size of the step decides.** The difference of one step
   has a ratio of {fast} at the full rate, and of {slow} at a tenth of that rate.
   At the end of the cool-down, at a tenth of both, it has {ends[0]} and {ends[1]}."""


def _claim_gaps(found: Found) -> str:
    weights, masters, first, second = (_last(found, FIRST, part) for part in PARTS)
    never = "never" if first == "0" else f"up to {first}"
    slow = _last(found, "slow", "weights").replace("+", " and more")
    return f"""**How long a difference pays depends on that, too.** At the full rate it saves 5 % or
   more up to a gap of {weights} steps for bf16 weights, {masters} for fp32 masters,
   and {second} for second moments; for first moments {never}. At a tenth of the rate it does so
   up to {slow} steps for bf16 weights."""


def _claim_engines(found: Found) -> str:
    case = ALONE[0]
    (engine, plain), (other, grouped) = (found.best_engine(case, grouped=g) for g in (False, True))
    lmc, ours = found.way(case, "LMC"), found.way(case, "Packhorse default")
    return f"""**Grouped bytes are worth more than a stronger engine.** On bf16 weights alone, where
   only bz2 gains nothing from groups, the best general engine has {plain:.2f}
   on plain bytes ({engine}) and {grouped:.2f} on grouped ones ({other}).
   Huffman codes of grouped bytes, LMC's way, have {lmc:.2f}, and Packhorse has {ours:.2f}."""


def _claim_sparse(found: Found) -> str:
    case = ("weights", LAST, 1)
    best, engine = max(found.best_engine(case, grouped=g)[::-1] for g in (False, True))
    lmc, ours = found.way(case, "LMC"), found.way(case, "Packhorse default")
    return f"""**Small steps need more than Huffman codes**, which spend at least a bit on each
   byte. One step at the end has {lmc:.1f} as XOR with Huffman codes,
   {best:.1f} with the best general engine ({engine}),
   and {ours:.1f} as a difference of Packhorse."""


def _evolution(found: Found) -> str:
    head = ["step", "rate", *(cell for part in PARTS for cell in (part, "one step"))]
    rows = []
    for state in found.series(FIRST, "weights"):
        step = state["step"]
        cells = [str(step), f"{state['rate']:.1e}" if step else ""]
        for part in PARTS:
            row = next((row for row in found.series(FIRST, part) if row["step"] == step), None)
            cells.append(f"{ratio(row):.3f}" if row else "")
            cells.append(_number(ratio(row, "delta")) if row and total(row, "delta") else "")
        rows.append(cells)
    return f"""## How it evolves

The first run: AdamW with fp32 masters. "Weights" are the bf16 copies that the model computes with,
the other three are fp32. Beside each ratio stands that of the difference from the step before.
Step 0 is the random start.

{_table(head, rows, 0)}

![{pictures.STEPS_ALT}]({pictures.STEPS_NAME})

The difference follows the learning rate: it takes more bytes during the warm-up of {WARM_UP} steps,
and fewer at the end, when the rate has fallen to a tenth. By kind of tensor, at step {MIDDLE}
(norms are so small that the headers of their frames count):

{_by_kind(found)}"""


def _by_kind(found: Found) -> str:
    parts = ("weights", "masters", "second moments")
    head = ["kind", "share", *(cell for part in parts for cell in (part, "one step"))]
    states = [found.state(FIRST, part, MIDDLE) for part in parts]
    rows = []
    for kind in KINDS:
        share = states[0]["kinds"][kind]["nbytes"] / total(states[0], "nbytes")
        cells = [kind, f"{share:.1%}"]
        for state in states:
            sizes = state["kinds"][kind]
            cells += [_number(sizes["nbytes"] / sizes[key]) for key in ("full", "delta")]
        rows.append(cells)
    return _table(head, rows)


def _ways_to_train(found: Found) -> str:
    steps = MIDDLE, LAST
    head = ["run", "rate", "decay", "loss", "weights"]
    head += [cell for step in steps for cell in (f"one step at {step}", "unchanged")]
    head += ["masters", f"one step at {MIDDLE}"]
    rows = []
    for name in found.runs:
        run = found.run(name)
        cells = [run["title"], f"{run['peak_rate']:g}", f"{run['weight_decay']:g}"]
        cells.append(f"{run['losses'][str(LAST)]:.2f}")
        cells.append(f"{ratio(found.state(name, 'weights', LAST)):.3f}")
        for step in steps:
            cells.append(_number(found.delta_ratio(name, "weights", step)))
            cells.append(f"{found.unchanged(name, step):.0%}")
        if found.series(name, "masters"):
            cells.append(f"{ratio(found.state(name, 'masters', LAST)):.3f}")
            cells.append(_number(found.delta_ratio(name, "masters", MIDDLE)))
        rows.append(cells + ["-"] * (len(head) - len(cells)))
    return f"""## Ways to train

Loss is that of the last 16 steps, in nats a token. "Unchanged" is the share of bf16 weights that
a step leaves as they are.

{_table(head, rows)}"""


def _planes(found: Found) -> str:
    head = ["part", "step", "exponent", "sign, mantissa", "low bytes"]
    head += [f"{cell}, XOR" for cell in head[2:]]
    rows = []
    for part in PARTS:
        for step in (MIDDLE, LAST):
            state = found.state(FIRST, part, step)
            planes = (_plane_cells(state[key]) for key in ("planes", "xor_planes"))
            rows.append([part, str(step), *(cell for cells in planes for cell in cells)])
    return f"""## Which bits carry it

Entropy of each plane in bits, out of 8, of tensors alone and of their XOR with the step before:

{_table(head, rows, 2)}

![{pictures.BITS_ALT}]({pictures.BITS_NAME})

A step leaves sign and exponent of nearly all weights alone. The lowest byte of fp32 is noise,
alone and as a difference; the byte above it packs only if the step is tiny."""


def _plane_cells(planes: Sequence[float]) -> list[str]:
    numbers = [f"{plane:.2f}" for plane in planes]
    return [*numbers[:2], ", ".join(numbers[2:])]


def _distances(found: Found) -> str:
    steps = MIDDLE, LAST
    head = ["exponent", "share"]
    head += [f"{words} at {step}" for step in steps for words in ("half", "nine tenths")]
    sizes = {
        (row["step"], row["exponent"]): row
        for row in found.run(FIRST)["step_sizes"]
        if row["part"] == "weights" and row["share"] >= SHOWN_SHARE
    }
    rows = []
    for exponent in sorted({exponent for _, exponent in sizes}):
        pair = [sizes[step, exponent] for step in steps if (step, exponent) in sizes]
        if len(pair) == len(steps):
            cells = [f"{row[key]:.0f}" for row in pair for key in ("median", "high")]
            rows.append([str(exponent), f"{pair[0]['share']:.1%}", *cells])
    return f"""## How far a step goes

How many representable values one step moves a bf16 weight, in the first run, by the exponent of the
weight before. Half of the weights of an exponent move at most so far, and nine tenths:

{_table(head, rows, 0)}

A step of AdamW has about one absolute size, so it crosses half as many representable values
with each higher exponent. So Packhorse codes a difference with the old value's exponent
as context."""


def _gaps(found: Found) -> str:
    return f"""## At which gap a difference stops paying

bf16 weights of the first run against the state so many steps before. Beside Packhorse stand two
ways to pack the XOR as grouped bytes: with Huffman codes, as LMC does, and with zstd 3, much as
BitX does.

{_gap_table(found)}

![{pictures.GAPS_ALT}]({pictures.GAPS_NAME})

The last measured gap at which a difference takes at most {PAYS:.0%} of what the state takes alone;
with a plus where no longer one was measured, and 0 where not even one step pays:

{_paying_table(found)}"""


def _gap_table(found: Found) -> str:
    anchors = MIDDLE, LAST
    head = ["steps"]
    for anchor in anchors:
        head += [f"at {anchor}: unchanged", "Packhorse", "Huffman", "zstd 3"]
    rows = []
    for gap in [row["gap"] for row in found.gaps(FIRST, "weights", LAST)]:
        cells = [str(gap)]
        for anchor in anchors:
            cells += _gap_cells(found, anchor, gap) if gap < anchor else [""] * 4
        rows.append(cells)
    alone = [f"{ratio(found.state(FIRST, 'weights', anchor)):.2f}" for anchor in anchors]
    rows.append(["alone", "", alone[0], "", "", "", alone[1], "", ""])
    return _table(head, rows, 0)


def _gap_cells(found: Found, anchor: int, gap: int) -> list[str]:
    row = found.gap(FIRST, "weights", anchor, gap)
    others = [_number(total(row, "nbytes") / row[key]) for key in ("xor_huffman", "xor_zstd")]
    return [f"{found.unchanged(FIRST, anchor, gap):.1%}", _number(ratio(row, "delta")), *others]


def _paying_table(found: Found) -> str:
    columns = [(part, step) for step in (MIDDLE, LAST) for part in ("weights", "masters")]
    head = ["run", *(f"{part} at {step}" for part, step in columns)]
    head += [f"{part} at {MIDDLE}" for part in PARTS[2:]]
    columns += [(part, MIDDLE) for part in PARTS[2:]]
    rows = []
    for name in found.runs:
        cells = [_last(found, name, part, step) for part, step in columns]
        rows.append([found.run(name)["title"], *cells])
    return _table(head, rows)


def _last(found: Found, run: str, part: str, anchor: int = MIDDLE) -> str:
    rows = found.gaps(run, part, anchor)
    if len(rows) < 2:  # moments of most runs were kept for one gap only
        return "-"
    gap = found.last_paying_gap(run, part, anchor)
    return f"{gap}+" if gap == max(row["gap"] for row in rows) else str(gap)


def _engines(found: Found) -> str:
    return f"""## Other engines

Matrices of layers 1 and 2 of the first run, and of layer 2 of the sentence model below. "Grouped"
has byte i of all elements together, each group packed on its own. LMC's code is not public: its row
is the size of one Huffman code for each group; "Huffman of zlib" is a coder of that kind.
Speeds are in GB/s of plain bytes on one thread, for the first column; grouping and XOR are part
of the time. Bold is the best ratio. "Loses" says of a rival that a level of Packhorse packs
the first column shorter, and packs and unpacks it faster; of a level of Packhorse, that a rival
does. Where there is no speed, the size decides.

{_engine_table(found, ALONE)}

Differences from the state so many steps back; rivals pack the XOR:

{_engine_table(found, DIFFERENCES)}

{_shorter(found)}
{_samples(found)}"""


def _shorter(found: Found) -> str:
    """The rivals that pack shorter than every level of Packhorse."""
    losses = []
    for case in (*ALONE, *DIFFERENCES):
        table = found.engines(case)
        best = max(way_ratio(row) for row in table["rows"] if row["is_ours"])
        names = [
            f"{row['name'].split(',')[0]} ({way_ratio(row):.3f}, Packhorse {best:.3f})"
            for row in table["rows"]
            if way_ratio(row) > best and not row["is_ours"]
        ]
        losses += [f"{', '.join(names)} on {_column(table)}"] if names else []
    return f"Shorter than every level of Packhorse: {'; '.join(losses) or 'none'}."


def _engine_table(found: Found, cases: Sequence[Case]) -> str:
    tables = [found.engines(case) for case in cases]
    by_name = [{row["name"]: row for row in table["rows"]} for table in tables]
    best = [max(map(way_ratio, rows.values())) for rows in by_name]
    lines = []
    for row in tables[0]["rows"]:
        cells = [row["name"].replace(", XOR", "").replace(", delta", "")]
        for rows, high in zip(by_name, best, strict=True):
            value = way_ratio(rows[row["name"]]) if row["name"] in rows else None
            text = "-" if value is None else _number(value)
            cells.append(f"**{text}**" if value == high else text)
        speeds = row["pack_gb_per_s"], row["unpack_gb_per_s"]
        cells += ["-" if speed is None else f"{speed:.2g}" for speed in speeds]
        lines.append([*cells, "loses" if row["loses"] else ""])
    return _table(["way", *map(_column, tables), "pack", "unpack", ""], lines)


def _column(table: Row) -> str:
    if table["step"] is None:
        return table["part"]
    words = f"{SHORT.get(table['part'], table['part'])} {table['dtype']}"
    return f"{words} at {table['step']}, {table['gap']} back" if table["gap"] else words


def _samples(found: Found) -> str:
    tables = found.result["engines"]
    sizes = [max(row["nbytes"] for row in table["rows"]) / 1e6 for table in tables]
    lines = [f"The samples have {min(sizes):.1f} to {max(sizes):.1f} MB."]
    short = {
        row["name"].split(",")[0]
        for table, size in zip(tables, sizes, strict=True)
        for row in table["rows"]
        if row["nbytes"] / 1e6 < size
    }
    if short:
        lines.append(f"Only the middle of a sample went to: {'; '.join(sorted(short))}.")
    skipped = {name: why for table in tables for name, why in table["skipped"].items()}
    lines += [f"Not measured: {name}, because {why}." for name, why in skipped.items()]
    return "\n".join(lines)


def _published(found: Found) -> str:
    head = ["dtype", "kind", "share", "default", "max", "exponent", "sign, mantissa"]
    rows = []
    for dtype, model in found.result["models"].items():
        cells = [f"{ratio(model, key):.3f}" for key in ("full", "max")]
        rows.append([dtype, "all", "100.0%", *cells, *_plane_cells(model["planes"])[:2]])
        for kind, sizes in model["kinds"].items():
            share = sizes["nbytes"] / total(model, "nbytes")
            if share >= SHOWN_SHARE:
                cells = [f"{sizes['nbytes'] / sizes[key]:.3f}" for key in ("full", "max")]
                rows.append([dtype, kind, f"{share:.1%}", *cells, "", ""])
    return f"""## A published model

The weights of all-MiniLM-L6-v2, as published and rounded to bf16. Others trained its 22.7 million
parameters to the end; they pack as those of the small runs do.

{_table(head, rows, 2)}"""


def _advice(found: Found) -> str:
    weights, masters, _, second = (_last(found, FIRST, part) for part in PARTS)
    bf16, fp32 = (found.state(FIRST, part, LAST) for part in ("weights", "masters"))
    return f"""## What follows

- **A single model**: pack it at any time of training. Expect {1 - 1 / ratio(bf16):.0%} less
  for bf16 and {1 - 1 / ratio(fp32):.0%} for fp32, which is what the exponents allow.
- **Snapshots every few steps**: take differences. They save most where steps are small: in
  warm-up and cool-down, and at small learning rates.
- **Snapshots that are far apart**, here more than {weights} steps for bf16 weights,
  {masters} for masters and {second} for second moments: pack them alone.
  Packhorse decides for each tensor from a sample, so a base does little harm (here it never cost
  more than {found.greatest_harm():.1%}), but a chain of differences makes restores slower.
- **First moments**: pack them alone.
- **Masters** are mostly noise that nobody packs. Save whole states less often than bf16 copies."""


def _limits(found: Found) -> str:
    run = found.run(FIRST)
    return f"""## What this does not show

- The model has {run["n_parameters"] / 1e6:.1f} million parameters, and each run has seen
  {run["n_seen"] / 1e6:.1f} million tokens. Losses were still falling. Each run was done
  once, from one seed.
- Large models are usually trained at smaller rates, so their differences should be smaller. What
  should carry over is the order of the ways, not the ratios of differences.
- The rates of Muon and SGD come from a few trials. Their rows say what these optimizers do to the
  bytes, and not which learns better.
- The early steps have a tiny rate because of the warm-up; without one they would pack worse.
- No gap is longer than {LAST // 2} steps. Speeds are of one machine."""


def _remake(found: Found) -> str:
    minutes = sum(found.run(run)["cpu_seconds"] for run in found.runs) / 60
    return f"""## Remake it

`make study` trains the models ({minutes:.0f} minutes of one core), measures and writes this page.
If it is stopped, it goes on where it was.

{figures.conditions(found.result)}"""


def _step_lines(found: Found) -> Iterator[pictures.Line]:
    """For each run the ratio of a step's difference, and for the first that of weights alone."""
    for name, dashes in zip(found.runs, cycle(DASHES)):
        rows = [row for row in found.series(name, "weights") if total(row, "delta")]
        points = [(row["step"], ratio(row, "delta")) for row in rows]
        title = found.run(name)["title"]
        yield pictures.Line(title, points, is_main=name == FIRST, dashes=dashes)
    rows = [row for row in found.series(FIRST, "weights") if row["step"]]
    yield pictures.Line("alone", [(r["step"], ratio(r)) for r in rows], is_reference=True)


def _gap_lines(found: Found) -> Iterator[pictures.Line]:
    """For each part of the first run the size of a difference, as a share of packing alone."""
    for part, anchor in (*((part, MIDDLE) for part in PARTS), ("weights", LAST)):
        rows = found.gaps(FIRST, part, anchor)
        points = [(row["gap"], total(row, "delta") / total(row, "full")) for row in rows]
        name, dashes = f"{part}, at {anchor}", "6 4" if anchor == LAST else ""
        yield pictures.Line(name, points, is_main=part == "weights", dashes=dashes)


def _flips(found: Found) -> list[tuple[int, list[float]]]:
    """By step, the share of masters in which each bit has changed."""
    rows = found.series(FIRST, "masters")
    return [(row["step"], row["flips"]) for row in rows if "flips" in row]
