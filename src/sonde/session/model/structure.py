"""Decides when to write model.json: after the first complete step, and again when its content has changed."""

from __future__ import annotations

import threading
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from sonde.probe.structure import describe
from sonde.schema.layout import MODEL_FILE
from sonde.session.model.watched import WatchedModel
from sonde.write.writer import Writer


class ModelDocument:
    """model.json: one document for everything that a session watches."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self._lock = writer, threading.Lock()
        self._parts: WeakKeyDictionary[WatchedModel, _Description] = WeakKeyDictionary()

    def refresh(self, models: list[WatchedModel], everything: list[WatchedModel]) -> None:
        """Describe `models` again if they changed. Modules and parameters of several models follow one another; models
        that other threads train are described by those threads."""
        changed = [self._parts.setdefault(model, _Description()).refresh(model) for model in models]
        if any(changed):
            with self._lock:  # otherwise the older of two documents could be written last
                known = [part.content for model in everything if (part := self._parts.get(model)) and part.content]
                self._writer.document(MODEL_FILE, _together(known))


class _Description:
    """The last description of one watched model."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}
        self._signature: object = None
        self._first: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()
        """The initial groups of each optimizer: a schedule changes them."""

    def refresh(self, watching: WatchedModel) -> bool:
        """Describe the model again if something changed; returns whether it did.

        A model or its optimizers may be gone by the end of the run, as after a function that trained them has
        returned: then the last description remains.
        """
        signature = _signature(watching)
        if signature == self._signature or (self.content and self._is_gone(watching)):
            return False
        self._signature = signature
        watching.names.refresh()
        inspection = watching.inspection
        optimizers = watching.optimizer_scalars.optimizers
        self.content = describe(
            watching.names, optimizers, inspection.calls, watching.loss_name, inspection.paths.fed_by
        )
        for optimizer, described in zip(optimizers.values(), self.content["optimizers"], strict=True):
            described["groups"] = self._as_begun(optimizer, described["groups"])
        return True

    def _is_gone(self, watching: WatchedModel) -> bool:
        had_optimizer = bool(self.content["optimizers"])
        return watching.names.model() is None or (had_optimizer and not watching.optimizers.watched)

    def _as_begun(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        known = self._first.setdefault(optimizer, [])
        known += groups[len(known) :]
        return [{**first, "num_params": now["num_params"]} for first, now in zip(known, groups, strict=False)]


def _signature(watching: WatchedModel) -> object:
    """A cheap fingerprint, since it is computed at every step: optimized parameters, known calls, the loss."""
    optimizers = [
        (id(optimizer), tuple(len(group["params"]) for group in optimizer.param_groups))
        for optimizer in watching.optimizers.watched
    ]
    return optimizers, len(watching.inspection.calls), watching.inspection.num_trainable, watching.loss_name


def _together(documents: list[dict[str, Any]]) -> dict[str, Any]:
    total = dict(documents[0])
    for document in documents[1:]:
        for key, value in document.items():
            total[key] = (total[key] or value) if isinstance(value, str) else total[key] + value
    # An optimizer that trains several models is described once.
    by_number = {optimizer["number"]: optimizer for optimizer in total["optimizers"]}
    return {**total, "optimizers": sorted(by_number.values(), key=itemgetter("number"))}
