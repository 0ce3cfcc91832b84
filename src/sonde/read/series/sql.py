"""SQL over a run, in memory and read-only. A query cannot reach a file, setting, extension or Python variable."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from sonde.errors import MissingPackageError, QueryError, UsageError, nearest
from sonde.read.run.state import RunState
from sonde.read.series.views import VIEWS, View

if TYPE_CHECKING:
    import duckdb

DEFAULT_LIMIT: Final = 10_000
TIMEOUT_S: Final = 120.0
GRACE_S: Final = 5.0
"""How long an interrupted query may take to stop."""
THREAD_NAME: Final = "sonde-sql"
TRUNCATED: Final = b"sonde.truncated"
"""Key in the metadata of a result that was cut to the limit."""

_WORD: Final = re.compile(r"\w+")
_COUNT_ALL: Final = re.compile(r"count\s*\(\s*\*\s*\)", re.IGNORECASE)
_UNKNOWN_TABLE: Final = re.compile(r"Table with name (.+?) does not exist")
_UNKNOWN_COLUMN: Final = re.compile(
    r'Referenced column "(.+?)" (?:was )?not found|does not have a column named "(.+?)"'
)
_BEFORE: Final = {"temp_directory": "", "autoinstall_known_extensions": "false"}
_SETTINGS: Final = (
    "enable_external_access = false",
    "autoload_known_extensions = false",
    "allow_community_extensions = false",
    "python_enable_replacements = false",
    "disabled_filesystems = 'LocalFileSystem'",
    "lock_configuration = true",
)


def run_query(state: RunState, query: str, limit: int = DEFAULT_LIMIT, timeout_s: float = TIMEOUT_S) -> pa.Table:
    """Run one SELECT; the result is cut to `limit` rows."""
    if limit < 1:
        raise UsageError(f"invalid limit {limit}: it must be at least 1.")
    try:
        import duckdb
    except ImportError as error:
        raise MissingPackageError("duckdb", "all", "querying a run with SQL") from error
    views = _mentioned(query)
    connection = duckdb.connect(":memory:", config=dict(_BEFORE))
    work = _Work(partial(_run, connection, state, query, limit, views), name=THREAD_NAME)

    def interrupt() -> None:
        with suppress(duckdb.Error):  # it has just finished, and its connection is closed
            connection.interrupt()

    try:
        return work.result(timeout_s, interrupt)
    except duckdb.InterruptException as error:
        raise QueryError(f"the query was stopped after {timeout_s:g} s. Select fewer columns or steps.") from error
    except duckdb.Error as error:
        raise QueryError(_explain(str(error), views)) from error


def _run(connection: duckdb.DuckDBPyConnection, state: RunState, query: str, limit: int, views: list[View]) -> pa.Table:
    with connection:
        for setting in _SETTINGS:
            connection.execute(f"set {setting}")
        _check_statement(connection, query)
        for view in views:
            connection.register(view.name, view.load(state, _columns(query, view)))
        return _answer(connection, query, limit)


class _Work:
    """A function call in a thread that can be given up: DuckDB cannot interrupt a single huge function call."""

    def __init__(self, work: Callable[[], pa.Table], name: str) -> None:
        self._future: Future[pa.Table] = Future()
        self._work = work
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._future.set_result(self._work())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._future.set_exception(error)

    def result(self, timeout_s: float, interrupt: Callable[[], None]) -> pa.Table:
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            interrupt()
        except KeyboardInterrupt:
            interrupt()
            raise
        try:
            return self._future.result(GRACE_S)
        except TimeoutError:
            raise QueryError(
                f"the query did not stop after {timeout_s:g} s: it is inside one long function call, which continues "
                "in the background until it is done or the process ends. Make its arguments smaller."
            ) from None


def _check_statement(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Check that the query is one read-only statement."""
    statements = connection.extract_statements(query)
    if len(statements) != 1:
        found = "none" if not statements else f"{len(statements)} statements"
        raise QueryError(f"a query must be one SELECT statement; got {found}.")
    kind = statements[0].type.name
    if kind != "SELECT":
        raise QueryError(f"only SELECT is allowed, because a query never changes a run; got {kind}.")


def _answer(connection: duckdb.DuckDBPyConnection, query: str, limit: int) -> pa.Table:
    table = connection.sql(query).limit(limit + 1).to_arrow_table()
    if table.num_rows <= limit:
        return table
    return table.slice(0, limit).replace_schema_metadata({**(table.schema.metadata or {}), TRUNCATED: b"true"})


def _words(query: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(query)}


def _mentioned(query: str) -> list[View]:
    words = _words(query)
    return [view for name, view in VIEWS.items() if name in words]


def _columns(query: str, view: View) -> set[str]:
    """The columns that a query may need: those it names, or all if it may refer to all."""
    words = _words(query)
    names_all = (
        "*" in _COUNT_ALL.sub("", query) or "select" not in words or words & {"columns", "summarize", "describe"}
    )
    known = set(view.columns)
    return (known if names_all else known & words) | (view.old_columns.keys() & words)


def _explain(message: str, views: list[View]) -> str:
    """The first line of DuckDB's message, with our closest name instead of one from its own catalog."""
    first = message.strip().splitlines()[0]
    table = _UNKNOWN_TABLE.search(message)
    if table:
        name = table.group(1)
        return f'no table "{name}".{nearest(name.lower(), VIEWS)} Tables: {", ".join(VIEWS)}.'
    column = _UNKNOWN_COLUMN.search(message)
    if column:
        name = column.group(1) or column.group(2)
        known: dict[str, Any] = {known: None for view in views for known in view.columns}
        return f'no column "{name}".{nearest(name.lower(), known)} Columns: {", ".join(known)}.'
    if "disabled" in first or "Permission" in first:
        return f"a query can read only the tables of its run ({', '.join(VIEWS)}), not files. DuckDB says: {first}"
    return re.sub(r"^(?:Parser|Binder|Catalog|Syntax) Error: ", "invalid SQL: ", first)
