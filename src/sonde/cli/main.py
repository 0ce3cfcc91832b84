"""The `sonde` command: its verbs, a bare path as `show`, and every error as one line with the next step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Annotated, Final, NoReturn

import typer

from sonde.cli.analyze import analyze
from sonde.cli.anomalies import anomalies
from sonde.cli.checkpoints import checkpoints
from sonde.cli.compare import compare
from sonde.cli.delete import delete
from sonde.cli.diagnose import diagnose
from sonde.cli.doctor import doctor
from sonde.cli.export import export
from sonde.cli.flow import flow
from sonde.cli.hub import hub
from sonde.cli.info import info
from sonde.cli.list import list_runs
from sonde.cli.monitor import monitor
from sonde.cli.output import print_error
from sonde.cli.plot import plot
from sonde.cli.push import push
from sonde.cli.query import query
from sonde.cli.report import report
from sonde.cli.run import run
from sonde.cli.show import show
from sonde.cli.snapshot import snapshot
from sonde.cli.train import train
from sonde.cli.ui import ui
from sonde.cli.weights import weights
from sonde.errors import QueryError, RunNotFoundError, SondeError, UnknownNameError, UsageError, nearest

VERBS: Final[dict[str, Callable[..., None]]] = {
    "run": run,
    "flow": flow,
    "list": list_runs,
    "show": show,
    "diagnose": diagnose,
    "anomalies": anomalies,
    "compare": compare,
    "weights": weights,
    "query": query,
    "monitor": monitor,
    "report": report,
    "plot": plot,
    "export": export,
    "train": train,
    "analyze": analyze,
    "checkpoints": checkpoints,
    "ui": ui,
    "hub": hub,
    "delete": delete,
    "info": info,
    "snapshot": snapshot,
    "push": push,
    "doctor": doctor,
}

app = typer.Typer(
    name="sonde",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help comes up four times as fast
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="`sonde PATH` is short for `sonde show PATH`. A run is named by its folder, id, project/name, or latest.",
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"sonde {version('sonde')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; so does SONDE_DEBUG=1.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Say which version this is.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """See inside a neural network while it trains: record runs, diagnose them, compare them."""


for _name, _verb in VERBS.items():
    # What follows the script's name belongs to the script.
    app.command(_name, context_settings={"allow_interspersed_args": False} if _name == "run" else None)(_verb)


def with_verb(arguments: Sequence[str]) -> list[str]:
    """The arguments with `show` put in front of a bare path."""
    for position, argument in enumerate(arguments):
        if argument.startswith("-"):
            continue
        if argument in VERBS:
            break
        if any(not after.startswith("-") for after in arguments[position + 1 : position + 2]):
            raise UnknownNameError("verb", argument, VERBS)  # a path stands alone: this was to be one
        return [*arguments[:position], "show", *arguments[position:]]
    return list(arguments)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 for success, 1 for a negative answer, 2 for a wrong question."""
    given, wants_traceback = _take_debug(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode gets escapes, not a traceback
    try:
        app(args=with_verb(given), prog_name="sonde")
    except (SondeError, OSError) as error:
        if wants_traceback:
            raise
        print_error(_sentence(error, given))
        # To `compare --exit-code` 1 is an answer, "they differ"; that there is none must be told from it, as by diff.
        is_diff = given[:1] == ["compare"] and "--exit-code" in given
        sys.exit(2 if isinstance(error, UsageError | QueryError) or is_diff else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _take_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments without `--debug`, and whether it was there; behind `run` it may be the script's own."""
    end = arguments.index("run") if "run" in arguments else len(arguments)
    ours, rest = arguments[:end], arguments[end:]
    is_set = os.environ.get("SONDE_DEBUG", "").lower() not in ("", "0", "false", "no")
    return [*(argument for argument in ours if argument != "--debug"), *rest], is_set or "--debug" in ours


def _sentence(error: Exception, arguments: Sequence[str]) -> str:
    if isinstance(error, RunNotFoundError) and with_verb(arguments) != list(arguments):
        word = next(argument for argument in arguments if not argument.startswith("-"))
        verb = nearest(word, VERBS)
        return f"{error}{verb.replace('?', ', the verb?')}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return str(error) or type(error).__name__


if __name__ == "__main__":
    main()
