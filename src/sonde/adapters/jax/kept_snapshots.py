"""Whole arrays of chosen steps, which a JAX loop passes to `keep`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from sonde.session.session import Session
from sonde.session.snapshots.external import ExternalDraft, ExternalSnapshots

KEPT_KINDS: Final = ("param", "grad", "act", "optim", "batch")


class KeptSnapshots:
    """The snapshots of one session."""

    def __init__(self, session: Session, plan: Any) -> None:
        self._session = session
        self._external = ExternalSnapshots(session.steps.snapshots, plan, kinds=KEPT_KINDS, to_host=np.asarray)
        self._draft: ExternalDraft | None = None
        self._decided = -1
        """The step for which `begin` was asked."""
        self._parameters: set[str] = set()

    def keep(self, trees: Mapping[str, Callable[[], Sequence[tuple[str, Any]]]]) -> bool:
        """Copy these arrays, by kind, if the current step has a snapshot. Nothing waits for the device."""
        step = self._session.next_step
        if step != self._decided:
            self._draft, self._decided = self._external.begin(step), step
        draft = self._draft
        if draft is None:
            return False
        for kind in sorted(trees.keys() & draft.kinds, key=KEPT_KINDS.index):  # names of states need the parameters
            named = trees[kind]()
            if kind == "param":
                self._parameters = {name for name, _ in named}
            elif kind == "optim":
                named = _by_parameter(named, self._parameters)
            for name, leaf in named:
                self._add(draft, f"{kind}/{name}", leaf)
        return True

    def _add(self, draft: ExternalDraft, name: str, leaf: Any) -> None:
        if not self._external.wants(name):
            return
        if not isinstance(leaf, jax.Array):
            self._external.add(draft, name, np.array(leaf), str(leaf.dtype))
        elif leaf.is_fully_addressable:
            copied = jnp.array(leaf, copy=True)
            copied.copy_to_host_async()
            self._external.add(draft, name, copied, str(leaf.dtype))
        else:
            self._session.recording.warn_once(
                "sharded snapshot", f"{name} is left out of snapshots: other processes hold parts of it."
            )

    def end(self) -> None:
        """The step is over: nothing more is added."""
        draft, self._draft = self._draft, None
        if draft is not None:
            self._external.hand_over(draft)


def _by_parameter(states: Sequence[tuple[str, Any]], parameters: Collection[str]) -> list[tuple[str, Any]]:
    """Optimizer states under the names of their parameters, as in torch: `dense.kernel.mu` for `0.mu.dense.kernel`."""
    found: dict[str, Any] = {}
    for name, array in states:
        parts = name.split(".")
        for i in range(1, len(parts)):
            owner = ".".join(parts[i:])
            if owner in parameters:
                state = [part for part in parts[:i] if part != "params"]
                short = f"{owner}.{state[-1]}" if state else name
                name = f"{owner}.{'.'.join(state)}" if short in found else short
                break
        found[name] = array
    return list(found.items())
