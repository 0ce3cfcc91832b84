"""The table that `Run` returns: a pyarrow.Table that shows itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from sonde.display import html_of, load_view
from sonde.errors import MissingPackageError
from sonde.read.text import table_text


class Table:
    """A table with the methods of a `pyarrow.Table`, which is its `arrow`; it shows itself in notebooks and terminals.

        run.stats("grad/*/norm").to_pandas()
        run.scalars("loss").plot()

    Methods of pyarrow that return a table return a `Table`. Libraries that accept Arrow data accept it as it is; a
    function that insists on a pyarrow.Table takes `table.arrow`.
    """

    __slots__ = ("arrow",)
    __hash__ = None  # type: ignore[assignment]  # as in pyarrow

    arrow: pa.Table
    """The same data as a pyarrow.Table."""

    def __init__(self, arrow: pa.Table) -> None:
        self.arrow = arrow

    # ---------------------------------------------------------------------------------------------------- as in pyarrow

    @property
    def num_rows(self) -> int:
        return int(self.arrow.num_rows)

    @property
    def num_columns(self) -> int:
        return int(self.arrow.num_columns)

    @property
    def column_names(self) -> list[str]:
        return list(self.arrow.column_names)

    def __getattr__(self, name: str) -> Any:
        if name == "arrow" or (name.startswith("__") and name != "__dataframe__"):  # while it is unpickled or copied
            raise AttributeError(name)
        found = getattr(self.arrow, name)
        return _returning_tables(found) if callable(found) else found

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *(name for name in dir(self.arrow) if not name.startswith("_"))})

    def __getitem__(self, key: Any) -> Any:
        """A column by name or number, as a ChunkedArray; some rows by a slice, as a `Table`."""
        return _wrapped(self.arrow[key])

    def __len__(self) -> int:
        return self.num_rows

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table | pa.Table):
            return NotImplemented
        return bool(self.arrow.equals(_unwrapped(other)))

    def __reduce__(self) -> tuple[type[Table], tuple[pa.Table]]:
        return Table, (self.arrow,)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.arrow.__arrow_c_stream__(requested_schema)

    def __array__(self, *args: Any, **keywords: Any) -> Any:
        return self.arrow.__array__(*args, **keywords)

    # ---------------------------------------------------------------------------------------------------- other formats

    def to_pylist(self) -> list[dict[str, Any]]:
        """The rows as dictionaries."""
        return list(self.arrow.to_pylist())

    def to_pandas(self, **options: Any) -> Any:
        """The table as a pandas DataFrame; options as for `pyarrow.Table.to_pandas`."""
        _require("pandas", "to_pandas")
        return self.arrow.to_pandas(**options)

    def to_polars(self) -> Any:
        """The table as a Polars DataFrame."""
        _require("polars", "to_polars")
        import polars as pl

        return pl.from_arrow(self.arrow)

    # ---------------------------------------------------------------------------------------------------------- showing

    def plot(self, **options: Any) -> Any:
        """Draw the columns of numbers over the step with matplotlib, one line per series; at most twelve.

            run.stats("grad/*/norm").plot(log=True).savefig("gradients.svg")

        Options: `log`, `title`, `size` in inches. `run.plot` draws any number of sites, as a heatmap.
        """
        return load_view("plot_table")(self, **options)

    def __repr__(self) -> str:
        return table_text(self.arrow)

    def _repr_html_(self) -> str:
        return html_of(self)


def _require(package: str, method: str) -> None:
    if find_spec(package) is None:
        raise MissingPackageError(package, package, f"{method}()")


def _wrapped(result: Any) -> Any:
    return Table(result) if isinstance(result, pa.Table) else result


def _unwrapped(value: Any) -> Any:
    return value.arrow if isinstance(value, Table) else value


def _returning_tables(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of pyarrow that takes and returns a `Table` in place of a pyarrow.Table."""

    @wraps(method)
    def call(*args: Any, **keywords: Any) -> Any:
        given = {key: _unwrapped(value) for key, value in keywords.items()}
        return _wrapped(method(*map(_unwrapped, args), **given))

    return call
