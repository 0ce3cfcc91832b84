"""FlowReport: the result of a gradient-flow analysis, to query, print and save."""

from __future__ import annotations

import json
from pathlib import Path

from sonde.schema.records import to_json
from sonde.show.flow.page import as_fragment, as_html
from sonde.show.flow.result import FlowResult


class FlowReport(FlowResult):
    """The layers of a model in the order of its forward pass, with their health and issues."""

    __slots__ = ()

    def print_summary(self) -> None:
        """Print the score, counts, and the most severe issues."""
        from sonde.show.flow.console import print_summary

        print_summary(self)

    def print_issues(self) -> None:
        from sonde.show.flow.console import print_issues

        print_issues(self)

    def print_layers(self) -> None:
        from sonde.show.flow.console import print_layers

        print_layers(self)

    def save_json(self, path: str | Path) -> Path:
        return _write(path, json.dumps(json.loads(to_json(self.as_dict())), indent=2) + "\n")

    def save_text(self, path: str | Path) -> Path:
        from sonde.show.flow.console import as_text

        return _write(path, as_text(self))

    def save_html(self, path: str | Path) -> Path:
        """Write one self-contained HTML file: sortable tables, pressure along the depth, and issues."""
        return _write(path, as_html(self))

    def _repr_html_(self) -> str:
        return as_fragment(self)


def _write(path: str | Path, text: str) -> Path:
    target = Path(path)
    target.write_text(text, encoding="utf-8")
    return target
