"""Keras on torch, not compiled: sketches by our own torch kernels, many times as fast as Keras's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sonde.reduce.torch import Reducer, set_raw
from sonde.schema.records import Site
from sonde.session.model.tables import put_tables
from sonde.session.session import Session


class TorchSketches:
    """The tensors of one step, sketched as they come."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._reducer = Reducer(hist_samples=session.settings.hist_samples)
        self._ids: dict[tuple[str, str], int] = {}

    def add(self, sites: Sequence[Site], values: Sequence[Tensor], *, histogram: bool) -> None:
        """Tensors whose size changes from step to step."""
        for site, value in zip(sites, values, strict=True):
            self._reducer.add(self._id(site), value, histogram=histogram)

    def add_all(
        self, sites: Sequence[Site], values: Sequence[Tensor], raws: Sequence[Tensor] | None, *, histogram: bool
    ) -> None:
        """`raws`: the gradients before clipping to these values."""
        keys = [self._id(site) for site in sites]
        if not keys:
            return
        self._session.steps.training.governing.meter.see(values[0])
        tables = self._reducer.add_all((sites[0].kind, keys[0]), keys, list(values), histogram=histogram)
        if raws is not None:
            norms = [torch._foreach_norm([t.detach() for t in tensors]) for tensors in (values, raws)]
            factors = dict(zip(keys, torch._foreach_div(*norms), strict=True))
            for table in tables:
                set_raw(table, factors)

    def hand_over(self, step: int) -> None:
        tables = self._reducer.take()
        if tables:
            put_tables(self._session.recording.writer, tables, step)

    def _id(self, site: Site) -> int:
        key: Any = (site.kind, site.name)
        if key not in self._ids:
            self._ids[key] = self._session.recording.writer.site_id(site)
        return self._ids[key]
