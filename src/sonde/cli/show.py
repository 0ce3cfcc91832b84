"""`sonde show RUN`: a run, one of its steps, or the tensors of a snapshot, on one screen."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json
from sonde.show.term.number import age, count, counted, duration, number
from sonde.show.term.text import plain

if TYPE_CHECKING:
    from rich.console import Console

    from sonde.run import Run

NUM_EVENTS: Final = 5
NUM_GRADIENTS: Final = 10
NUM_TENSORS: Final = 40


def show(
    run: RunName = "latest",
    at: Annotated[
        int | None,
        typer.Option(
            "--at",
            metavar="STEP",
            help="Show what was recorded at this step. With --tensors, -1 is the last snapshot (default).",
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option("--top", min=1, help="Number of largest gradients (default 10) or of tensors (default 40)."),
    ] = None,
    tensors: Annotated[
        str | None,
        typer.Option(
            "--tensors",
            metavar="GLOB",
            help="Show the whole tensors of a snapshot instead, e.g. 'param/*': norm, change and rank.",
        ),
    ] = None,
    by_rank: Annotated[
        bool, typer.Option("--by-rank", help="Show each rank of a sharded model: its last step, loss and gradient.")
    ] = False,
    spectra: Annotated[
        bool, typer.Option("--spectra/--no-spectra", help="With --tensors: also compute singular values of matrices.")
    ] = True,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Show a run: status, config, scalars, gradients and warnings.

    Also lists the largest gradients, recent events, the recording overhead, and anything that could not be recorded.
    With --tensors, shows how far the tensors of a snapshot have moved since the first one.

    \b
    Examples:
      sonde show latest
      sonde show gpt/baseline --at 1200
      sonde show latest --tensors "param/layers.*"
      sonde show latest --by-rank
      sonde runs/latest
    """
    found = open_run(run, dir)
    if by_rank:
        _show_ranks(found, as_json=json)
        return
    if tensors is not None:
        _show_tensors(found, tensors, at, top or NUM_TENSORS, spectra=spectra, as_json=json)
        return
    if at is not None:
        _refuse_step(found, at)
    facts = describe_run(found, at=at, top=top or NUM_GRADIENTS)
    if json:
        print_json({key: value for key, value in facts.items() if not key.startswith("_")})
    else:
        _draw(found, facts, at)


def _show_tensors(run: Run, pattern: str, at: int | None, top: int, *, spectra: bool, as_json: bool) -> None:
    from sonde.show.term.progress import progress
    from sonde.show.term.snapshot import print_snapshot

    with progress("tensors", quiet=as_json) as advance:
        table = run.tensors.standing(pattern, step="latest" if at is None else at, spectra=spectra, on_tensor=advance)
    rows = table.to_pylist()
    step = rows[0]["step"] if rows else -1
    if as_json:
        print_json({"run": run.id, "step": step, "tensors": rows})
    else:
        print_snapshot(run, step, rows, top)


def _show_ranks(run: Run, *, as_json: bool) -> None:
    from sonde.show.term.console import make_console
    from sonde.show.term.table import Column, table

    rows = run.ranks().to_pylist()
    if as_json:
        print_json({"run": run.id, "ranks": rows})
        return
    columns = [Column("rank", right=True), Column("process"), Column("status"), Column("last step", right=True)]
    columns += [Column(title, right=True) for title in ("loss", "gradient norm", "non-finite", "silent for")]
    cells = [
        (
            row["rank"],
            f"{plain(row['host'])}:{row['pid']}",
            row["status"],
            count(row["last_step"]),
            *("" if row[name] is None else number(row[name]) for name in ("loss", "grad_norm")),
            "" if row["nonfinite"] is None else count(row["nonfinite"]),
            "" if row["silent_s"] is None else duration(row["silent_s"]),
        )
        for row in rows
    ]
    make_console().print(table(columns, cells))


def _refuse_step(run: Run, at: int) -> None:
    from sonde.errors import UsageError

    if not 0 <= at <= run.last_step:
        steps = f"it has steps 0 to {run.last_step}" if run.last_step >= 0 else "nothing is recorded yet"
        raise UsageError(f"run {run.id} has no step {at}: {steps}. Choose another step with --at.")


def describe_run(run: Run, *, at: int | None, top: int) -> dict[str, Any]:
    """Everything `show` prints; keys starting with an underscore are for drawing only."""
    from sonde.show.summary import describe, largest_gradients, scalar_series

    scalars = scalar_series(run, steps=at)
    gradients = largest_gradients(run, at=at, num_sites=top)
    events = [event for event in run.events().to_pylist() if at is None or event["step"] == at]
    manifest = run.manifest
    return {
        **describe(run),
        "at": at,
        "command": list(manifest.command),
        "host": manifest.host,
        "git": run.git,
        "config": run.config,
        "scalars": [series.to_dict() for series in scalars],
        "largest_gradients": [
            {
                "site": series.name,
                "step": int(series.steps[-1]),
                "norm": series.last,
                "min": series.min,
                "max": series.max,
            }
            for series in gradients
        ],
        "attempts": [{**row, "started": row["started"].isoformat()} for row in run.attempts().to_pylist()],
        "num_sites": run.sites().num_rows,
        "events": events,
        "coverage": dict(run.coverage()),
        "overhead": manifest.facts.get("overhead"),
        "_scalars": scalars,
        "_gradients": gradients,
    }


def _draw(run: Run, facts: dict[str, Any], at: int | None) -> None:
    from sonde.show.term.console import make_console

    console = make_console()
    _draw_head(console, facts)
    if at is None:
        _draw_config(console, facts["config"])
    _draw_scalars(console, facts["_scalars"], at)
    _draw_gradients(console, facts["_gradients"], at)
    _draw_events(console, facts["events"])
    _draw_quality(console, facts)
    _draw_next(console, run, at)


