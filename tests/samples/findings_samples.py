"""Findings of all kinds, for tests of the page of a report: computed, not measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packhorse.reports.results import (
    ChangeRow,
    Changes,
    EngineRow,
    EngineTable,
    Estimate,
    ExponentRow,
    Findings,
    MemoryFormat,
    MemoryRow,
    PlaneRow,
    Policy,
    PolicyRow,
    Problem,
    Series,
    Settings,
    SourceRow,
    StepKindRow,
    StepRow,
    StepSizeRow,
    TensorRow,
)

__all__ = ["HOSTILE", "everything", "findings", "hostile_findings", "large_findings", "nothing"]

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>document.title = 'taken'</script>",
    "<img src=x onerror=alert(2)>",
    "\"'><svg onload=alert(3)>",
    "{{ 7 * 7 }}{% raw %}${7*7}",
    "layers.0.\u202egnp.tpircs\u202c",
    "zero\u200bwidth\ufeff",
    "two\nlines\r\tand\x00more\x1b[31m",
    "=1+1|pipe|`tick`*star*",
    "\u2028\u2029]]>--><!--",
    "javascript:alert(4)",
    "datum.x; alert(5)",
    "חביתה אמ" * 20,
    "x" * 10_000,
    "<b>" * 3_000,
    "\ud800",
    "",
]
_N_LAYERS = 22
_KINDS = {
    "attention": ("self_attn.q_proj.weight", (2048, 2048)),
    "feed-forward": ("mlp.down_proj.weight", (2048, 5632)),
    "norm": ("input_layernorm.weight", (2048,)),
}


def findings(**changes: object) -> Findings:
    """Findings with sources and nothing else, changed as told."""
    settings = Settings(False, 64_000_000, 24.0, 12.4, 2)
    empty = Findings(
        "a tiny llama", "0.1.0", "2026-11-27T12:00:00+00:00", "models", settings, (), (), (), None,
        None, (), (), None, (),
    )  # fmt: skip
    return replace(empty, **changes)  # type: ignore[arg-type]


def nothing() -> Findings:
    """Findings without any data."""
    return findings()


def everything(shape: str = "series", n_layers: int = _N_LAYERS) -> Findings:
    """Findings with all sections: about three models, twelve checkpoints, or two models."""
    names = {"models": ["small", "base", "large"], "pair": ["base", "tuned"]}.get(shape)
    steps = [None] * len(names) if names else _steps()
    names = names or [f"checkpoint-{step}" for step in _steps()]
    tensors = _model(names[-1], n_layers)
    whole = (
        tuple(replace(row, source=name) for name in names for row in tensors)
        if shape == "models"
        else tensors
    )
    return findings(
        shape=shape,
        sources=_sources(tensors, names, steps),
        tensors=whole,
        exponents=_exponents(),
        series=_series(tensors),
        policy=_policy(),
        engines=_engines(),
        memory=_memory(tensors),
        changes=_changes(tensors),
        problems=(
            Problem("checkpoint-512", "model.layers.3.mlp.up_proj.weight",
                    "its shape is (5632, 2048) and was (5632, 1024) before; it is left out"),
        ),
    )  # fmt: skip


def hostile_findings() -> Findings:
    """Findings in which every text that comes from outside means harm."""
    whole = everything("pair", n_layers=6)
    n = len(HOSTILE)
    many = tuple(
        replace(whole.tensors[i % len(whole.tensors)], name=name, reason=name, split=name,
                kind=name, role=name, dtype=name, source=HOSTILE[1])
        for i, name in enumerate(HOSTILE)
    )  # fmt: skip
    assert whole.changes
    return replace(
        whole,
        title=HOSTILE[0],
        shape="models",
        tensors=(*whole.tensors, *many),
        sources=tuple(
            replace(whole.sources[i % len(whole.sources)], name=name, path=name)
            for i, name in enumerate(HOSTILE)
        ),
        memory=tuple(
            replace(whole.memory[i % len(whole.memory)], name=HOSTILE[i], device_note=HOSTILE[i])
            for i in range(n)
        ),
        changes=Changes(
            HOSTILE[0], HOSTILE[1],
            tuple(
                replace(whole.changes.rows[0], name=name, was=name, kind=name) for name in HOSTILE
            ),
        ),
        engines=tuple(
            replace(table, title=HOSTILE[i], skipped={HOSTILE[1]: HOSTILE[2]})
            for i, table in enumerate(whole.engines)
        ),
        problems=tuple(Problem(name, name, name) for name in HOSTILE),
    )  # fmt: skip


def large_findings(n: int = 10_000) -> Findings:
    """Findings about a model with many tensors, in layers with many experts."""
    whole = everything("pair")
    pattern = whole.tensors[1]
    tensors = tuple(
        replace(pattern, name=f"model.layers.{i // 170}.mlp.experts.{i % 170}.down_proj.weight",
                layer=i // 170, nbytes=pattern.nbytes - 2 * i)
        for i in range(n)
    )  # fmt: skip
    return replace(
        whole, tensors=tensors, memory=_memory(tensors), changes=_changes(tensors), series=None,
        policy=None, engines=(),
    )  # fmt: skip


# The parts.


def _model(source: str, n_layers: int) -> tuple[TensorRow, ...]:
    rng = np.random.default_rng(0)
    rows = [
        _tensor(source, "model.embed_tokens.weight", "embedding", None, (32000, 2048), 0.021, rng)
    ]
    for layer in range(n_layers):
        for kind, (name, shape) in _KINDS.items():
            scale = 0.02 * (1 + layer / 30)
            rows.append(
                _tensor(source, f"model.layers.{layer}.{name}", kind, layer, shape, scale, rng)
            )
    rows.append(_tensor(source, "lm_head.weight", "output", None, (32000, 2048), 0.03, rng))
    return tuple(rows)


def _tensor(
    source: str, name: str, kind: str, layer: int | None, shape: tuple[int, ...], scale: float,
    rng: np.random.Generator,
) -> TensorRow:  # fmt: skip
    dtype = "F32" if kind == "norm" else "BF16"
    n, width = math.prod(shape), 32 if dtype == "F32" else 16
    values = rng.standard_normal(4096).astype(np.float32) * np.float32(scale)
    if kind == "norm":
        values = 1 + values / 10
    words = values.view(np.uint32)
    if dtype == "BF16":
        words >>= 16
    bits = tuple(_entropy_of_bits(words, width))
    first = (words >> (width - 9)) & 0xFF
    entropy = _entropy(first)
    nbytes = n * width // 8
    rest = width - 8
    packed = (entropy + 0.03 + rest) / 8 * n
    levels = {
        "fast": Estimate(round(packed * 1.07), round(packed * 0.003)),
        "default": Estimate(round(packed), round(packed * 0.002)),
        "max": Estimate(round(packed * 0.991), round(packed * 0.002)),
    }
    names = ["exponent", "sign and mantissa", *(f"mantissa {i}" for i in range(1, width // 8 - 1))]
    planes = [PlaneRow(names[0], 8, entropy, entropy + 0.03, {"rans": 60, "palette": 2})]
    planes += [PlaneRow(each, 8, 7.96, 8.0, {"stored": 62}) for each in names[1:]]
    return TensorRow(
        source, name, dtype, shape, "weights", kind, layer, nbytes, min(nbytes, 1 << 20), levels,
        Estimate(round((entropy + rest - 0.03) / 8 * n)), None, "float",
        "rANS on the exponents; the mantissas are noise", tuple(planes), bits,
        sum(bit > 0.99 for bit in bits),
    )  # fmt: skip


def _entropy(values: np.ndarray) -> float:
    counts = np.bincount(values.astype(np.int64).ravel())
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _entropy_of_bits(words: np.ndarray, width: int) -> list[float]:
    return [_entropy((words >> bit) & 1) for bit in reversed(range(width))]


def _sources(
    tensors: Sequence[TensorRow], names: Sequence[str], steps: Sequence[int | None]
) -> tuple[SourceRow, ...]:
    nbytes = sum(row.nbytes for row in tensors)
    return tuple(
        SourceRow(name, f"/runs/llama/{name}/model.safetensors", "plain file", step, len(tensors),
                  nbytes, None)
        for name, step in zip(names, steps, strict=True)
    )  # fmt: skip


def _steps() -> list[int]:
    return [2**i for i in range(12)]


def _exponents() -> tuple[ExponentRow, ...]:
    rows = []
    for kind, dtype, center, wide in (
        ("attention", "BF16", -6.2, 1.6), ("feed-forward", "BF16", -6.6, 1.5),
        ("embedding", "BF16", -7.4, 1.9), ("output", "BF16", -5.9, 1.7), ("norm", "F32", -0.4, 0.5),
    ):  # fmt: skip
        shares = [
            math.exp(-(((e - center) / wide) ** 2) / (1 if e > center else 2))
            for e in range(-24, 3)
        ]
        rows.append(
            ExponentRow("weights", kind, dtype, -24, tuple(s / sum(shares) for s in shares), 0.0001)
        )
    return tuple(rows)


def _series(tensors: Sequence[TensorRow]) -> Series:
    nbytes, steps = sum(row.nbytes for row in tensors), []
    for i, step in enumerate(_steps()):
        kinds = tuple(
            StepKindRow(
                role, kind, "BF16" if role == "weights" else "F32", nbytes // 6,
                Estimate(round(nbytes / 6 / base), nbytes // 6000),
                Estimate(round(nbytes / 6 / base / (gain + i / 9)), nbytes // 6000) if i else None,
                min(0.98, share + i * 0.05) if i else None,
            )
            for role, base, gain, share in (
                ("weights", 1.5, 2.4, 0.3), ("first moments", 1.42, 1.02, 0.0),
                ("second moments", 1.3, 1.5, 0.02),
            )
            for kind in ("attention", "feed-forward")
        )  # fmt: skip
        delta = round(nbytes / (2.1 + 0.3 * i))
        steps.append(
            StepRow(
                f"checkpoint-{step}", step, nbytes, Estimate(round(nbytes / 1.51), nbytes // 600),
                Estimate(delta, nbytes // 600) if i else None, 0.3 + i * 0.05 if i else None, kinds,
                delta if i % 4 else round(nbytes / 1.5), i % 4,
                round(nbytes / 1.5 + (i % 4) * delta),
            )
        )  # fmt: skip
    gaps = tuple(
        (g, Estimate(round(nbytes / (4.6 / (1 + 0.23 * math.log2(g)))), nbytes // 700))
        for g in _steps()[:-1]
    )
    sizes = tuple(
        StepSizeRow(
            role,
            dtype,
            e,
            math.exp(-(((e + 7) / 2) ** 2)) / 3.6,
            2.0 ** (scale - e),
            3 * 2.0 ** (scale - e),
        )
        for role, dtype, scale in (("weights", "BF16", -8), ("first moments", "F32", 2))
        for e in range(-14, -1)
    )
    return Series(tuple(steps), gaps, sizes)


def _kept(every: int, chain: int) -> float:
    """The share of bytes that is left."""
    return (1 / 1.5 + chain * (0.16 + 0.02 * math.log2(every))) / (chain + 1)


def _policy() -> Policy:
    rows = [
        PolicyRow(every, chain, round(2.2e12 / every * _kept(every, chain)), 2.1 * 1000 / every,
                  0.4 * 1000 / every, 2.6 + 0.9 * chain, every / 2)
        for every in (1, 10, 50, 100, 500, 1000)
        for chain in (0, 1, 3, 7, 15)
    ]  # fmt: skip
    return Policy(
        tuple(rows), 17,
        "It has the shortest chain among those within a tenth of the smallest store.",
        ("Packing at 1.9 GB/s and unpacking at 2.7 GB/s, measured here on 2 threads.",
         "The disk reads and writes 2 GB/s.", "A step takes 1.2 s.",
         "Gaps above 1,024 steps are extrapolated."),
    )  # fmt: skip


def _engines() -> tuple[EngineTable, ...]:
    ways = [
        ("Packhorse fast", True, 1.40, 6.1, 9.3), ("Packhorse default", True, 1.51, 2.1, 2.9),
        ("Packhorse max", True, 1.53, 0.6, 2.0), ("gzip 6", False, 1.27, 0.019, 0.21),
        ("bz2 9", False, 1.42, 0.011, 0.026), ("xz 6", False, 1.36, 0.004, 0.06),
        ("zstd 3", False, 1.28, 0.31, 0.9), ("lz4 1", False, 1.0, 1.2, 4.4),
        ("gzip 6, grouped", False, 1.44, 0.04, 0.4), ("bz2 9, grouped", False, 1.49, 0.013, 0.03),
        ("xz 6, grouped", False, 1.46, 0.005, 0.07), ("zstd 3, grouped", False, 1.45, 0.5, 1.3),
        ("lz4 1, grouped", False, 1.13, 0.9, 3.2), ("LMC (Huffman)", False, 1.50, 0.4, 0.5),
        ("zipnn", False, 1.51, 0.8, 1.5), ("openzl", False, 1.51, 0.4, 1.1),
        ("xz 9", False, 1.46, None, None),
    ]  # fmt: skip
    rows = tuple(
        EngineRow(name, ours, round(64e6 / ratio), 64_000_000, pack, unpack,
                  not ours and name != "lz4 1", "" if pack else "size only")
        for name, ours, ratio, pack, unpack in ways
    )  # fmt: skip
    delta = tuple(replace(row, packed_nbytes=row.packed_nbytes // 3) for row in rows[:9])
    return (
        EngineTable("weights, BF16", False, rows, {"nvcomp": "it is not installed"}),
        EngineTable("weights, BF16, against step 1,024", True, delta),
    )


def _memory(tensors: Sequence[TensorRow]) -> tuple[MemoryRow, ...]:
    rows = []
    for row in tensors:
        is_matrix = row.dtype == "BF16"
        is_table = row.kind == "embedding"
        rows.append(
            MemoryRow(
                row.source, row.name, row.dtype, row.shape, row.nbytes, row.layer,
                Estimate(round(row.nbytes * 0.751)) if is_matrix else None,
                "W12" if is_matrix else "F32 stays as it is",
                0.0002 * (1 + (row.layer or 0) % 5) if is_matrix else None,
                Estimate(round(row.nbytes * 0.72)) if is_table else None,
                "codes of three columns in 10 bits" if is_table else "no table",
                0.71 if is_table else None,
                {
                    name: MemoryFormat(Estimate(round(row.nbytes * share)), exceptions)
                    for name, share, exceptions in (("W12", 0.751, 2e-4), ("W11", 0.722, 0.01))
                }
                if is_matrix
                else {},
            )
        )  # fmt: skip
    return tuple(rows)


def _changes(tensors: Sequence[TensorRow]) -> Changes:
    rows = []
    for i, row in enumerate(tensors):
        frozen = row.kind == "norm" or (row.layer is not None and row.layer < 4)
        changed = 0.0 if frozen else 0.2 + 0.03 * (row.layer or 0)
        change = "equal" if frozen else "changed"
        full = row.levels["default"]
        delta = Estimate(0 if frozen else round(full.nbytes * min(changed, 1) / 2.4))
        rows.append(
            ChangeRow(row.name, change, None, row.dtype, row.shape, row.nbytes, row.kind, row.layer,
                      min(changed, 1.0), full, delta)
        )  # fmt: skip
        if i in (1, 2):
            what = (
                ("moved", "model.old_name.weight") if i == 1 else ("replaced", "F32 (2048, 2048)")
            )
            rows[-1] = replace(rows[-1], change=what[0], was=what[1], changed=None, delta=None)
    new = replace(rows[-1], name="score.weight", change="new", changed=None, delta=None)
    gone = replace(rows[-1], name="old.bias", change="removed", changed=None, delta=None)
    return Changes("tiny llama", "tiny llama, tuned", (*rows, new, gone))
