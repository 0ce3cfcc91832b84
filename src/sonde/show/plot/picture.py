"""A matplotlib Figure that displays itself in a notebook and keeps text as text in files. Never uses pyplot."""

from __future__ import annotations

import io
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sonde.show.plot.style import RC


class Picture(Figure):
    """A matplotlib figure that involves no window, backend or user setting."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        FigureCanvasAgg(self)

    def savefig(self, fname: Any, **keywords: Any) -> None:
        """Write PNG, SVG or PDF. Text stays text; the same figure gives the same file."""
        if str(fname).lower().endswith(".svg") or keywords.get("format") == "svg":
            keywords.setdefault("metadata", {"Date": None})
        with rc_context(RC):
            super().savefig(fname, **keywords)

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=144)
        return out.getvalue()
