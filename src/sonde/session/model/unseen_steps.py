"""Warnings about optimizer steps that no hook sees, with advice on what to do.

`compiled_steps.py` and `graph_replays.py` in `probe/optimizer/` follow steps in compiled code and in CUDA graphs. What
remains are hand-written updates, optimizers outside torch, and steps that a compiler version does not let us follow.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sonde.probe.model import ModelNames
from sonde.probe.optimizer.tap import OptimizerTap
from sonde.probe.outputs import is_plain_tensor
from sonde.session.recording import Recording
from sonde.session.training.count import Steps
from sonde.session.training.passes import Recorded
from sonde.write.ranks import world_size

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


MIN_UPDATES: Final = 3
"""Parameter changes without a step before the warning. A single one may be a checkpoint loaded after a trial."""
_REMEDY: Final = "Call sonde.step() after each update to count it as a step."


class UnseenUpdates:
    """Detects that a model is trained by something other than a torch optimizer.

    It compares the version of one parameter at the end of one forward pass with that at the start of the next, and only
    as long as no optimizer has stepped and the user has ended no step: weights that are averaged, clipped or loaded
    between optimizer steps are not updates.
    """

    def __init__(
        self, recording: Recording, names: ModelNames, optimizers: OptimizerTap, is_fresh: Callable[[], bool]
    ) -> None:
        self._recording, self._names, self._optimizers, self._is_fresh = recording, names, optimizers, is_fresh
        self._parameter: weakref.ref[Tensor] | None = None
        self._version = -1
        self._num_changes = self._num_passes = 0
        self._is_done = world_size() > 1  # code that shards parameters between ranks also writes to them

    def model_entered(self, model: Recorded, steps: Steps) -> None:
        """Called when a training forward pass starts."""
        if self._is_done:
            return
        if self._is_counted(steps):
            self._is_done = True
            return
        if not steps.passes.is_used_by(model):
            return
        self._num_passes += 1
        parameter = self._parameter() if self._parameter is not None else None
        if parameter is not None and parameter._version != self._version >= 0:
            self._num_changes += 1
            if self._num_changes == MIN_UPDATES:
                self._warn(steps, "the parameters of this model change, but sonde saw no torch optimizer step")

    def model_returned(self) -> None:
        """Called when it has ended. An embedding with a `max_norm` changes its weights inside."""
        if self._is_done:
            return
        parameter = self._parameter() if self._parameter is not None else self._choose()
        self._version = parameter._version if parameter is not None else -1

    def finish(self, steps: Steps) -> None:
        """Called when the session ends normally."""
        if not self._is_done and self._num_passes >= MIN_UPDATES and not self._is_counted(steps):
            self._warn(steps, "gradients were computed, but sonde saw no torch optimizer step")

    def _warn(self, steps: Steps, what: str) -> None:
        self._is_done = True
        steps.lose_sight()
        message = f"{what}: every value is recorded at step {self._recording.step_number}. {_REMEDY}"
        self._recording.warn_once("unseen updates", message)

    def _is_counted(self, steps: Steps) -> bool:
        is_followed = steps.has_seen_optimizer or not steps.is_count_known or self._optimizers.has_unnamed
        return is_followed or not self._is_fresh()

    def _choose(self) -> Tensor | None:
        """The last trained parameter: it is nearest to the loss, so it has a gradient if any has."""
        model = self._names.model()
        trained = [p for p in model.parameters() if p.requires_grad and is_plain_tensor(p)] if model is not None else []
        if not trained or trained[-1].is_inference():
            self._is_done = True
            return None
        self._parameter = weakref.ref(trained[-1])
        return trained[-1]


def warn_of_unseen(recording: Recording, steps: Steps, optimizer: Optimizer, where: str) -> None:
    """Called when steps of this optimizer can no longer be followed: the steps that the user ends count instead."""
    steps.lose_sight()
    recording.warn_once(
        f"unseen in {where}",
        f"{type(optimizer).__name__}.step() is part of {where}, where sonde cannot see it: its steps are not counted. "
        f"{_REMEDY} Parameters and gradients are then recorded at that point; updates are not.",
    )


def warn_of_missing(recording: Recording, optimizer: Optimizer) -> None:
    """Called for a step inside a single graph: nothing can be read between the gradients and the update."""
    recording.warn_once(
        f"one graph {type(optimizer).__name__}",
        f"{type(optimizer).__name__}.step() runs inside a single graph, compiled or captured: its steps are counted, "
        "and parameters and optimizer state are recorded after each; gradients and updates are not. Call step() "
        "outside the graph to record them.",
    )
