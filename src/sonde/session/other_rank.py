"""A rank that is not the first: it records nothing but what only it can know.

Its numbers would be those of the first rank over again. What differs is the data, and so where a value stopped being
finite; and that its weights are still the same is worth a number now and then.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from sonde.config import Settings
from sonde.probe.clip import ClipTap
from sonde.probe.forward import ForwardTap
from sonde.probe.guards import quiet
from sonde.probe.model import ModelNames, Place
from sonde.probe.optimizer import OptimizerStep, OptimizerTap
from sonde.record.ranks import RankLog, find_announced, rank
from sonde.schema.layout import RunStatus
from sonde.schema.records import Event
from sonde.session.breaker import Breaker
from sonde.session.given import check_model, check_optimizers
from sonde.session.nonfinite import NonFiniteWatch
from sonde.session.null import NullSession
from sonde.session.same_weights import is_due, later_event, model_fingerprint

MAX_PENDING: Final = 256
"""Steps whose numbers are still on their way; beyond that the newest are let go."""
PATIENCE_S: Final = 120.0
"""How long the first rank may take to begin its run."""
POLL_S: Final = (0.01, 0.5)
"""How often it is looked for: at first, and in the end. A short run must not be over before it is found."""


class RankSession(NullSession):
    """Watches for values that are not finite; every other call does nothing."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.step_number = 0
        self.breaker = Breaker(settings.max_errors, lambda _: None, lambda _: self._detach())
        self.writer = _Later(Path(settings.dir), rank())
        self._taps: list[Any] = []

    def watch(self, model: Any, optimizer: Any = None, **options: Any) -> RankSession:
        checked, optimizers = check_model(model), check_optimizers(optimizer)
        if not self._taps and self.settings.finite:
            self._attach(checked, optimizers, str(options.get("prefix", "")))
            self.writer.start()
        return self

    def _attach(self, model: nn.Module, optimizers: Any, prefix: str) -> None:
        names = self._names = ModelNames(model, prefix=prefix)
        root = names.place(model)
        self._watch = NonFiniteWatch(self.writer, root.name if root is not None else "")
        clips = ClipTap(self.breaker)
        self._taps = [
            ForwardTap(names, self, self.breaker),
            OptimizerTap(
                names,
                optimizers,
                is_wanted=lambda: False,
                on_before=_nothing,
                on_after=self._stepped,
                on_error=self.breaker,
                take_clips=clips.take,
            ),
            clips,
        ]

    # ------------------------------------------------------------------------------------ what the forward tap wants

    wants_activations = False
    wants_activation_grads = False
    is_idle = False

    def forward_seen(self) -> None: ...

    def activation(self, place: Place, suffix: str, tensor: Tensor) -> None: ...

    def activation_grad(self, place: Place, suffix: str, tensor: Tensor) -> None: ...

    def module_called(self, place: Place, module: nn.Module, args: Any, output: Any) -> None:
        self._watch.called(place, not module._modules, args, output, self.step_number)

    def _stepped(self, step: OptimizerStep) -> None:
        if step.number == 0:
            self._watch.emit(self.step_number)
            self._compare()
            self.step_number += 1

    def skip_step(self) -> None:
        """The first rank counts it too."""
        self.step_number += 1

    def continue_at(self, step: int, scalars: Iterable[tuple[str, int]] = ()) -> bool:
        self.step_number = step
        return True

    def _compare(self) -> None:
        model = self._names.model()
        if model is not None and is_due(self.step_number):
            with quiet():
                value = model_fingerprint(model)
                if value is not None:
                    self.writer.put(later_event(value, self.step_number), 16, step=self.step_number)

    def finish(self, status: RunStatus = "finished", reason: str = "", *, deadline_s: float | None = None) -> None:
        if not self.is_finished:
            self.is_finished = True
            self._detach()
            self.writer.close(deadline_s or self.settings.exit_deadline_s)

    def _detach(self) -> None:
        for tap in self._taps:
            tap.detach()
        self._taps = []

    def __exit__(self, *exc: object) -> None:
        self.finish()


def _nothing(step: OptimizerStep) -> None:
    """Before the step there is nothing to look at."""


class _Later:
    """Waits for numbers off the training thread, and writes down what they say."""

    def __init__(self, dir: Path, number: int) -> None:
        self.dir, self.number = dir, number
        self._since = time.time()
        self._items: queue.SimpleQueue[Callable[[], Event | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def put(self, item: Callable[[], Event | None], num_bytes: int, *, step: int) -> None:
        if not self._is_over and self._items.qsize() < MAX_PENDING:
            self._items.put(item)

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sonde-rank", daemon=True)
            self._thread.start()

    def close(self, deadline_s: float) -> None:
        if self._thread is not None:
            self._items.put(None)
            self._thread.join(deadline_s)

    def _run(self) -> None:
        try:
            # At once, not at the first event: the first rank may have finished by then, and its note be gone.
            log = self._find()
            while log is not None and (resolve := self._items.get()) is not None:
                event = resolve()
                if event is not None:
                    log.write(event)
        except OSError:  # a full or read-only disk; training goes on
            return
        finally:
            self._is_over = True  # also when there is nobody to tell: the first rank records elsewhere, or not at all

    def _find(self) -> RankLog | None:
        deadline, pause_s = time.monotonic() + PATIENCE_S, POLL_S[0]
        while time.monotonic() < deadline:
            run = find_announced(self.dir, since=self._since)
            if run is not None:
                return RankLog(run, self.number)
            time.sleep(pause_s)
            pause_s = min(1.1 * pause_s, POLL_S[1])
        return None
