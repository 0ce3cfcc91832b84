"""The `sonde` command: dispatches verbs, treats a bare path as `show`, and prints each error as one line."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from io import TextIOWrapper
from typing import Annotated, Any, ClassVar, Final, NoReturn, cast

import typer

from sonde.cli.aliases import ALIASES
from sonde.cli.checkpoints import checkpoints
from sonde.cli.compare import compare
from sonde.cli.delete import delete
from sonde.cli.demo import demo
from sonde.cli.diagnose import diagnose
from sonde.cli.doctor import doctor
from sonde.cli.explain import explain
from sonde.cli.export import export
from sonde.cli.flow import flow
from sonde.cli.help import Verb, Verbs
from sonde.cli.hub import hub
from sonde.cli.list import list_runs
from sonde.cli.monitor import monitor
from sonde.cli.output import click_message, in_options, print_error
from sonde.cli.plot import plot
from sonde.cli.query import query
from sonde.cli.report import report
from sonde.cli.run import run
from sonde.cli.show import show
from sonde.cli.snapshot import snapshot
from sonde.cli.train import train
from sonde.cli.ui import ui
from sonde.errors import QueryError, RunNotFoundError, SondeError, UsageError, nearest

GROUPS: Final[dict[str, dict[str, Callable[..., None]]]] = {
    "Start here": {"demo": demo},
    "Record": {"run": run, "train": train, "snapshot": snapshot},
    "View runs": {"list": list_runs, "show": show, "ui": ui, "monitor": monitor, "query": query},
    "Find problems": {"diagnose": diagnose, "explain": explain, "compare": compare, "flow": flow},
    "Export and share": {"report": report, "plot": plot, "export": export, "hub": hub},
    "Manage": {"checkpoints": checkpoints, "delete": delete, "doctor": doctor},
}
"""Every verb, by what a user wants, in the order of the help."""
VERBS: Final = {name: verb for group in GROUPS.values() for name, verb in group.items()}

_ClickUsageError: Final = cast(type[Exception], typer.BadParameter.__base__)
"""The base of all errors of a command line; recent versions of typer have their own copy of click."""


class _Sonde(Verbs):
    groups: ClassVar[Mapping[str, Sequence[str]]] = {title: tuple(group) for title, group in GROUPS.items()}


app = typer.Typer(
    name="sonde",
    cls=_Sonde,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help starts four times as fast
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="`sonde RUN` is `sonde show RUN`. RUN is a folder, an id, project/name or `latest`.",
)


def _version(asked: bool) -> None:
    if asked:
        from sonde.distribution import version

        print(f"sonde {version()}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the full traceback of an error (or set SONDE_DEBUG=1).")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """See inside a neural network while it trains."""


for _name, _verb in (VERBS | ALIASES).items():
    # Everything after the script's name belongs to the script.
    _settings = {"allow_interspersed_args": False} if _name == "run" else None
    app.command(_name, cls=Verb, context_settings=_settings, hidden=_name in ALIASES)(_verb)


def with_verb(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with `show` inserted before a bare path; `help VERB` is `VERB --help`."""
    if arguments[:1] == ["help"] and all(verb in VERBS for verb in arguments[1:2]):
        return [*arguments[1:2], "--help"]
    for position, argument in enumerate(arguments):
        if argument.startswith("-"):
            continue
        if argument in VERBS or argument in ALIASES:
            break
        if any(not after.startswith("-") for after in arguments[position + 1 : position + 2]):
            raise _unknown_verb(argument)  # a path takes no argument: this was meant as a verb
        return [*arguments[:position], "show", *arguments[position:]]
    return list(arguments)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 for success, 1 for a negative result or failure, 2 for wrong usage."""
    given, wants_traceback = _take_debug(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode gets escapes, not a traceback
    try:
        code = app(args=with_verb(given) or ["--help"], prog_name="sonde", standalone_mode=False)
    except typer.Abort:
        code = 1
    except (SondeError, OSError, _ClickUsageError) as error:
        if wants_traceback:
            raise
        error = _as_unknown_verb(error, given)
        print_error(_sentence(error, given))
        code = _exit_code(error, given)
    _leave_running_query(code or 0)
    sys.exit(code or 0)


def _leave_running_query(code: int) -> None:
    """A query that cannot be interrupted would delay the end of the process, or be torn down in the middle."""
    queries = sys.modules.get("sonde.read.series.sql")  # not imported where nothing was queried
    if queries and any(thread.name == queries.THREAD_NAME for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _exit_code(error: Exception, arguments: Sequence[str]) -> int:
    # With `compare --exit-code`, 1 means "they differ"; like diff, an error must exit with another code.
    is_diff = arguments[:1] == ["compare"] and "--exit-code" in arguments
    return 2 if isinstance(error, UsageError | QueryError | _ClickUsageError) or is_diff else 1


def _take_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Remove `--debug` and say whether it was given; after `run` it may belong to the script."""
    end = arguments.index("run") if "run" in arguments else len(arguments)
    ours, rest = arguments[:end], arguments[end:]
    is_set = os.environ.get("SONDE_DEBUG", "").lower() not in ("", "0", "false", "no")
    return [*(argument for argument in ours if argument != "--debug"), *rest], is_set or "--debug" in ours


def _word(arguments: Sequence[str]) -> str:
    """The verb, or what was given in its place."""
    return next((argument for argument in arguments if not argument.startswith("-")), "")


def _as_unknown_verb(error: Exception, arguments: Sequence[str]) -> Exception:
    """The error of a mistyped verb in place of the error that there is no run of that name."""
    word = _word(arguments)
    is_verb = word in VERBS or word in ALIASES
    if is_verb or not isinstance(error, RunNotFoundError) or not nearest(word, VERBS):
        return error
    return _unknown_verb(word)


def _unknown_verb(word: str) -> UsageError:
    return UsageError(f'no command "{word}".{nearest(word, VERBS)} See  sonde --help')


def _sentence(error: Exception, arguments: Sequence[str]) -> str:
    if isinstance(error, _ClickUsageError):
        word = _word(arguments)
        return click_message(error, word if word in VERBS or word in ALIASES else "")
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return in_options(str(error) or type(error).__name__, _options(_word(arguments)))


def _options(word: str) -> dict[str, str]:
    """The long option of every parameter of a verb, by the name that Python gives it."""
    commands: Any = cast(Any, typer.main.get_command(app)).commands
    verb = commands.get(word, commands["show"])  # a bare path
    options = [param for param in verb.params if param.param_type_name == "option"]
    return {param.name: next((o for o in param.opts if o.startswith("--")), param.opts[0]) for param in options}


if __name__ == "__main__":
    main()
