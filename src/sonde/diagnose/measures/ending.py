"""How a run ended: by an exception, without memory, killed, on a full disk, or interrupted; and the memory it used."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any, Final

import numpy as np

from sonde.diagnose.measures.model import structure
from sonde.schema.window import Window, noted

_OUT_OF_MEMORY: Final = re.compile(
    r"out of memory|OutOfMemory|MemoryError|can't allocate memory|not enough memory|RESOURCE_EXHAUSTED", re.IGNORECASE
)
_DISK_FULL: Final = re.compile(r"No space left on device|Disk quota exceeded|disk is full|ENOSPC|EDQUOT", re.IGNORECASE)
_ASKED: Final = re.compile(r"[Tt]ried to allocate ([\d.,]+ ?(?:bytes|[KMGT]i?B))")
MIB: Final = 1 << 20
MAX_REASON: Final = 160


class Kind(Enum):
    """What ended a run."""

    ERROR = "an exception or an exit code"
    MEMORY = "no memory left"
    KILLED = "the process disappeared"
    DISK = "no space left"
    STOPPED = "an interruption"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a run that did not finish."""

    kind: Kind
    step: int
    """The last recorded step; 0 if there is none."""
    reason: str
    """One line, without a full stop at its end: `ValueError: bad shape`, `SIGTERM (exit code 143)`."""
    place: str = ""
    """The user's line that raised: "train.py, line 12, in fit"; empty if unknown."""
    traceback: str = ""
    asked: str = ""
    """The allocation that failed, as the error says: "20.00 MiB"."""
    gpu_mib: Mapping[str, float] | None = None
    """Memory of the GPU when the exception left the program: allocated, reserved, peak."""

    @property
    def when(self) -> str:
        """When it ended, as a phrase."""
        return f"after step {self.step:,}"


@noted
def ending(window: Window) -> Ending | None:
    """How the run ended; None if it finished or is still running."""
    status, reason = window.facts.get("status"), str(window.facts.get("reason") or "")
    if status not in ("crashed", "interrupted"):
        return None
    error = window.facts.get("error")
    known: Mapping[str, Any] = error if isinstance(error, Mapping) else {}
    said = f"{known.get('type')}: {known.get('message')}" if known else ""
    if reason and not said.startswith(reason[:MAX_REASON]):  # of an earlier session of this run
        known, said = {}, ""
    text = said or reason
    asked = _ASKED.search(text)
    return Ending(
        _kind(window, text, known),
        max(window.last_step, 0),
        _first_line(text),
        place=_place(known),
        traceback=str(known.get("traceback") or ""),
        asked=_size(asked[1]) if asked else "",
        gpu_mib=known.get("gpu_mib") or None,
    )


def _kind(window: Window, text: str, error: Mapping[str, Any]) -> Kind:
    if window.facts.get("is_lost") or "SIGKILL" in text:
        return Kind.KILLED
    if error.get("errno") in (errno.ENOSPC, errno.EDQUOT) or is_disk_full(text):
        return Kind.DISK
    if _OUT_OF_MEMORY.search(text):
        return Kind.MEMORY
    return Kind.STOPPED if window.facts.get("status") == "interrupted" else Kind.ERROR


def is_disk_full(text: str) -> bool:
    """Whether an error message says that no space was left."""
    return _DISK_FULL.search(text) is not None


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    short = line if len(line) <= MAX_REASON else f"{line[:MAX_REASON].rstrip()}…"
    return short.rstrip(". ").replace("`", "'")


def _size(text: str) -> str:
    """
    >>> _size("4503599627370496 bytes"), _size("20.00 MiB")
    ('4,194,304 GiB', '20.00 MiB')
    """
    count, _, unit = text.partition(" ")
    if unit != "bytes":
        return text
    size = float(count.replace(",", ""))
    return f"{size / (1 << 30):,.0f} GiB" if size >= 1 << 30 else f"{size / MIB:,.0f} MiB"


def _place(error: Mapping[str, Any]) -> str:
    if not error.get("file"):
        return ""
    function = error.get("function")
    inside = f", in {function}" if function and function != "<module>" else ""
    return f"{error['file']}, line {error.get('line')}{inside}"


@noted
def memory_by_use(window: Window) -> dict[str, float]:
    """MiB of what the model is known to need, largest first: parameters, gradients, optimizer state, activations.

    Activations are the recorded outputs of modules: autograd keeps most of them until the backward pass.
    """
    dtypes: Mapping[str, str] = window.facts.get("dtypes") or {}
    shapes: Mapping[str, Any] = window.facts.get("shapes") or {}
    parameters = structure(window).parameters
    sizes = {p.name: prod(p.shape) * _itemsize(dtypes.get(f"param/{p.name}", "")) for p in parameters}
    trained = sum(sizes[p.name] for p in parameters if p.trainable)
    uses = {"parameters": sum(sizes.values()), "gradients": trained}
    for label, kind in (("optimizer state", "optim"), ("activations", "act")):
        uses[label] = sum(
            prod(shape) * _itemsize(dtypes.get(site, ""))
            for site, shape in shapes.items()
            if site.startswith(f"{kind}/")
        )
    known = {name: size / MIB for name, size in uses.items() if size}
    return dict(sorted(known.items(), key=lambda item: -item[1]))


def largest_activations(window: Window, num: int = 3) -> list[tuple[str, float]]:
    """The modules with the largest recorded outputs, and their size in MiB."""
    dtypes: Mapping[str, str] = window.facts.get("dtypes") or {}
    shapes: Mapping[str, Any] = window.facts.get("shapes") or {}
    sizes = {
        site.removeprefix("act/"): prod(shape) * _itemsize(dtypes.get(site, "")) / MIB
        for site, shape in shapes.items()
        if site.startswith("act/")
    }
    return sorted(sizes.items(), key=lambda item: -item[1])[:num]


def _itemsize(dtype: str) -> int:
    """Bytes of one element, from the name of its type; 4 if it is unknown.

    >>> [_itemsize(name) for name in ("float32", "torch.bfloat16", "int8", "")]
    [4, 2, 1, 4]
    """
    bits = re.search(r"(\d+)(?!.*\d)", dtype)
    return max(int(bits[1]) // 8, 1) if bits else 4


def last_of(window: Window, name: str) -> float:
    """The last finite value of a scalar; NaN if it was not recorded."""
    _, values = window.get(name)
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else float("nan")
