"""`sonde demo [FAULT]`: a guided tour. Trains with a planted fault, diagnoses it, repairs it and trains again."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sonde.cli.options import Dir, Json, runs_dir
from sonde.cli.output import print_json
from sonde.show.term.text import place, plain

if TYPE_CHECKING:
    from sonde.demo.faults import Fault
    from sonde.run import Run

TITLES: Final = {
    "vanishing": "gradients vanish on their way to the first layers",
    "exploding": "gradients explode",
    "dead-relu": "units are off for every input",
    "spike": "the learning rate spikes",
    "nan": "the loss becomes NaN",
    "overfitting": "the model memorises the training rows",
    "attention": "attention collapses onto single tokens",
}
"""The faults to choose from, in order; here so that help does not import torch."""


def demo(
    fault: Annotated[
        str | None,
        typer.Argument(metavar="FAULT", help=f"One of {', '.join(TITLES)}. Default: asks; without a terminal, nan."),
    ] = None,
    no_ui: Annotated[bool, typer.Option("--no-ui", help="Do not open the dashboard at the end.")] = False,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Take a guided tour: break a training, diagnose it, repair it.

    Trains a small network with a fault of your choice (seconds on a CPU), diagnoses the run, shows the remedy, applies
    it, and trains again. On a terminal, the dashboard then opens with both runs side by side. Needs torch. The runs
    are kept in project "demo"; remove them with `sonde delete`.

    \b
    The faults:
      vanishing    gradients vanish on their way to the first layers
      exploding    gradients explode
      dead-relu    units are off for every input
      spike        the learning rate spikes
      nan          the loss becomes NaN
      overfitting  the model memorises the training rows
      attention    attention collapses onto single tokens

    \b
    Examples:
      sonde demo
      sonde demo vanishing
      sonde demo overfitting --no-ui
      sonde demo nan --json
    """
    from sonde.errors import UnknownNameError, UsageError

    if fault is not None and fault not in TITLES:
        raise UnknownNameError("fault", fault, TITLES)
    if find_spec("torch") is None:
        raise UsageError("the demo trains with PyTorch, which is not installed. Run:  pip install torch")
    is_guided = not json and sys.stdin.isatty() and sys.stdout.isatty()
    name = fault or (_ask() if is_guided else "nan")
    folder = runs_dir(dir)
    broken, repaired = _tour(name, folder, quiet=json)
    if json:
        print_json({"fault": name, "broken": _facts(broken), "repaired": _facts(repaired)})
    elif is_guided and not no_ui:
        _open_dashboard(folder, [broken, repaired])
    else:
        print(f"\nBoth runs side by side:  sonde ui{'' if dir is None else ' ' + plain(place(folder))}")


def _ask() -> str:
    print("Choose a fault to plant:\n")
    for number, (name, title) in enumerate(TITLES.items(), 1):
        print(f"  {number}  {name:<12} {title}")
    choice = typer.prompt("\nNumber or name", default="nan", err=True)
    names = list(TITLES)
    if choice.isdigit() and 1 <= int(choice) <= len(names):
        return names[int(choice) - 1]
    if choice in TITLES:
        return str(choice)
    from sonde.errors import UnknownNameError

    raise UnknownNameError("fault", choice, TITLES)


def _tour(name: str, folder: Path, *, quiet: bool) -> tuple[Run, Run]:
    """Train with the fault and without it; return both runs."""
    from sonde.demo.faults import FAULTS

    fault = FAULTS[name]
    _say(quiet, f"1  The fault: {TITLES[name]}", fault.story, f"  {fault.wrong}")
    broken = _train(fault, name, folder, is_repaired=False, quiet=quiet)
    _say(quiet, f"2  The diagnosis: sonde diagnose {broken.id}")
    _diagnose(broken, quiet=quiet)
    _say(quiet, "3  The remedy", f"- {fault.wrong}", f"+ {fault.right}")
    repaired = _train(fault, name, folder, is_repaired=True, quiet=quiet)
    _say(quiet, f"4  Trained again: sonde diagnose {repaired.id}")
    _diagnose(repaired, quiet=quiet)
    return broken, repaired


def _say(quiet: bool, title: str, *lines: str) -> None:
    if not quiet:
        from sonde.show.term.console import make_console

        console = make_console()
        console.print(f"\n{title}", style="bold", markup=False)
        for line in lines:
            console.print(line, markup=False, highlight=False)
        sys.stdout.flush()


def _train(fault: Fault, name: str, folder: Path, *, is_repaired: bool, quiet: bool) -> Run:
    from sonde.demo.training import train
    from sonde.run import open as open_run
    from sonde.show.term.progress import progress

    what = f"{name}-repaired" if is_repaired else name
    line = fault.right if is_repaired else fault.wrong
    with progress(f"training {what}", quiet=quiet) as advance:
        path = train(
            fault.training(is_repaired=is_repaired),
            name=what,
            dir=folder,
            config={"fault": "repaired" if is_repaired else name, "line": line},
            progress=lambda step, total, _: advance(step + 1, total),
        )
    return open_run(path)


def _diagnose(run: Run, *, quiet: bool) -> None:
    from sonde.cli.diagnose import draw

    if not quiet:
        draw(run, run.diagnosis(), unfold=False)


def _facts(run: Run) -> dict[str, Any]:
    from sonde.show.diagnosis import diagnosis_dict

    return {"path": str(run.path), **diagnosis_dict(run, run.diagnosis())}


def _open_dashboard(folder: Path, runs: list[Run]) -> None:
    from sonde.show.web.runs import run_key
    from sonde.show.web.server import Address, Dashboard, can_open_browser, opened_browser

    dashboard = Dashboard([folder], Address())
    ids = ",".join(run_key(run.path.resolve()) for run in runs)
    url = f"{dashboard.origin}/compare?ids={ids}#token={dashboard.access.token}"
    print(f"\nBoth runs side by side (Ctrl-C to stop):\n\n  {url}\n", flush=True)
    with opened_browser(url) if can_open_browser() else nullcontext():
        dashboard.serve()
    print("\nNext: your own training. Add  with sonde.watch(model, optimizer):  around its loop.")
