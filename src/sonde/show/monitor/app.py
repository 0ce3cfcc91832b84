"""The screen of `sonde monitor`: reads in a thread once a second and draws the result. Writes no files."""

from __future__ import annotations

from typing import ClassVar, Final

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from sonde.schema.losses import is_loss
from sonde.show.monitor.frame import Frame
from sonde.show.monitor.panels import ROOM_FOR_NAMES, Findings, Heat, Plot, Runs, Worst
from sonde.show.monitor.watching import WatchedRuns
from sonde.show.monitor.words import finding_note, title
from sonde.show.term.text import plain

INTERVAL_S: Final = 1.0
STATS: Final = ("rms", "max_abs", "norm", "zero_fraction", "nonfinite_fraction")
KEYS: Final = [
    ("q", "quit"),
    ("?", "show this help"),
    ("r", "show or hide the list of runs"),
    ("n / p", "next, previous run"),
    ("Tab", "move to the next panel"),
    ("j / k", "down, up"),
    ("Enter", "open the finding, or the run"),
    ("l", "logarithmic axis: automatic, on, off"),
    ("o", "left plot: loss, steps per second, other scalars"),
    ("s", "next stat of the heatmap: rms, max_abs, norm, zeros, non-finite"),
    ("g", "next kind of the heatmap: grad, param, act, …"),
    ("d", "run all rules now"),
    ("space", "pause or resume"),
    ("t", "switch between dark and light"),
]


