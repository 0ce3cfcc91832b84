"""`run.plot("grad/*/rms")`: a matplotlib figure of series, as lines while there are few and as a heatmap after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from sonde.errors import UnknownNameError, UsageError
from sonde.run import Run
from sonde.schema.old_names import current_stat
from sonde.show.plot.heat import COLUMNS, draw_heat
from sonde.show.plot.lines import draw_lines
from sonde.show.plot.series import is_stat, read_series
from sonde.show.plot.style import RC, label, require_matplotlib
from sonde.show.pooled import pool

Style = Literal["auto", "lines", "heatmap"]
STYLES: Final[tuple[Style, ...]] = ("auto", "lines", "heatmap")
MAX_LINES: Final = 12
"""More lines than this cannot be told apart."""
SIZE: Final = (6.4, 3.2)


def plot(
    run: Run,
    pattern: str | Sequence[str],
    *,
    steps: Any = None,
    style: Style = "auto",
    log: bool | None = None,
    title: str | None = None,
    size: tuple[float, float] | None = None,
) -> Any:
    """The figure; `savefig("x.svg")` writes it, a notebook shows it."""
    require_matplotlib()
    if style not in STYLES:
        raise UnknownNameError("style", style, STYLES)
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    if not patterns:
        raise UsageError('nothing to plot: give a pattern, as in  run.plot("grad/*/rms")  or  run.plot("loss").')
    if style == "heatmap" or (style == "auto" and _are_many(run, patterns)):
        return _heatmap(run, patterns, steps, log, title, size)
    return _lines(run, patterns, steps, log, title, size)


def _are_many(run: Run, patterns: Sequence[str]) -> bool:
    """Whether one pattern names more sites than lines can show."""
    if len(patterns) != 1 or not is_stat(run, patterns[0]) or any(sign in patterns[0].split("/")[2] for sign in "*?["):
        return False
    kind, site, _ = patterns[0].split("/")
    from sonde.schema.names import matches

    table = run.sites()
    names = zip(table["kind"].to_pylist(), table["site"].to_pylist(), strict=True)
    return sum(matches(kind, own) and matches(site, name) for own, name in names) > MAX_LINES


def _lines(run: Run, patterns: Sequence[str], steps: Any, log: bool | None, title: Any, size: Any) -> Any:
    from matplotlib import rc_context

    series = read_series(run, patterns, steps)
    with rc_context(RC):
        figure, axes = _new(size or SIZE)
        draw_lines(axes, series, log=log)
        axes.set_title(_title(run) if title is None else title)
    return figure


def _heatmap(run: Run, patterns: Sequence[str], steps: Any, log: bool | None, title: Any, size: Any) -> Any:
    from matplotlib import rc_context

    if len(patterns) != 1 or not is_stat(run, patterns[0]):
        raise UsageError(
            'a heatmap shows one stat of many sites, as in  run.plot("grad/*/rms", style="heatmap"); '
            f"got {', '.join(patterns)}."
        )
    stat = current_stat(patterns[0].split("/")[2])
    if any(sign in stat for sign in "*?["):
        raise UsageError(f'a heatmap shows one stat; "{stat}" may be several. Give its name, as rms.')
    pooled = pool(run, patterns[0], width=COLUMNS, steps=steps)
    if not pooled.sites:
        raise UsageError(f"{run.project}/{run.name} has nothing named {patterns[0]}. `run.sites()` lists the sites.")
    kinds = sorted({site.partition("/")[0] for site in pooled.sites})
    with rc_context(RC):
        figure, axes = _new(size or (SIZE[0], min(max(1.2 + 0.14 * len(pooled.sites), SIZE[1]), 7.5)))
        draw_heat(figure, axes, pooled, f"{' '.join(kinds)} {stat}", log=log)
        axes.set_title(_title(run) if title is None else title)
    return figure


def _title(run: Run) -> str:
    return label(f"{run.project}/{run.name}", 80)


def _new(size: tuple[float, float]) -> tuple[Any, Any]:
    from sonde.show.plot.picture import Picture

    figure = Picture(figsize=size, layout="constrained")
    return figure, figure.subplots()
