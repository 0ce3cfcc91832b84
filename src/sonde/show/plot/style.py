"""Style of figures: small type, few lines, colours safe for the colour-blind. Changes no global setting."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Final

from sonde.errors import MissingPackageError
from sonde.show.term.text import plain

# The eight colours of Okabe and Ito, dark ones first; yellow is left out because it is invisible on white paper.
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00")
DASHES: Final = ("solid", (0, (5, 1.5)), (0, (1, 1)))
ODD: Final = "#d7263d"
MISSING: Final = "#d9d9d9"

RC: Final[dict[str, Any]] = {
    "font.family": ["sans-serif"],
    "font.size": 9.0,
    "axes.labelsize": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.facecolor": "white",
    "axes.edgecolor": "#333333",
    "axes.labelcolor": "#222222",
    "axes.grid": False,
    "text.color": "#222222",
    "text.usetex": False,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "lines.linewidth": 1.1,
    "figure.facecolor": "white",
    "figure.dpi": 100.0,
    "savefig.dpi": 300.0,
    "savefig.facecolor": "auto",
    # Text stays text, so that it can be searched and uses the fonts of the paper.
    "svg.fonttype": "none",
    "svg.hashsalt": "sonde",
    "pdf.fonttype": 42,
    "image.interpolation": "nearest",
}


def require_matplotlib() -> None:
    """Raise an error that says what to install if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib", "plot", "drawing a figure")


def label(text: object, limit: int | None = None) -> str:
    """Escape a name: a dollar sign must not start a formula, and control characters are removed."""
    return plain(text, limit).replace("$", r"\$")


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def dash(number: int) -> Any:
    return DASHES[number // len(COLOURS) % len(DASHES)]
