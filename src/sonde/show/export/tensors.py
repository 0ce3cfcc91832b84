"""Whole tensors of a run as files: HDF5, safetensors, npz, Parquet, Arrow. Step by step, and resumable.

One step is one part. Formats that hold many steps are joined from the parts at the end; safetensors and npz hold one
step a file, and several steps are a folder of them.
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

KINDS: Final = {
    "weights": ("param",),
    "gradients": ("grad",),
    "activations": ("act", "actgrad", "probe"),
    "optimizer": ("optim",),
    "tensors": None,
}
"""What can be asked for, and the kinds of tensors that are meant; tensors: all of them."""
FORMATS: Final = {"safetensors": "safetensors", "hdf5": "h5", "npz": "npz", "parquet": "parquet", "arrow": "arrow"}


@dataclass(frozen=True, slots=True)
class TensorExport:
    """Which tensors of which steps, in which format."""

    run: Run
    store: TensorStore
    what: str
    format: str
    names: Mapping[int, Sequence[str]]
    """By step."""

    @property
    def steps(self) -> list[int]:
        return list(self.names)

    def tensors(self, step: int) -> LazyTensors:
        """The tensors asked for of one step; none of them is read yet."""
        whole = snapshot_tensors(self.store, step)
        specs = {name: _readable(whole.specs[name]) for name in self.names[step]}
        return LazyTensors(whole.label, specs, whole.__getitem__)

    def part(self, step: int) -> str:
        """The name of a step's part: another when the snapshot or what is asked of it is another.

        So parts stay good when a live run has more steps by the time an export goes on.
        """
        of = fingerprint([self.store.document(step).time, *self.names[step]])
        return f"{group_name(step)}-{of}.{FORMATS[self.format]}"

    def request(self) -> dict[str, Any]:
        """What must be the same for parts of an earlier try to be used."""
        return {"run": self.run.id, "format": self.format}


def _readable(spec: TensorSpec) -> TensorSpec:
    """complex32 is read as complex64: no numpy has it."""
    return replace(spec, dtype="complex64") if spec.dtype == "complex32" else spec


def plan_export(
    run: Run, what: str, format: str, *, names: Sequence[str] = ("*",), steps: slice | None = None
) -> TensorExport:
    """Find what is asked for; that nothing is there is said before anything is written."""
    if format not in FORMATS:
        raise UnknownNameError("format for whole tensors", format, FORMATS)
    kinds = KINDS[what]
    store = run.tensor_store()
    every = store.steps
    if not every:
        raise UsageError("the run has no snapshots. Take some with  sonde.watch(model, snapshots=sonde.every(500)).")
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
            f"no {what} {'' if list(names) == ['*'] else 'of these names '}were kept at the steps asked for. "
            f"There are snapshots of {len(every)} steps, {every[0]} to {every[-1]}; the last has {', '.join(there)}."
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
    tell: Callable[[int, int], None] | None = None,
    on_resume: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write what is missing, then let the output appear at once. `tell(done, total)` hears of every finished step."""
    write = WRITERS[export.format]
    with Parts(path, export.request()).open() as parts:
        if on_resume is not None:
            on_resume(parts.num_found)
        names = {step: export.part(step) for step in export.steps}
        for done, (step, name) in enumerate(names.items(), 1):
            if not parts.has(name):
                with parts.writing(name) as draft:
                    write(draft, step, export.tensors(step), run_facts(export.run))
            if tell is not None:
                tell(done, len(names))
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
    """Under a second name: were it moved, a crash before the last rename would lose the work."""
    try:
        os.link(part, place)
    except OSError:  # a file system without links
        shutil.copyfile(part, place)


def _replace_folder(draft: Path, path: Path) -> None:
    if path.exists():
        old = path.with_name(f".{path.name}.old")
        path.rename(old)
        draft.rename(path)
        shutil.rmtree(old)
    else:
        draft.rename(path)
