"""The page of a report: findings as one HTML file, or as Markdown."""

from __future__ import annotations

from packhorse.reports.page.html import render_html
from packhorse.reports.page.markdown import render_markdown

__all__ = ["render_html", "render_markdown"]
