"""Checks of a configuration that need no imports and load nothing."""

from __future__ import annotations

from sonde.errors import UsageError
from sonde.tune.config import TuneConfig
from sonde.tune.methods import check_name


def check_ahead(config: TuneConfig) -> None:
    """Check that the method is known and the files with texts exist."""
    check_name(config.method.name)
    data = config.data
    for key, path in (("path", data.path), ("eval_path", data.eval_path), ("retained_path", data.retained_path)):
        if path is not None and not path.exists():
            raise UsageError(f"data.{key}: no file {path} (relative to {path.cwd()}).")
