"""Resumable export of whole tensors, step by step: HDF5, safetensors, npz, Parquet, Arrow.

Each step is one part. Formats that hold many steps are joined from the parts at the end; safetensors and npz hold one
step per file, so several steps become a folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from sonde.errors import UnknownNameError, UsageError
from sonde.run import LazyTensors, Run, TensorSpec, TensorStore, snapshot_tensors
from sonde.schema.names import matches_any
from sonde.schema.snapshots.tensors import group_name
from sonde.show.export.atomic import replacing
from sonde.show.export.parts import Parts, fingerprint
from sonde.show.export.source import run_facts
from sonde.show.export.tensor_files import JOINERS, WRITERS
from sonde.show.term.number import counted

KINDS: Final = {
    "weights": ("param",),
    "gradients": ("grad",),
    "activations": ("act", "actgrad", "probe"),
    "optimizer": ("optim",),
    "tensors": None,
}
"""Values of `what`, and the kinds of tensors each selects; `tensors` selects all."""
FORMATS: Final = {"safetensors": "safetensors", "hdf5": "h5", "npz": "npz", "parquet": "parquet", "arrow": "arrow"}


@dataclass(frozen=True, slots=True)
class TensorExport:
    """A planned export: tensors, steps and format."""

    run: Run
    store: TensorStore
    what: str
    format: str
    names: Mapping[int, Sequence[str]]
    """Names of the tensors, by step."""

    @property
    def steps(self) -> list[int]:
        return list(self.names)

    def tensors(self, step: int) -> LazyTensors:
        """The requested tensors of one step; none of them is read yet."""
        whole = snapshot_tensors(self.store, step)
        specs = {name: _readable(whole.specs[name]) for name in self.names[step]}
        return LazyTensors(whole.label, specs, whole.__getitem__)

    def part(self, step: int) -> str:
        """The name of a step's part, which depends on the snapshot and the request.

        Parts therefore stay valid if a running run has more steps by the time an export resumes.
        """
        of = fingerprint([self.store.document(step).time, *self.names[step]])
        return f"{group_name(step)}-{of}.{FORMATS[self.format]}"

    def request(self) -> dict[str, Any]:
        """The values that must be equal for parts of an earlier attempt to be used."""
        return {"run": self.run.id, "format": self.format}


def _readable(spec: TensorSpec) -> TensorSpec:
    """Read complex32 as complex64, because numpy lacks complex32."""
    return replace(spec, dtype="complex64") if spec.dtype == "complex32" else spec


def plan_export(
    run: Run, what: str, format: str, *, names: Sequence[str] = ("*",), steps: slice | None = None
) -> TensorExport:
    """Find the requested tensors; fails before anything is written if there are none."""
    if format not in FORMATS:
        raise UnknownNameError("format for whole tensors", format, FORMATS)
    kinds = KINDS[what]
    store = run.tensors.store()
    every = store.steps
    if not every:
        raise UsageError("the run has no snapshots. Take some:  sonde.watch(model, snapshots=sonde.every(500))")
    first, stop, stride = (steps or slice(None)).indices(every[-1] + 1)
    found = {}
    for step in every:
        if first <= step < stop and (step - first) % stride == 0:
            kept = store.entries(step)
            chosen = [n for n in kept if (kinds is None or n.partition("/")[0] in kinds) and matches_any(names, n)]
            if chosen:
                found[step] = chosen
    if not found:
        there = sorted({name.partition("/")[0] for name in store.entries(every[-1])})
        raise UsageError(
            f"no {what} {'' if list(names) == ['*'] else 'with these names '}at the requested steps. The run has "
            f"{counted(len(every), 'snapshot')}, steps {every[0]} to {every[-1]}; the last one has {', '.join(there)}."
        )
    return TensorExport(run, store, what, format, found)


def default_path(export: TensorExport) -> Path:
    ending = FORMATS[export.format]
    name = f"{export.run.path.name}-{export.what}"
    return Path(name) if is_folder(export) else Path(f"{name}.{ending}")


def is_folder(export: TensorExport) -> bool:
    return export.format not in JOINERS and len(export.steps) > 1


def write_export(
    export: TensorExport,
    path: Path,
    advance: Callable[[int, int], None] | None = None,
    on_resume: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write the missing parts, then create the output atomically. `advance(done, total)` is called after every step."""
    write = WRITERS[export.format]
    with Parts(path, export.request()).open() as parts:
        if on_resume is not None:
            on_resume(parts.num_found)
        names = {step: export.part(step) for step in export.steps}
        for done, (step, name) in enumerate(names.items(), 1):
            if not parts.has(name):
                with parts.writing(name) as draft:
                    write(draft, step, export.tensors(step), run_facts(export.run))
            if advance is not None:
                advance(done, len(names))
        return _finish(export, path, {step: parts.path(name) for step, name in names.items()})


def _finish(export: TensorExport, path: Path, parts: Mapping[int, Path]) -> list[Path]:
    if is_folder(export):
        draft = path.with_name(f".{path.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        names = {step: f"{group_name(step)}.{FORMATS[export.format]}" for step in parts}
        for step, part in parts.items():
            _link(part, draft / names[step])
        _replace_folder(draft, path)
        return [path / name for name in names.values()]
    if len(parts) == 1:
        next(iter(parts.values())).replace(path)
    else:
        with replacing(path) as draft:
            JOINERS[export.format](draft, list(parts.values()))
    return [path]


def _link(part: Path, place: Path) -> None:
    """Link rather than move: if it were moved, a crash before the last rename would lose the work."""
    try:
        os.link(part, place)
    except OSError:  # a file system without hard links
        shutil.copyfile(part, place)


def _replace_folder(draft: Path, path: Path) -> None:
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        path.rename(old)
        draft.rename(path)
        shutil.rmtree(old)
    else:
        draft.rename(path)
