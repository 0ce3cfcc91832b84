"""The ids under which the sites of a watched model are recorded. Looked up for every tensor of every step, so a site is
described only the first time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sonde.probe.model import ModuleRef, NamedParameter
from sonde.probe.sharded import placed
from sonde.schema.names import Kind
from sonde.schema.records import Site
from sonde.session.model.parameter_subset import ParameterSubset

if TYPE_CHECKING:
    from sonde.write.writer import Writer


class SiteIds:
    """The site ids of one model in one run."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._known: dict[tuple[str, str], int] = {}

    def of_place(self, kind: Kind, place: ModuleRef, suffix: str, tensor: Tensor) -> int:
        """The id of a module's output tensor, or of its gradient."""
        known: int | None = place.keys.get((kind, suffix))
        if known is None:
            known = self._of(kind, place.name + suffix, place.name, place, tensor)
            place.keys[kind, suffix] = known
        return known

    def of_parameter(self, kind: Kind, named: NamedParameter, tensor: Tensor, suffix: str = "") -> int:
        """The id of a parameter, or of one of its derived tensors."""
        name = named.name + suffix
        known = self._known.get((kind, name))
        return self._of(kind, name, named.owner, named, tensor) if known is None else known

    def of_part(self, kind: Kind, part: ParameterSubset, suffix: str = "") -> list[int]:
        """The ids of all parameters of a subset, which caches them."""
        known = part.keys.get((kind, suffix))
        if known is None:
            known = [self.of_parameter(kind, named, parameter, suffix) for named, parameter in part]
            part.keys[kind, suffix] = known
        return known

    def name_of(self, id: int) -> str:
        """The tensor that an id refers to, for messages."""
        return next(("/".join(name) for name, known in self._known.items() if known == id), str(id))

    def _of(self, kind: Kind, name: str, owner: str, what: ModuleRef | NamedParameter, tensor: Tensor) -> int:
        known = self._known.get((kind, name))
        if known is None:
            site = Site(
                kind=kind,
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                owner=owner,
                module_type=what.module_type,
                aliases=what.aliases,
            )
            known = self._known[kind, name] = self._writer.site_id(site)
            shard = placed(tensor).shard
            if shard.parts > 1:
                self._writer.note_shard(known, shard)
        return known
