"""What can be known to be wrong with a configuration before anything is imported or loaded."""

from __future__ import annotations

from sonde.errors import UsageError
from sonde.tune.config import TuneConfig
from sonde.tune.methods import check_name


def check_ahead(config: TuneConfig) -> None:
    """The method has a name that is known, and the files with texts are there."""
    check_name(config.method.name)
    data = config.data
    for key, path in (("path", data.path), ("eval_path", data.eval_path), ("retained_path", data.retained_path)):
        if path is not None and not path.exists():
            raise UsageError(f"data.{key}: no file {path}, seen from {path.cwd()}.")
