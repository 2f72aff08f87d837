"""The sections of a report, in their order, as far as the findings have something to say."""

from __future__ import annotations

from packhorse.reports.page.bits import bits
from packhorse.reports.page.changes import changes_section
from packhorse.reports.page.engines import engines_section
from packhorse.reports.page.glance import glance
from packhorse.reports.page.measured import measured, problems
from packhorse.reports.page.memory import memory_section
from packhorse.reports.page.outline import Section
from packhorse.reports.page.policy import policy_section
from packhorse.reports.page.training import training
from packhorse.reports.results import Findings

__all__ = ["sections"]


def sections(findings: Findings) -> list[Section]:
    """All sections; one without data is not among them."""
    found = []
    if any(not each.is_note for each in findings.problems):
        found.append(problems(findings))
    if findings.sources:
        found.append(glance(findings))
    if findings.tensors:
        found.append(bits(findings))
    if findings.series and findings.series.steps:
        found.append(training(findings.series))
    if findings.policy and findings.policy.rows:
        found.append(policy_section(findings.policy))
    if findings.engines:
        found.append(engines_section(findings.engines))
    if findings.memory:
        found.append(memory_section(findings.memory))
    if findings.changes and findings.changes.rows:
        found.append(changes_section(findings.changes))
    return [*found, measured(findings)]
