"""The end of a report: how its figures were measured, and what its words mean."""

from __future__ import annotations

from collections.abc import Sequence

from packhorse.reports.page import words
from packhorse.reports.page.outline import Cell, Name, Note, Section, Table, headings
from packhorse.reports.results import Findings, Problem

__all__ = ["measured", "problems"]

_MESSAGE_NCHARS = 400
_NOT_THERE = ". What is listed here is not in the figures below."


def problems(findings: Findings) -> Section:
    """The section "Problems"."""
    found = [each for each in findings.problems if not each.is_note]
    lead = ("", words.plural(len(found), "problem"), _NOT_THERE)
    table = _messages("What could not be read or compared", found)
    return Section("problems", "Problems", lead, (table,))


def _messages(title: str, found: Sequence[Problem]) -> Table:
    rows = tuple(
        (Name(each.source), Name(each.tensor or ""), Name(each.message, _MESSAGE_NCHARS))
        for each in found
    )
    return Table(title, headings("Source", "Tensor", "What it is", n_text=3), rows)


def measured(findings: Findings) -> Section:
    """The section "How this was measured"."""
    settings = findings.settings
    lead = (
        f"It took {words.seconds(settings.seconds)} on {words.plural(settings.threads, 'thread')}.",
    )
    notes = [each for each in findings.problems if each.is_note]
    known = (_messages("Worth knowing", notes),) if notes else ()
    blocks = (Note((), _sentences(findings)), *known, _settings(findings))
    return Section("measured", "How this was measured", lead, blocks)


def _sentences(findings: Findings) -> tuple[str, ...]:
    return (
        _sample(findings),
        "A ratio is original bytes / packed bytes, headers included: 1.50 means that two thirds "
        "are left. Sizes are in decimal units, 1 GB is 1,000,000,000 bytes.",
        "Packing is lossless: every bit comes back, those of NaN and of negative zero included.",
        "The entropy of a bit or of a plane is that of order 0: it counts how often each value "
        "occurs, and knows nothing of neighbours. A bit is called noise if its entropy is above "
        "0.99 bit. The bound of a tensor is the sum of its planes' entropies, chunk by chunk: no "
        "code does better that has one table for each plane of a chunk. Codes that use rows, "
        "columns, repeats or a base can.",
        "Levels: “fast” packs and unpacks near the speed of a copy, “default” takes the entropy "
        "coder where it gains, “max” tries every model that the format has.",
        "A difference is the number of representable values between a value and that of the same "
        "place in the checkpoint before. It is used where it is shorter than the whole tensor.",
    )


def _sample(findings: Findings) -> str:
    """How much was looked at, and how sure that makes the figures."""
    if findings.settings.full:
        return "Everything was measured: no figure is an estimate."
    size = words.size(findings.settings.sample_nbytes)
    if all(row.sampled_nbytes >= row.nbytes for row in findings.tensors):
        return (
            f"A sample of {size} of each source was asked for, and the tensors described here are "
            "smaller than that, so they were measured whole."
        )
    return (
        f"Sizes are estimates from a sample of {size} of each source at most, spread over each "
        "tensor in runs. What stands behind ± says how far off a figure may be: two standard "
        "errors of sampling (if the sample were drawn again, 19 of 20 results would lie within "
        "them), and up to 0.2 % because the runs of a sample are packed together. The errors of "
        "tensors are added up."
    )


def _settings(findings: Findings) -> Table:
    settings = findings.settings
    sample = "everything" if settings.full else f"{words.size(settings.sample_nbytes)} a source"
    rows = (
        (Cell("Made"), Cell(words.printable(findings.made))),
        (Cell("Packhorse"), Cell(words.printable(findings.version))),
        (Cell("Sample"), Cell(sample)),
        (Cell("Threads"), Cell(words.count(settings.threads))),
        (Cell("Time"), Cell(words.seconds(settings.seconds))),
        (Cell("Checkpoints a day"), Cell(words.number(settings.checkpoints_per_day))),
    )
    return Table("Settings", headings("Setting", "Value", n_text=2), rows)
