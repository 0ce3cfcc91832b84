"""The panels of the screen: plots, heatmap, layers, findings, runs. Each draws a frame and reads no files."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from rich.text import Text
from textual.message import Message
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option
from textual_plotext import PlotextPlot

from sonde.show.monitor.frame import Curve, Frame
from sonde.show.monitor.heat import HeatLook, heat_lines
from sonde.show.monitor.words import finding_lines, fitted, worst_cells
from sonde.show.plot.axes import spans_decades
from sonde.show.term.table import STATUS_STYLES
from sonde.show.term.text import plain

ROOM_FOR_NAMES: Final = 12
"""Below this height a plot has no room for a legend, so the names are put into its title."""
_LINES: Final = ("cyan+", "orange+", "green+")


class Plot(PlotextPlot):
    """A few curves over steps, with a logarithmic axis where it helps and crosses for non-finite values."""

    is_log: bool | None = None
    """None: logarithmic if the values span decades."""

    def draw(self, title: str, curves: list[Curve]) -> None:
        """Draw these curves, or say that there is no data yet."""
        plot = self.plt
        plot.clear_figure()
        shown = [one for one in curves if len(one.values)]
        values = np.concatenate([np.empty(0), *(one.values for one in shown)])
        wanted = spans_decades([values]) if self.is_log is None else self.is_log
        # Logarithms are taken here: plotext raises on a logarithmic axis without data, or with a zero in it.
        is_log = bool(wanted and (values[np.isfinite(values)] > 0).any())
        drawn = []
        for number, one in enumerate(shown):
            steps, heights = _points(one, is_log=is_log)
            if len(heights):
                label = plain(one.name, 18) if len(shown) > 1 and self.size.height >= ROOM_FOR_NAMES else None
                colour = _LINES[number % len(_LINES)]
                plot.plot(steps.tolist(), heights.tolist(), marker="braille", color=colour, label=label)
                drawn.append(heights)
        if drawn:
            heights = np.concatenate(drawn)
            self._finish(shown, float(heights.min()), float(heights.max()), is_log=is_log)
        plot.title(f"{title}{', log' if is_log else ''}" if drawn else f"{title}: no data yet")
        self.refresh()

    def _finish(self, shown: list[Curve], lowest: float, highest: float, *, is_log: bool) -> None:
        """Add crosses for non-finite values, and round ticks."""
        plot = self.plt
        odd = sorted({int(step) for one in shown for step in one.steps[~np.isfinite(one.values)]})
        if odd:
            plot.scatter(odd, [lowest] * len(odd), marker="x", color="red+")
        ticks = value_ticks(lowest, highest, is_log=is_log, num=max(self.size.height // 4, 2))
        plot.yticks([place for place, _ in ticks], [label for _, label in ticks])
        first, last = (int(function(one.steps[end] for one in shown)) for function, end in ((min, 0), (max, -1)))
        marks = sorted({round(step) for step in np.linspace(first, last, 4 if self.size.width < 60 else 6)})
        plot.xticks(marks, [f"{mark:,}" for mark in marks])


def _points(curve: Curve, *, is_log: bool) -> tuple[Any, Any]:
    kept = np.isfinite(curve.values) & ((curve.values > 0) if is_log else True)
    values = curve.values[kept]
    return curve.steps[kept], np.log10(values) if is_log else values


def value_ticks(lowest: float, highest: float, *, is_log: bool, num: int) -> list[tuple[float, str]]:
    """Tick positions and labels; on a logarithmic axis the positions are logarithms.

    >>> value_ticks(-3.2, 0.1, is_log=True, num=4)
    [(-3, '0.001'), (-2, '0.01'), (-1, '0.1'), (0, '1')]
    """
    if is_log and np.floor(highest) - np.ceil(lowest) >= 1:
        decades = range(int(np.ceil(lowest)), int(np.floor(highest)) + 1)
        every = max(1, -(-len(decades) // max(num, 2)))
        return [(place, f"{10.0**place:g}") for place in decades[::every]]
    places = np.linspace(lowest, highest, max(num, 2)) if highest > lowest else np.array([lowest])
    return [(float(place), f"{10.0**place if is_log else place:.3g}") for place in places]


class Heat(Static):
    """The heatmap of layers and steps. Folding and pooling never hide a NaN."""

    frame: Frame | None = None

    def show(self, frame: Frame) -> None:
        self.frame = frame
        self.border_title = plain(frame.stat)
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        width, height = self.content_size.width, self.content_size.height
        if self.frame is None or width < 12 or height < 2:
            return
        if self.frame.heat is None:
            self.update(Text("nothing of this kind recorded yet", style="dim"))
            return
        system = self.app.console.color_system
        has_colours = system in ("256", "truecolor") and not self.app.no_color
        look = HeatLook(width, height, has_colours=has_colours)
        self.update(Text("\n").join(heat_lines(self.frame.heat, look)))


class Worst(Static):
    """The layers that stand out."""

    frame: Frame | None = None

    def show(self, frame: Frame) -> None:
        self.frame = frame
        self.border_title = f"stand out in {plain(frame.stat.rpartition('/')[2])}"
        self.draw()

    def on_resize(self) -> None:
        self.draw()

    def draw(self) -> None:
        width, height = self.content_size.width, self.content_size.height
        if self.frame is None or width < 12 or height < 1:
            return
        # Plain lines: a Textual table would measure every cell again for every frame.
        has_values = width >= 34
        room = max(min(width - (22 if has_values else 12), 36), 8)
        shape = width - room - 23
        lines = []
        for one in self.frame.worst[:height]:
            name, value, times, history = worst_cells(one, max(shape, 1))
            name = Text(fitted(name.plain, room).ljust(room), style=name.style)
            value.pad_left(max(9 - value.cell_len, 0))
            times.truncate(width - room - 1)  # a line that wraps would push the last layers out
            times.pad_left(max(min(11, width - room - 1) - times.cell_len, 0))
            cells = [name, *([value] if has_values else []), times, *([history] if shape > 2 else [])]
            lines.append(Text(" ").join(cells))
        shown = Text("\n", no_wrap=True, overflow="crop").join(lines)
        self.update(shown if lines else Text("nothing of this kind recorded yet", style="dim"))


class Findings(OptionList):
    """The list of findings; Enter opens one."""

    class Opened(Message):
        def __init__(self, finding: dict[str, Any]) -> None:
            super().__init__()
            self.finding = finding

    shown: tuple[dict[str, Any], ...] = ()
    state: object = None

    def show(self, frame: Frame) -> None:
        title = "findings" if frame.is_judged else "findings so far"
        self.border_title = f"{title}: {len(frame.findings)}" if frame.findings else title
        state = (frame.findings, self.content_size.width)
        if state == self.state and self.option_count:
            return
        self.state, self.shown = state, frame.findings
        place = self.highlighted
        self.clear_options()
        self.add_options([Option(finding_lines(finding, self.content_size.width)) for finding in frame.findings])
        if not frame.findings:
            self.add_option(Option(Text("no problems found", style="dim"), disabled=True))
        else:
            self.highlighted = min(place or 0, len(frame.findings) - 1)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option_index < len(self.shown):
            self.post_message(self.Opened(self.shown[event.option_index]))


class Runs(OptionList):
    """The list of runs; Enter opens one."""

    class Chosen(Message):
        def __init__(self, path: str) -> None:
            super().__init__()
            self.path = path

    def show(self, frame: Frame) -> None:
        self.border_title = f"runs: {len(frame.runs)}"
        if {line.path for line in frame.runs} != {option.id for option in self.options} or not self.option_count:
            place = self.highlighted
            self.clear_options()
            self.add_options(
                [Option(_run_text(line, frame, self.content_size.width), id=line.path) for line in frame.runs]
            )
            self.highlighted = place if place is not None and place < len(frame.runs) else 0 if frame.runs else None
            return
        for line in frame.runs:
            self.replace_option_prompt(line.path, _run_text(line, frame, self.content_size.width))

    def point_at(self, path: str) -> None:
        """Put the cursor on a run."""
        paths = [option.id for option in self.options]
        if path in paths:
            self.highlighted = paths.index(path)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option.id is not None:
            self.post_message(self.Chosen(event.option.id))


def _run_text(line: Any, frame: Frame, width: int) -> Text:
    mark = "▶ " if frame.run is not None and frame.run.path == line.path else "  "
    text = Text(mark).append(plain(line.label, max(width - 3, 12) if width else None))
    return text.append(f"\n  {line.status}", style=STATUS_STYLES.get(line.status, "")).append(
        f"  {line.last_step + 1:,} step{'' if line.last_step == 0 else 's'}", style="dim"
    )
