"""Reading and checking of model.json, the structure of the model. A run without a valid one can still be read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sonde.errors import CorruptError
from sonde.read.run.folder import open_inside
from sonde.read.run.state import RunState
from sonde.schema.layout import MODEL_FILE
from sonde.schema.records import check_document

MAX_BYTES: Final = 256 << 20


def read_structure(state: RunState) -> Mapping[str, Any]:
    """The document; empty if there is none. Damage is added to the run's warnings."""
    try:
        found = structure_of(state.run)
    except CorruptError as error:
        state.damage[MODEL_FILE] = str(error)
        return {}
    state.damage.pop(MODEL_FILE, None)
    return found


def structure_of(run: Path) -> dict[str, Any]:
    """The document of a run folder; damage raises an error."""
    try:
        with open_inside(run, MODEL_FILE) as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CorruptError(f"cannot read {MODEL_FILE}: {error.strerror}.") from error
    if len(text) > MAX_BYTES:
        raise CorruptError(f"{MODEL_FILE} is larger than {MAX_BYTES >> 20} MiB, so it is not read.")
    if not check_document(text):
        raise CorruptError(f"{MODEL_FILE} is damaged: its checksum does not match. The structure is not shown.")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{MODEL_FILE} is damaged ({error}). The structure is not shown.") from error
    if not isinstance(document, dict) or not all(_is_list(document, key) for key in ("modules", "parameters")):
        raise CorruptError(f"{MODEL_FILE} does not describe a model.")
    document.pop("crc32", None)
    return document


def _is_list(document: Mapping[str, Any], key: str) -> bool:
    """Whether the value is absent or a list of objects, so that readers need not check each member."""
    value = document.get(key, [])
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
