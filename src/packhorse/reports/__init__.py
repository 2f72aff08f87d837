"""Reports on tensors: what is compressible, why, and what follows (docs/report.md).

`packhorse.report` makes one. `build` finds what it says (`results`), in the order of the sections:
`describe`, `bits` and `memory` for single tensors, `series` and `policy` for checkpoints, `changes`
for two models, `engines` for other packers. `page` draws it.
"""

from packhorse.reports.report import Report
from packhorse.reports.results import Findings

__all__ = ["Findings", "Report"]
