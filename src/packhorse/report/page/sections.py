"""The sections of a report, in their order, as far as the findings have something to say."""

from __future__ import annotations

from packhorse.report.page.bits import bits
from packhorse.report.page.changes import changes_section
from packhorse.report.page.engines import engines_section
from packhorse.report.page.glance import glance
from packhorse.report.page.measured import measured, problems
from packhorse.report.page.memory import memory_section
from packhorse.report.page.outline import Section
from packhorse.report.page.policy import policy_section
from packhorse.report.page.training import training
from packhorse.report.results import Findings

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
