"""SQL over a run, in memory and read-only. A query cannot reach a file, setting, extension or Python variable."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from sonde.errors import MissingPackageError, QueryError, UsageError, nearest
from sonde.read.run.state import RunState
from sonde.read.series.views import VIEWS, View

if TYPE_CHECKING:
    import duckdb

DEFAULT_LIMIT: Final = 10_000
TIMEOUT_S: Final = 120.0
TRUNCATED: Final = b"sonde.truncated"
"""In the metadata of an answer that has more rows than the limit."""

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
    """The answer to one SELECT, cut to `limit` rows."""
    if limit < 1:
        raise UsageError(f"limit={limit} leaves no rows; give 1 or more.")
    try:
        import duckdb
    except ImportError as error:
        raise MissingPackageError("duckdb", "all", "SQL over a run") from error
    views = _mentioned(query)
    with duckdb.connect(":memory:", config=dict(_BEFORE)) as connection:
        for setting in _SETTINGS:
            connection.execute(f"set {setting}")
        try:
            _check_statement(connection, query)
            for view in views:
                connection.register(view.name, view.load(state, _columns(query, view)))
            return _answer(connection, query, limit, timeout_s)
        except duckdb.InterruptException as error:
            raise QueryError(
                f"the query was stopped after {timeout_s:g} s. Ask for less, or for fewer steps."
            ) from error
        except duckdb.Error as error:
            raise QueryError(_explain(str(error), views)) from error


def _check_statement(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """One statement that only reads."""
    statements = connection.extract_statements(query)
    if len(statements) != 1:
        raise QueryError(f"one SELECT is expected; this is {len(statements)} statements.")
    kind = statements[0].type.name
    if kind != "SELECT":
        raise QueryError(f"only SELECT is allowed: a run is never changed by a query, and this is {kind}.")


def _answer(connection: duckdb.DuckDBPyConnection, query: str, limit: int, timeout_s: float) -> pa.Table:
    stop = threading.Timer(timeout_s, connection.interrupt)
    stop.start()
    try:
        table = connection.sql(query).limit(limit + 1).to_arrow_table()
    finally:
        stop.cancel()
    if table.num_rows <= limit:
        return table
    return table.slice(0, limit).replace_schema_metadata({**(table.schema.metadata or {}), TRUNCATED: b"true"})


def _words(query: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(query)}


def _mentioned(query: str) -> list[View]:
    words = _words(query)
    return [view for name, view in VIEWS.items() if name in words]


def _columns(query: str, view: View) -> set[str]:
    """The columns a query may need: those it names, or all when it may mean all."""
    words = _words(query)
    names_all = (
        "*" in _COUNT_ALL.sub("", query) or "select" not in words or words & {"columns", "summarize", "describe"}
    )
    known = set(view.columns)
    return (known if names_all else known & words) | (view.old_columns.keys() & words)


def _explain(message: str, views: list[View]) -> str:
    """DuckDB's first line, with our nearest name in place of one from its own catalog."""
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
        return f"a query sees only the tables of its run ({', '.join(VIEWS)}), no files. DuckDB says: {first}"
    return first