class Monitor(App[None]):
    TITLE = "sonde monitor"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (110, "-wide")]  # noqa: RUF012  declared without ClassVar by Textual
    VERTICAL_BREAKPOINTS = [(0, "-low"), (36, "-high")]  # noqa: RUF012
    CSS = """
    Screen { layout: vertical; }
    #title, #foot { height: 1; padding: 0 1; }
    #foot { color: $text-muted; }
    #problem { height: auto; padding: 1 2; color: $warning; display: none; }
    #body { height: 1fr; }
    Runs { width: 28; display: none; }
    .-wide Runs, .show-runs Runs { display: block; }
    .-wide.hide-runs Runs { display: none; }
    #top { height: 2fr; } #bottom { height: 3fr; }
    .-high #top { height: 1fr; } .-high #bottom { height: 1fr; }
    #loss, Heat { width: 3fr; } Findings, Worst { width: 2fr; }
    #rate { width: 2fr; display: none; }
    .-wide #rate { display: block; }
    Runs, Findings, Heat, Worst { border: round $panel-lighten-2; padding: 0; height: 1fr; background: $background; }
    Runs, Findings, Heat, Worst { border-title-color: $text; }
    Runs:focus, Findings:focus { border: round $primary; }
    OptionList > .option-list--option { padding: 0; }
    OptionList > .option-list--option-highlighted { background: $panel; color: $text; }
    OptionList:focus > .option-list--option-highlighted { background: $panel-lighten-1; color: $text; }
    OptionList { scrollbar-size-vertical: 1; } Heat, Worst { overflow: hidden; }
    Plot { height: 1fr; }
    """
    BINDINGS: ClassVar = [
        Binding("q", "quit", "quit"),
        Binding("question_mark", "keys", "keys"),
        Binding("r", "toggle_runs", "runs"),
        Binding("n", "step_run(1)", "next run"),
        Binding("p", "step_run(-1)", "previous run"),
        Binding("j", "move('down')", "down"),
        Binding("k", "move('up')", "up"),
        Binding("l", "log", "log axis"),
        Binding("o", "other", "other plot"),
        Binding("s", "stat", "next stat"),
        Binding("g", "kind", "next kind"),
        Binding("d", "judge", "diagnose"),
        Binding("space", "pause", "pause"),
        Binding("t", "theme", "theme"),
    ]

    def __init__(self, watching: WatchedRuns, *, interval_s: float = INTERVAL_S) -> None:
        super().__init__()
        self.watching, self.interval_s = watching, interval_s
        self.latest: Frame | None = None
        self.plot_number = 0
        self.is_paused = False
        self.is_looking = False

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        yield Static(id="problem")
        with Horizontal(id="body"):
            yield Runs()
            with Vertical():
                with Horizontal(id="top"):
                    yield Plot(id="loss")
                    yield Plot(id="rate")
                    yield Findings()
                with Horizontal(id="bottom"):
                    yield Heat()
                    yield Worst()
        yield Static(Text("q quit  ? keys  r runs  n/p run  Enter open  s stat  g kind  l log"), id="foot")

    def on_mount(self) -> None:
        if self.console.color_system == "standard":
            self.theme = "textual-ansi" if "textual-ansi" in self.available_themes else "ansi-dark"
            for plot in self.query(Plot):
                plot.theme = "textual-clear"
        self.query_one(Findings).focus()
        self.set_interval(self.interval_s, self.tick)
        self.tick()

    # ------------------------------------------------------------------------------------------------------- reading

    def tick(self) -> None:
        """Read one frame at a time: a slow disk delays the picture, never the keys."""
        if not self.is_paused and not self.is_looking:
            self.is_looking = True
            self.look()

    @work(thread=True, exit_on_error=True)
    def look(self) -> None:
        frame = self.watching.look()
        self.call_from_thread(self.draw, frame)
        reading = self.watching.reading
        if reading is not None and reading.is_worth_judging():
            self.call_from_thread(self.draw, self.watching.judge())
        self.call_from_thread(self.has_looked)

    def has_looked(self) -> None:
        self.is_looking = False

    def draw(self, frame: Frame) -> None:
        """Show a frame. Does nothing if the screen is already being closed."""
        self.latest = frame
        if not self.query("#title"):
            return
        head = title(frame)
        if self.is_paused:
            head.append("  paused", style="reverse")
        self.query_one("#title", Static).update(head)
        self._draw_problem(frame)
        self._draw_plots(frame)
        self.query_one(Heat).show(frame)
        self.query_one(Worst).show(frame)
        self.query_one(Findings).show(frame)
        self.query_one(Runs).show(frame)

    def _draw_problem(self, frame: Frame) -> None:
        told = [text for text in (frame.problem, frame.reason, *frame.warnings) if text]
        problem = self.query_one("#problem", Static)
        problem.update(Text("\n".join(plain(text) for text in told)))
        problem.display = bool(told)
        problem.styles.padding = (1, 2) if frame.run is None else (0, 1)
        self.query_one("#body").display = frame.run is not None

    def _draw_plots(self, frame: Frame) -> None:
        rate = [frame.rate] if frame.rate is not None else []
        losses = [one for one in frame.losses if is_loss(one.name)] or list(frame.losses[:1])
        choices = [("loss", losses), ("steps per second", rate)]
        choices += [(one.name, [one]) for one in frame.losses if one not in losses]
        name, curves = choices[self.plot_number % len(choices)]
        if len(curves) > 1 and self.query_one("#loss", Plot).size.height < ROOM_FOR_NAMES:
            name = ", ".join(one.name for one in curves)
        self.query_one("#loss", Plot).draw(plain(name), curves)
        self.query_one("#rate", Plot).draw("steps per second", rate)

    # ---------------------------------------------------------------------------------------------------------- keys

    def action_keys(self) -> None:
        self.push_screen(keys_note(KEYS))

    def action_toggle_runs(self) -> None:
        runs = self.query_one(Runs)
        was_shown = runs.display
        self.screen.set_class(not was_shown, "show-runs")
        self.screen.set_class(was_shown, "hide-runs")
        (self.query_one(Findings) if was_shown else runs).focus()
        if self.latest is not None and self.latest.run is not None:
            runs.point_at(self.latest.run.path)

    def action_step_run(self, by: int) -> None:
        frame = self.latest
        if frame is None or frame.run is None or len(frame.runs) < 2:
            return
        paths = [line.path for line in frame.runs]
        here = paths.index(frame.run.path) if frame.run.path in paths else 0
        self._choose(paths[(here + by) % len(paths)])

    def action_move(self, way: str) -> None:
        focused = self.focused
        if isinstance(focused, Runs | Findings):
            focused.action_cursor_down() if way == "down" else focused.action_cursor_up()

    def action_log(self) -> None:
        following = {None: True, True: False, False: None}
        for plot in self.query(Plot):
            plot.is_log = following[plot.is_log]
        self._again()

    def action_other(self) -> None:
        self.plot_number += 1
        self._again()

    def action_stat(self) -> None:
        kind, stat = self.watching.pattern
        place = STATS.index(stat) if stat in STATS else -1
        self.watching.pattern = (kind, STATS[(place + 1) % len(STATS)])
        self.tick()

    def action_kind(self) -> None:
        kind, stat = self.watching.pattern
        kinds = self.watching.kinds() or [kind]
        place = kinds.index(kind) if kind in kinds else -1
        self.watching.pattern = (kinds[(place + 1) % len(kinds)], stat)
        self.tick()

    @work(thread=True, exclusive=True, group="judge")
    def action_judge(self) -> None:
        self.call_from_thread(self.notify, "Running all rules …", timeout=2)
        self.call_from_thread(self.draw, self.watching.judge())

    def action_pause(self) -> None:
        self.is_paused = not self.is_paused
        self._again()
        self.tick()

    def action_theme(self) -> None:
        self.theme = "textual-light" if self.current_theme.dark else "textual-dark"

    def on_findings_opened(self, message: Findings.Opened) -> None:
        finding = message.finding
        self.push_screen(Note(str(finding["rule"]), finding_note(finding)))

    def on_runs_chosen(self, message: Runs.Chosen) -> None:
        self._choose(message.path)

    def _choose(self, path: str) -> None:
        self.watching.choose(path)
        self.plot_number = 0
        self.tick()

    def _again(self) -> None:
        if self.latest is not None:
            self.draw(self.latest)


def monitor(watching: WatchedRuns) -> None:
    """Show the monitor until the user quits."""
    Monitor(watching).run()


class Note(ModalScreen[None]):
    """A text over the whole screen; any of the usual keys closes it."""

    BINDINGS: ClassVar = [("escape,q,enter,question_mark,space", "dismiss", "close")]
    CSS = """
    Note { align: center middle; }
    Note > VerticalScroll {
        width: 90%; max-width: 100; height: auto; max-height: 90%;
        border: round $primary; padding: 0 1; background: $surface;
    }
    """

    def __init__(self, title: str, text: Text) -> None:
        super().__init__()
        self.heading, self.text = title, text

    def compose(self) -> ComposeResult:
        with VerticalScroll() as scroll:
            scroll.border_title = self.heading
            scroll.border_subtitle = "Esc to close"
            yield Static(self.text)


def keys_note(keys: list[tuple[str, str]]) -> Note:
    text = Text()
    for key, meaning in keys:
        text.append(f"{key:>10}  ", style="bold cyan").append(f"{meaning}\n")
    text.append("\nColours run from dark (small) to bright (large); × marks non-finite values.", style="dim")
    return Note("keys", text)
