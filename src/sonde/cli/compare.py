"""`sonde compare A B`: compare two runs (config, scalars, first divergence) or two sets of weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from sonde.cli.options import Dir, Json, open_run
from sonde.cli.output import print_json, remark
from sonde.errors import UsageError
from sonde.show.term.number import count, number
from sonde.show.term.text import plain

if TYPE_CHECKING:
    from rich.console import Console

    from sonde.run import LazyTensors, Run

_DIVERGENCE_KEYS: Final = ("a", "b", "first_divergence", "num_steps", "tolerance")


def compare(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="A run (folder, id, project/name, latest), RUN@STEP, or a weights file."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another run, RUN@STEP or weights file.")],
    top: Annotated[int, typer.Option("--top", min=1, help="Number of series, tensors or layers to show.")] = 20,
    divergence: Annotated[
        bool, typer.Option("--divergence", help="Show only the first step and site where they differ beyond rounding.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0.0,
            help="Relative difference to ignore. Default: from the dtype for runs, 0 for weights.",
        ),
    ] = None,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help="Exit with 0 if they are the same, 1 if they differ and 2 on errors, like diff, and say why.",
        ),
    ] = False,
    kind: Annotated[
        str, typer.Option("--kind", help="Kind of tensors to read from RUN@STEP: param, grad, act, optim, …")
    ] = "param",
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Compare two runs or two sets of weights.

    For runs: config values that differ, last values of scalars, and the first step at which each series differs.
    For weights (.safetensors, .pt, .bin, .npz, .h5, .keras, folders of shards, RUN@STEP, RUN@latest): tensors that
    were added, removed, reshaped or changed, per tensor, per layer and in total. Pickles are read without executing
    them. Layers of PyTorch, Keras and Flax models are matched by shape and transposed where needed.

    With --exit-code, runs differ if a config value differs, if a series differs beyond the tolerance, or if a series
    is in only one of them; with --divergence, only the second counts. Weights differ if a tensor was added, removed,
    reshaped, converted to another dtype, or changed beyond the tolerance.

    \b
    Examples:
      sonde compare gpt/baseline gpt/warmup
      sonde compare before.safetensors after.safetensors --exit-code
      sonde compare gpt/baseline@500 gpt/baseline@latest
      sonde compare float32.safetensors bfloat16.safetensors --tolerance 0.01
      sonde compare 3f2a9c01 latest --json
      sonde compare eager compiled --divergence
      sonde compare latest@attempt=0 latest@attempt=1
      sonde compare before after --exit-code || echo "the numbers have changed"
    """
    sides = _find_weights(a, b, dir=dir, kind=kind)
    if sides is not None:
        if divergence:
            raise UsageError("--divergence compares two runs, and weights have no steps. Leave it out.")
        _compare_weights(*sides, top=top, tolerance=tolerance, json=json, exit_code=exit_code)
        return
    from sonde.run import compare as compare_runs

    first, second = open_run(a, dir), open_run(b, dir)
    found = compare_runs(first, second, tolerance=tolerance)
    if json:
        facts = _as_json(first, second, found)
        print_json({key: facts[key] for key in _DIVERGENCE_KEYS} if divergence else facts)
    elif divergence:
        _show_divergence(first, second, found)
    else:
        _show(first, second, found, top)
    if exit_code:
        _exit(_differences(found, only_divergence=divergence), f"within a relative {found.tolerance:g}")


def _exit(reasons: list[str], same: str) -> NoReturn:
    """Exit as --exit-code asks for, and say on stderr what decided it."""
    remark(f"Exit code 1: {'; '.join(reasons)}." if reasons else f"Exit code 0: no difference {same}.")
    raise typer.Exit(1 if reasons else 0)


def _differences(found: Any, *, only_divergence: bool) -> list[str]:
    """Each way in which two runs differ, in words."""
    num_apart = sum(row["step"] is not None for row in found.divergence.to_pylist())
    first = found.first_divergence
    series = [] if first is None else [f"{_differ(num_apart, 'series', 'series')}, the first at step {first.step}"]
    if only_divergence:
        return series
    config = [_differ(found.config.num_rows, "config value", "config values")] if found.config.num_rows else []
    alone = [
        f"{len(names)} series only in {letter}" for letter, names in (("a", found.only_a), ("b", found.only_b)) if names
    ]
    return [*config, *series, *alone]


def _differ(number: int, one: str, many: str) -> str:
    return f"{number} {one} differs" if number == 1 else f"{number} {many} differ"


def _find_weights(a: str, b: str, *, dir: Path | None, kind: str) -> tuple[LazyTensors, LazyTensors] | None:
    """Two sets of weights if at least one name refers to weights; a plain run then means its last snapshot."""
    from sonde.cli.options import runs_dir
    from sonde.run import open_weights, weights_of

    ours, theirs = (open_weights(name, dir=runs_dir(dir), kind=kind) for name in (a, b))
    if ours is None and theirs is None:
        return None
    return (
        ours if ours is not None else weights_of(open_run(a, dir), kind),
        theirs if theirs is not None else weights_of(open_run(b, dir), kind),
    )


