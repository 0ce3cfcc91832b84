"""Snapshots of a Keras model: its variables and the state of its optimizer are read before a step, and are those of the
step bit by bit; gradients, outputs and inputs are returned by the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from sonde.adapters.keras.backend import BACKEND, copied, dtype, optimizers
from sonde.adapters.keras.inside import WHOLE, InsideStep, Keeping
from sonde.adapters.keras.names import KerasNames
from sonde.adapters.keras.rehearsal import copied_tree
from sonde.schema.names import site_name
from sonde.session.session import Session
from sonde.session.snapshots.external import ExternalDraft, ExternalSnapshots

KINDS: Final = ("param", "grad", "act", "optim", "batch")
_INSIDE: Final = frozenset({"grad", "act", "batch"})
"""The kinds that only the step itself knows."""


class KerasSnapshots:
    """One for each `fit`."""

    def __init__(self, session: Session, model: Any, inside: InsideStep, plan: Any) -> None:
        self._model, self._inside, self._optimizers = model, inside, optimizers(model)
        self._external = ExternalSnapshots(session.steps.snapshots, plan, kinds=KINDS, to_host=to_host)
        self._draft: ExternalDraft | None = None

    def begin(self, step: int, num_steps: int, args: Any) -> frozenset[str]:
        """Called before a step: copies the variables. Returns the kinds that the step has to return itself."""
        self._draft = draft = self._external.begin(step, num_steps)
        if draft is None:
            return frozenset()
        values = _values(self._model, args)
        if "param" in draft.kinds:
            for name, variable, layer in self._inside.names.states():
                if self._external.wants(f"param/{name}", layer):
                    self._add_variable(draft, f"param/{name}", variable, values)
        if "optim" in draft.kinds:
            for name, variable, owner in states(self._inside.names, self._optimizers):
                if owner is None or self._external.wants(f"optim/{name}", owner):
                    self._add_variable(draft, f"optim/{name}", variable, values)
        return draft.kinds & _INSIDE

    def keeping(self, kinds: frozenset[str]) -> Keeping | None:
        if not kinds:
            return None
        return Keeping(kinds, lambda name, owner: name.startswith("batch/") or self._external.wants(name, owner))

    def add(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Add the whole tensors that a step has returned; returns its other results."""
        others = {}
        for key, value in found.items():
            if not key.startswith(WHOLE):
                others[key] = value
            elif self._draft is not None:
                self._external.add(self._draft, key.removeprefix(WHOLE), value, dtype(value))
        return others

    def end(self) -> None:
        """The step has been made, and everything it returned was added."""
        draft, self._draft = self._draft, None
        if draft is not None:
            self._external.hand_over(draft)

    def _add_variable(self, draft: ExternalDraft, name: str, variable: Any, values: Mapping[int, Any]) -> None:
        value = values.get(id(variable), variable)
        self._external.add(draft, name, _frozen(value), dtype(variable))


def states(names: KerasNames, known: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, variable and layer of everything that optimizers keep: `dense.kernel.momentum`, and their own numbers."""
    for number, optimizer in enumerate(known):
        prefixes = {v.path.replace("/", "_") + "_": v for v in optimizer._trainable_variables}
        for variable in optimizer.variables:
            prefix = max((p for p in prefixes if variable.name.startswith(p)), key=len, default=None)
            if prefix is None:
                place = f"optimizer_{number}." if number else ""
                yield f"{place}{site_name(variable.name)}", variable, None
            else:
                of = prefixes[prefix]
                yield f"{names.site_of('optim', of).name}.{variable.name[len(prefix) :]}", variable, names.owner_of(of)


def _values(model: Any, args: Any) -> dict[int, Any]:
    """The values that JAX passes from step to step, by variable; other back-ends keep them in the variables."""
    if BACKEND != "jax":
        return {}
    groups = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
    pairs = (pair for group, values in zip(groups, args[0], strict=False) for pair in zip(group, values, strict=True))
    return {id(variable): value for variable, value in pairs}


def _frozen(value: Any) -> Any:
    """A value that the step does not change, and whose memory it does not reuse."""
    return copied_tree(value) if BACKEND == "jax" else copied(value)


def to_host(value: Any) -> Any:
    if BACKEND != "torch":
        return np.asarray(value)
    from sonde.session.snapshots.copies import bits_of

    return bits_of(value.detach().cpu())
