"""`html(result)`: the HTML that a notebook shows for any result."""

from __future__ import annotations

from functools import singledispatch

from sonde.diagnose.explanation import Explanation
from sonde.diagnose.finding import Finding
from sonde.diagnose.findings import Findings
from sonde.run import Comparison, Run, Runs, Table, WeightComparison
from sonde.show.notebook.card import card
from sonde.show.notebook.comparison import comparison_html, weights_html
from sonde.show.notebook.finding import explanation_html, finding_html, findings_html
from sonde.show.notebook.runs import runs_html
from sonde.show.notebook.style import frame
from sonde.show.notebook.table import table_html


@singledispatch
def _content(result: object) -> str:
    raise TypeError(f"no HTML view of {type(result).__name__}")


_content.register(Run, card)
_content.register(Runs, runs_html)
_content.register(Table, table_html)
_content.register(Finding, finding_html)
_content.register(Findings, findings_html)
_content.register(Explanation, explanation_html)
_content.register(Comparison, comparison_html)
_content.register(WeightComparison, weights_html)


def html(result: object) -> str:
    """The result as one HTML element."""
    return frame(_content(result))