def _draw_head(console: Console, facts: dict[str, Any]) -> None:
    from datetime import datetime

    from rich.text import Text

    from sonde.show.term.table import Column, status_text, table

    name = Text(f"{plain(facts['project'])}/{plain(facts['name'])}", style="bold")
    console.print(Text("  ").join([name, status_text(facts["status"]), Text(plain(facts["id"]), style="dim")]))
    began = age(time.time() - datetime.fromisoformat(facts["created"]).timestamp())
    rows = [
        ("", facts["reason"]),
        ("steps", f"{count(facts['last_step'] + 1)} in {duration(facts['duration_s'])}, started {began}"),
        ("attempts", _attempts(facts["attempts"])),
        ("findings", _findings(facts)),
        ("command", " ".join(facts["command"])),
        ("git", _git(facts["git"])),
        ("tags", ", ".join(facts["tags"])),
        ("notes", facts["notes"]),
        ("folder", facts["path"]),
    ]
    columns = [Column("", style="dim"), Column("", wrap=True)]
    console.print(table(columns, [row for row in rows if row[1]], header=False))


def _attempts(attempts: list[dict[str, Any]]) -> str:
    """The number of attempts and the start of the last one; empty for a run with a single attempt."""
    if len(attempts) == 1:
        return ""
    last = attempts[-1]
    return f"{len(attempts)}; the last started at step {last['first_step']:,} ({last['reason']})"


def _findings(facts: dict[str, Any]) -> str:
    """Counts of live findings and the health."""
    from sonde.show.diagnosis import counts_in_words

    if facts["findings"] is None:
        return f"unknown   sonde diagnose {facts['id']}"
    health = "" if facts["health"] is None else f", health {facts['health']:.0f} of 100"
    return f"{counts_in_words(facts['findings']) or 'none'}{health}   sonde diagnose {facts['id']}"


def _git(git: Any) -> str:
    if not git:
        return ""
    dirty = ", with uncommitted changes" if git.get("dirty") else ""
    return f"{str(git.get('revision', ''))[:12]} on {git.get('branch', '?')}{dirty}"


def _draw_config(console: Console, config: Any) -> None:
    from sonde.schema.records import flatten
    from sonde.show.term.table import Column, table

    rows = list(flatten(config).items())
    if rows:
        console.print()
        console.print(table([Column("config", cut=True), Column("", wrap=True)], rows))


def _draw_scalars(console: Console, scalars: list[Any], at: int | None) -> None:
    from sonde.show.term.console import is_ascii
    from sonde.show.term.sparkline import sparkline
    from sonde.show.term.table import Column, table

    if not scalars:
        return
    console.print()
    if at is not None:
        columns = [Column(f"scalar at step {at}", cut=True), Column("value", right=True)]
        console.print(table(columns, [(series.name, number(series.last)) for series in scalars]))
        return
    numbers = [Column(title, right=True) for title in ("first", "last", "min", "max")]
    rows = [
        (
            s.name,
            sparkline(s.values, 24, ascii=is_ascii(console)),
            *map(number, (s.first, s.last, s.min, s.max)),
            f"{s.num_nonfinite:,} non-finite" if s.num_nonfinite else "",
        )
        for s in scalars
    ]
    console.print(table([Column("scalar", cut=True), Column(""), *numbers, Column("", style="red")], rows))


def _draw_gradients(console: Console, gradients: list[Any], at: int | None) -> None:
    from sonde.show.term.console import is_ascii
    from sonde.show.term.sparkline import sparkline
    from sonde.show.term.table import Column, table

    if not gradients:
        return
    title = "largest gradients" if at is None else f"largest gradients at step {at}"
    columns = [Column(title, cut=True), Column(""), *(Column(t, right=True) for t in ("norm", "min", "max"))]
    rows = [
        (s.name, sparkline(s.values, 24, ascii=is_ascii(console)), *map(number, (s.last, s.min, s.max)))
        for s in gradients
    ]
    console.print()
    console.print(table(columns, rows))


def _draw_events(console: Console, events: list[dict[str, Any]]) -> None:
    from sonde.show.term.table import Column, severity_text, table

    if not events:
        return
    shown = [event for event in events if event["severity"] != "info"][-NUM_EVENTS:] or events[-NUM_EVENTS:]
    columns = [Column("step", right=True), Column("event"), Column(""), Column("", wrap=True)]
    rows = [(event["step"], event["type"], severity_text(event["severity"]), event["message"]) for event in shown]
    console.print()
    console.print(table(columns, rows))
    if len(events) > len(shown):
        console.print(counted(len(events) - len(shown), "more event"), style="dim")


def _draw_quality(console: Console, facts: dict[str, Any]) -> None:
    """Print the recording overhead, what could not be recorded, and what is damaged."""
    from sonde.show.coverage import coverage_sentences, overhead_sentence

    lines = [overhead_sentence(facts["overhead"]), *coverage_sentences(facts["coverage"])]
    if any(lines) or facts["warnings"]:
        console.print()
    for line in filter(None, lines):
        console.print(plain(line), style="dim")
    for warning in facts["warnings"]:
        console.print(f"! {plain(warning)}", style="yellow")


def _draw_next(console: Console, run: Run, at: int | None) -> None:
    verbs = [
        f"show {run.id} --at {max(run.last_step, 0)}" if at is None else f"show {run.id}",
        f'query {run.id} "select * from scalars order by step desc"',  # noqa: S608 - shown, not run
        f"export {run.id} --what scalars --format csv",
    ]
    console.print()
    for label, verb in zip(("next:", "", ""), verbs, strict=True):
        console.print(f"{label:6} sonde {plain(verb)}", style="dim")
