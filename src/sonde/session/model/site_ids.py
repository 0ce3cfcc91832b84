"""The numbers under which the sites of a watched model are recorded. Asked for every tensor of every step, so a site is
described the first time only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sonde.probe.model import ModuleRef, NamedParameter
from sonde.schema.names import Kind
from sonde.schema.records import Site
from sonde.session.model.parameter_subset import ParameterSubset

if TYPE_CHECKING:
    from sonde.write.writer import Writer


class SiteIds:
    """Of one model, in one run."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._known: dict[tuple[str, str], int] = {}

    def of_place(self, kind: Kind, place: ModuleRef, suffix: str, tensor: Tensor) -> int:
        """A tensor that a module gave, or its gradient."""
        known: int | None = place.keys.get((kind, suffix))
        if known is None:
            known = self._of(kind, place.name + suffix, place.name, place, tensor)
            place.keys[kind, suffix] = known
        return known

    def of_parameter(self, kind: Kind, named: NamedParameter, tensor: Tensor, suffix: str = "") -> int:
        """A parameter, or something of it."""
        name = named.name + suffix
        known = self._known.get((kind, name))
        return self._of(kind, name, named.owner, named, tensor) if known is None else known

    def of_part(self, kind: Kind, part: ParameterSubset, suffix: str = "") -> list[int]:
        """All parameters of a part, which remembers them."""
        known = part.keys.get((kind, suffix))
        if known is None:
            known = [self.of_parameter(kind, named, parameter, suffix) for named, parameter in part]
            part.keys[kind, suffix] = known
        return known

    def name_of(self, id: int) -> str:
        """What it stands for, to be told of."""
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
        return known