def _compare_weights(
    ours: LazyTensors, theirs: LazyTensors, *, top: int, tolerance: float | None, json: bool, exit_code: bool
) -> None:
    from sonde.run import compare_weights
    from sonde.show.term.progress import progress
    from sonde.show.weights import weights_as_json, weights_as_rich, what_differs

    with progress("tensors", quiet=json) as advance:
        compared = compare_weights(ours, theirs, advance, tolerance=tolerance)
    if json:
        print_json(weights_as_json(compared))
    else:
        from sonde.show.term.console import make_console

        make_console().print(weights_as_rich(compared, top))
    if exit_code:
        same = f"within a relative {compared.tolerance:g}" if compared.tolerance else "in any tensor"
        _exit([", ".join(what_differs(compared))] if not compared.is_same else [], same)


def _as_json(a: Run, b: Run, found: Any) -> dict[str, Any]:
    return {
        "a": {"id": a.id, "path": str(a.path), "status": a.status, "last_step": a.last_step},
        "b": {"id": b.id, "path": str(b.path), "status": b.status, "last_step": b.last_step},
        "config": found.config.to_pylist(),
        "metrics": found.metrics.to_pylist(),
        "divergence": found.divergence.to_pylist(),
        "first_divergence": None if found.first_divergence is None else found.first_divergence.as_dict(),
        "num_steps": found.num_steps,
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "tolerance": found.tolerance,
    }


def _show_divergence(a: Run, b: Run, found: Any) -> None:
    from sonde.show.divergence import divergence_sentences
    from sonde.show.term.console import make_console

    console = make_console()
    _draw_heads(console, a, b)
    console.print()
    first, *rest = divergence_sentences(found)
    console.print(plain(first), style="bold")
    for sentence in rest:
        console.print(plain(sentence))
    if found.first_divergence is not None:
        for run in (a, b):
            console.print(f"next:  sonde show {plain(run.id)} --at {found.first_divergence.step}", style="dim")


def _show(a: Run, b: Run, found: Any, top: int) -> None:
    from sonde.show.term.console import make_console

    console = make_console()
    _draw_heads(console, a, b)
    _draw(
        console,
        "config",
        [(row["key"], *("–" if row[side] is None else row[side] for side in "ab")) for row in found.config.to_pylist()],
    )
    metrics = [
        (row["name"], number(row["last_a"]), number(row["last_b"]), number(row["difference"]))
        for row in found.metrics.to_pylist()
    ]
    _draw(console, "scalar, last value", metrics, "b - a")
    rows = [row for row in found.divergence.to_pylist() if row["step"] is not None]
    _draw(
        console,
        "first divergence",
        [(row["series"], number(row["a"]), number(row["b"]), row["step"]) for row in rows[:top]],
        "step",
    )
    console.print()
    _draw_verdict(console, found, len(rows), top)


def _draw_heads(console: Console, a: Run, b: Run) -> None:
    from sonde.show.term.table import Column, status_text, table

    columns = [Column(title, cut=title == "run") for title in ("", "run", "id", "status")] + [
        Column("steps", right=True)
    ]
    rows = [
        (letter, f"{run.project}/{run.name}", run.id, status_text(run.status), count(run.last_step + 1))
        for letter, run in (("a", a), ("b", b))
    ]
    console.print(table(columns, rows))


def _draw(console: Console, title: str, rows: list[tuple[Any, ...]], last: str = "") -> None:
    from sonde.show.term.table import Column, table

    if not rows:
        return
    columns = [Column(title, cut=True), *(Column(letter, right=True, cut=True) for letter in "ab")]
    console.print()
    console.print(table(columns + ([Column(last, right=True)] if last else []), rows))


def _draw_verdict(console: Console, found: Any, num_apart: int, top: int) -> None:
    total = found.divergence.num_rows
    if num_apart > top:
        console.print(
            f"Not shown: {num_apart - top} more series that differ; show all with --top {num_apart}.", style="dim"
        )
    for letter, names in (("a", found.only_a), ("b", found.only_b)):
        if names:
            console.print(f"{len(names)} series only in {letter}.", style="dim")
    if num_apart:
        first = f", the first at step {found.first_divergence.step}" if found.first_divergence else ""
        console.print(
            f"{num_apart} of {total} common series {'differs' if num_apart == 1 else 'differ'}{first}. "
            "To see where, add --divergence."
        )
    elif total:
        console.print(f"All {total} common series agree to within a relative {found.tolerance:g}.")
    else:
        console.print("The runs have no series in common.")
