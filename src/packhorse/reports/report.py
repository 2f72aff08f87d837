"""`Report`: what an analysis found, to look at, to keep and to hand on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from html import escape
from typing import Any

from packhorse.reports.page import render_html, render_markdown, words
from packhorse.reports.page.glance import headline
from packhorse.reports.results import Findings
from packhorse.storage.locations import open_place, writing

__all__ = ["Report"]

_FRAME_HEIGHT = 720  # pixels


class Report:
    """A report. In a notebook it shows itself as its page.

    Attributes:
        findings: what it says, as plain data.

    Example:
        >>> from packhorse.reports.build import make_findings
        >>> from packhorse.reports.report import Report
        >>> report = Report(make_findings(["model.safetensors"]))
        >>> report
        Report('model.safetensors': 1 source, 2 tensors)
        >>> report.save("report.html")
        >>> print(report.to_markdown())
        # model.safetensors
        ...
    """

    def __init__(self, findings: Findings) -> None:
        """A report that says what was found.

        Args:
            findings: what was found.
        """
        self.findings = findings

    @property
    def summary(self) -> str:
        """The report in a sentence."""
        return "".join(headline(self.findings))

    def to_json(self) -> dict[str, Any]:
        """The findings as values of JSON: dicts, lists, text, numbers, None."""
        return self.findings.to_json()

    def to_html(self) -> str:
        """The page, as one HTML file that needs nothing else.

        Raises:
            MissingBackendError: Jinja or vl-convert is not installed.
        """
        return render_html(self.findings)

    def to_markdown(self) -> str:
        """The report as Markdown, without its pictures."""
        return render_markdown(self.findings)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        force: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the report: the page, or Markdown if the name ends in ".md", or JSON if it ends in
        ".json". The file is whole or absent.

        Args:
            path: the file, at a path or a URL.
            force: whether a file that is there may be replaced.
            storage_options: options for the file system of a URL, as in fsspec.

        Raises:
            FileExistsError: the file is there, and `force` is False.
            MissingBackendError: Jinja or vl-convert is not installed.
            OSError: the file cannot be written.
        """
        destination = open_place(path, storage_options)
        text = self._text(destination.suffix.lower())
        with writing(destination, force=force) as output:
            output.write(text.encode())

    def _text(self, suffix: str) -> str:
        if suffix == ".md":
            return self.to_markdown()
        if suffix == ".json":
            return json.dumps(self.to_json(), indent=2) + "\n"
        return self.to_html()

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that its style and the notebook's do not meet."""
        return (
            f'<iframe srcdoc="{escape(self.to_html())}" sandbox="allow-scripts" '
            f'title="{escape(self.findings.title)}" width="100%" height="{_FRAME_HEIGHT}" '
            'frameborder="0"></iframe>'
        )

    def __repr__(self) -> str:
        found = self.findings
        counts = [
            words.plural(len(found.sources), "source"), words.plural(len(found.tensors), "tensor"),
            *([words.plural(len(found.problems), "problem")] if found.problems else []),
        ]  # fmt: skip
        told = ", ".join(counts).replace("\N{NO-BREAK SPACE}", " ")
        return f"Report({found.title!r}: {told})"
