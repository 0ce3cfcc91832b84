"""Named tensors that are loaded lazily, used for weights files and snapshots of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from sonde.errors import SondeError, UsageError, nearest
from sonde.schema.snapshots.tensors import AnyArray, storage_dtype


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor, known before it is read."""

    shape: tuple[int, ...]
    dtype: str
    """The name of the dtype in torch, e.g. "bfloat16"."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * storage_dtype(self.dtype).itemsize


class NoSuchTensorError(SondeError, KeyError):
    """No tensor has that name; also a KeyError, like other mappings."""

    def __str__(self) -> str:
        return str(self.args[0])


class LazyTensors(Mapping[str, AnyArray]):
    """A mapping from names to arrays; an array is read on each access and not cached."""

    def __init__(self, label: str, specs: Mapping[str, TensorSpec], read: Callable[[str], AnyArray]) -> None:
        self.label = label
        """The source of the tensors, in words."""
        self.specs = specs
        """Shape and dtype by name, known without reading a tensor."""
        self._read = read

    def __getitem__(self, name: str) -> AnyArray:
        if name not in self.specs:
            raise NoSuchTensorError(f'{self.label} has no tensor "{name}".{nearest(name, self.specs)} {self._holds()}')
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __contains__(self, name: object) -> bool:
        return name in self.specs

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    def __repr__(self) -> str:
        noun = "tensor" if len(self) == 1 else "tensors"
        return f"<{self.label}: {len(self)} {noun}, {self.nbytes / 2**20:,.1f} MiB, loaded lazily>"

    def _holds(self) -> str:
        names = list(self.specs)
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return f"It has {', '.join(names[:4])}{more}." if names else "It is empty."


def of_kind(snapshot: LazyTensors, kind: str, run: str = "") -> LazyTensors:
    """The tensors of one kind in a snapshot under the names of their sites, as in weights files.

    `run` names the run of the snapshot, to distinguish two of the same step.
    """
    sites = {name.removeprefix(f"{kind}/"): name for name in snapshot if name.startswith(f"{kind}/")}
    if not sites:
        kinds = sorted({name.partition("/")[0] for name in snapshot})
        raise UsageError(f'{snapshot.label} has no tensors of kind "{kind}". It has {", ".join(kinds) or "none"}.')
    specs = {site: snapshot.specs[name] for site, name in sites.items()}
    label = f"{snapshot.label} of {run}" if run else snapshot.label
    return LazyTensors(label, specs, lambda site: snapshot[sites[site]])
