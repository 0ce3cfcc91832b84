"""Optional packages, imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sonde.errors import MissingPackageError


def require(module: str, extra: str, purpose: str) -> Any:
    """The module; if its package is missing, an error that names the extra that installs it."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0].replace("google_crc32c", "google-crc32c")
        raise MissingPackageError(package, extra, purpose) from None
