"""The tables of a measurement of packed layers as Markdown, for the terminal and
docs/benchmarks_layers.md: a function of the JSON that `run.py layers` keeps; nothing is measured.
"""

from typing import Any

from benchmarks.codecs import report
from benchmarks.codecs.report import Result

__all__ = ["document", "section"]

MIB = 1 << 20

INTRODUCTION = """# Benchmarks of packed layers on the CPU

Written by `make bench ARGS="layers --write"` from `benchmarks/results/layers.json`; do not edit by
hand. This page says what weights that stay packed cost on the host; for GPUs see
[benchmarks_gpu.md](benchmarks_gpu.md).

- Every result was compared with that of the plain weight bit for bit before it was timed.
- One core, processor time, the best of the rounds; the rows of a table ran in turn.
- Matrices have normal rows whose scales are log-normal, as in trained models.
- GB/s are 10^9 bytes of BF16 a second. All memory is fresh, as it is for users.
"""

HEADINGS = {
    "products": "Products",
    "packing": "Packing and unpacking",
    "model": "A trained model",
    "plan": "Plans of frames for GPUs",
    "memory": "Memory while loading",
}


def section(name: str, result: Result) -> str:
    """The heading and the text of one part.

    Args:
        name: of the part.
        result: what `run.py layers` keeps of a run.
    """
    part = result["parts"].get(name)
    why = result["absent"].get(name, "not in this run")
    text = f"Not measured: {why}." if part is None else _SECTIONS[name](part)
    return f"## {HEADINGS[name]}\n\n{text}{_apart(result.get('apart', {}).get(name))}"


def _apart(conditions: dict[str, Any] | None) -> str:
    """When and where a part was measured, if not in the run of the others."""
    if conditions is None:
        return ""
    return (
        f"\n\nMeasured by itself on {conditions['date']}: {conditions['cpu']}, load "
        f"{conditions['load']:.1f}."
    )


def document(result: Result) -> str:
    """The whole of docs/benchmarks_layers.md.

    Args:
        result: what `run.py layers` keeps of a run.
    """
    parts = [INTRODUCTION, f"## Machine\n\n{report.conditions(result)}\n"]
    return "\n".join([*parts, *(f"{section(name, result)}\n" for name in HEADINGS)])


def _table(head: list[str], rows: list[list[str]], n_words: int) -> str:
    """A table whose first columns are words and whose others are numbers."""
    ruler = ["---"] * n_words + ["--:"] * (len(head) - n_words)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ruler, *rows))


def _products(rows: list[dict[str, Any]]) -> str:
    tiles = list(rows[0]["tiles"])
    head = ["rows x columns", "format", "tokens", "plain ms", *(f"tiles of {t} MiB" for t in tiles)]
    lines = []
    for row in sorted(rows, key=lambda r: (r["n_rows"], r["form"] != "W12", r["n_tokens"])):
        plain = row["plain"]
        cells = [f"{row['n_rows']} x {row['n_columns']}", row["form"], str(row["n_tokens"])]
        times = [f"{_ms(s)} ({s / plain:.2f})" for s in row["tiles"].values()]
        lines.append([*cells, _ms(plain), *times])
    bits = {row["form"]: f"{row['bits']:.2f}" for row in rows}
    words = ", ".join(f"{format} takes {number} bits a weight" for format, number in bits.items())
    note = (
        f"In brackets: of the plain layer's time. The library decodes into tiles of 4 MiB; {words}."
    )
    return f"{_table(head, lines, 3)}\n\n{note}"


def _packing(rows: list[dict[str, Any]]) -> str:
    lines = [[row["what"], f"{row['nbytes'] / row['seconds'] / 1e9:.2f}"] for row in rows]
    size = rows[0]["nbytes"] / MIB
    return f"A matrix of {size:.0f} MiB.\n\n{_table(['operation', 'GB/s'], lines, 1)}"


def _model(part: dict[str, Any]) -> str:
    lines = [["plain", _mib(part["plain_nbytes"]), f"{_ms(part['plain'])} (1.00)", ""]]
    for name, seconds in part["packed"].items():
        speed = part["layers_nbytes"] / part["packing"][name] / 1e9
        time = f"{_ms(seconds)} ({seconds / part['plain']:.2f})"
        lines.append([name, _mib(part["nbytes"][name]), time, f"{speed:.2f}"])
    table = _table(["weights", "MiB", "ms", "pack_model_ GB/s"], lines, 1)
    what = f"{part['name']}, {part['n_tokens']} tokens"
    return f"{what}. Its layers are small: most have 384 columns.\n\n{table}"


def _plan(part: dict[str, Any]) -> str:
    chunks, seconds = part["n_chunks"], part["seconds"]
    return (
        f"What the host reads before kernels decode a frame: a BF16 tensor of "
        f"{part['nbytes'] / MIB:.0f} MiB in {chunks} chunks takes {_ms(seconds)} ms, "
        f"{seconds / chunks * 1e6:.1f} us a chunk and {part['packed_nbytes'] / seconds / 1e9:.1f} "
        f"GB/s of packed bytes; the plan has {part['plan_nbytes'] / chunks / 1024:.1f} KiB a "
        f"chunk. CRC32C runs at {part['packed_nbytes'] / part['crc_seconds'] / 1e9:.1f} GB/s."
    )


def _memory(rows: list[dict[str, Any]]) -> str:
    head = ["what", "plain MiB", "tensors MiB", "peak MiB", "peak / plain", "with files MiB"]
    lines = []
    for row in rows:
        sizes = [_mib(row[size]) for size in ("plain_nbytes", "held_nbytes", "peak_nbytes")]
        share = f"{row['peak_nbytes'] / row['plain_nbytes']:.2f}"
        lines.append([row["way"], *sizes, share, _mib(row["resident_nbytes"])])
    note = (
        "The peak is the growth of the process's memory without mapped files, sampled every "
        "millisecond. `with files` includes mapped pages of files, which the system can drop: "
        "transformers keeps plain tensors there. Files hold equal matrices; models are Llamas of "
        "transformers, with random weights."
    )
    return f"{_table(head, lines, 1)}\n\n{note}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"


_SECTIONS = {
    "products": _products,
    "packing": _packing,
    "model": _model,
    "plan": _plan,
    "memory": _memory,
}
