"""A rank other than the first: it records only what no other rank can know.

Its statistics would repeat those of the first rank. Its data differs, and so does the place where a value becomes
non-finite; it also checks now and then that its weights still equal those of the first rank.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Unpack, cast

from torch import Tensor, nn

from sonde.config import Settings
from sonde.probe.entry import EntryTap
from sonde.probe.forward import ForwardTap
from sonde.probe.guarded import attempt
from sonde.probe.guards import quiet
from sonde.probe.loss.backward import BackwardTap, Root
from sonde.probe.model import ModelNames, ModuleRef
from sonde.probe.optimizer.hooks import OptimizerHooks
from sonde.probe.optimizer.scaler import ScalerTap
from sonde.probe.optimizer.tap import OptimizerStep, OptimizerTap
from sonde.schema.layout import RunStatus
from sonde.schema.records import Event
from sonde.session.keywords import Optimizers, WatchKeywords, spelled_out, watch_keywords
from sonde.session.null import NullSession
from sonde.session.observers.nonfinite import Looks, NonFiniteWatch
from sonde.session.plan import check_model, check_optimizers
from sonde.session.ranks.same_weights import is_due, later_event, model_fingerprint
from sonde.session.ranks.shards import StartSession, begin_shards, records_shards
from sonde.session.recording import Breaker
from sonde.session.training.count import Steps
from sonde.session.training.position import Position
from sonde.write.ranks import RankLog, Start, find_announced, rank
from sonde.write.thread_time import note_thread_time

MAX_PENDING: Final = 256
"""Steps whose numbers are still being copied; beyond that the newest are dropped."""
PATIENCE_S: Final = 120.0
"""How long the first rank may take to start its run."""
POLL_S: Final = (0.01, 0.5)
"""Intervals between searches for the run, at first and later. A short run must not be over before it is found."""


class RankSession(NullSession):
    """Checks for non-finite values; every other call does nothing, unless the model is sharded: then this rank records
    its shards, into a folder inside the run of the first rank."""

    def __init__(self, settings: Settings, start: StartSession) -> None:
        self.settings, self._start = settings, start
        self.steps = Steps(0, self)
        self.position = Position()
        self.breaker = Breaker(settings.max_errors, lambda _: None, lambda _: self._detach())
        self.writer = _Later(settings.dir, rank())
        self.overrides: Mapping[str, Any] = {}
        """Keywords of `watch` from the command line."""
        self._taps: list[Any] = []
        self.shards: Any = None
        """Records the shards of this rank, once a sharded model is watched."""
        self._has_waited = False

    @spelled_out(WatchKeywords)
    def watch(self, model: nn.Module, optimizer: Optimizers = None, **keywords: Unpack[WatchKeywords]) -> RankSession:
        checked, optimizers = check_model(model), check_optimizers(optimizer)
        keywords = cast(WatchKeywords, {**watch_keywords(self.settings), **keywords, **self.overrides})
        if self._records(checked):
            keywords.pop("mirror", None)  # the first rank forwards what it records
            self.shards.watch(checked, optimizers, **keywords)
            return self
        if not self._taps and self.settings.check_finite:
            self._attach(checked, optimizers, str(keywords.get("prefix", "")))
            self.writer.start()
        return self

    def _records(self, model: nn.Module) -> bool:
        """Whether this rank has a part of the model that no other rank has, and there is a run to record it in."""
        if self.shards is None and not self._has_waited and records_shards(model):
            self._has_waited = True
            self.shards = begin_shards(self._start, self.settings, rank())
        return self.shards is not None

    # ------------------------------------------------------------------------------ calls of a rank that records shards

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        if self.shards is not None:
            self.shards.log(values, step)

    def step(self) -> None:
        if self.shards is not None:
            self.shards.step()

    def tap(self, name: str, tensor: Any) -> None:
        if self.shards is not None:
            self.shards.tap(name, tensor)

    def batch(self, inputs: Any, targets: Any = None, *, ids: Any = None) -> None:
        if self.shards is not None:
            self.shards.batch(inputs, targets, ids=ids)

    def flush(self, timeout_s: float = 30.0) -> bool:
        return self.shards is None or self.shards.flush(timeout_s)

    # -------------------------------------------------------------------------------------------------------- attaching

    def _attach(self, model: nn.Module, optimizers: Any, prefix: str) -> None:
        names = self._names = ModelNames(model, prefix=prefix)
        root = names.place(model)
        self._watch = NonFiniteWatch(self.writer, root.name if root is not None else "")
        steps = self.steps
        hooks = OptimizerHooks(self.breaker, on_begin=steps.optimizer_begins, on_end=steps.optimizer_ended)
        self._taps = [
            EntryTap(names, self._entered, self.breaker),
            ForwardTap(names, self, self.breaker, on_recomputed=self._watch.recomputed),
            BackwardTap(self._watch.wants_loss, self._loss_known, self.breaker),
            OptimizerTap(
                names,
                optimizers,
                is_wanted=lambda: False,
                on_before=_nothing,
                on_after=_nothing,
                on_error=self.breaker,
                hooks=hooks,
            ),
            ScalerTap(hooks.skip, self.breaker),
        ]

    # ---------------------------------------------------------------------------------------------------- tap callbacks

    def _entered(self) -> None:
        self.steps.model_entered(self)
        with quiet():
            self._watch.begin(self.step_number)

    def _loss_known(self, roots: list[Root], is_graph_kept: bool) -> None:
        with quiet():
            self._watch.loss_known([root.value for root in roots], self.step_number)

    wants_activations = False
    wants_activation_grads = False
    is_idle = False

    def forward_seen(self, place: ModuleRef, output: Any) -> None:
        if place.ref() is self._names.model():
            self.steps.model_called(self, output)
        else:
            self.steps.part_called(self, place, output)

    def activation(self, place: ModuleRef, suffix: str, tensor: Tensor) -> None: ...

    def activation_grad(self, place: ModuleRef, suffix: str, tensor: Tensor) -> None: ...

    def module_called(self, place: ModuleRef, module: nn.Module, args: Any, output: Any) -> None:
        self._watch.called(place, not module._modules, args, output, self.step_number)

    # ------------------------------------------------------------------------------ steps, counted as on the first rank

    @property
    def step_number(self) -> int:  # type: ignore[override]
        return self.steps.number if self.shards is None else self.shards.step_number

    @property
    def next_step(self) -> int:
        return self.steps.number + self.steps.is_over if self.shards is None else self.shards.next_step

    def skip_step(self) -> None:
        if self.shards is None:
            self.steps.skip()
        else:
            self.shards.skip_step()

    @property
    def is_fresh(self) -> bool:  # type: ignore[override]
        return not self.is_finished and (self.position.is_new if self.shards is None else self.shards.is_fresh)

    def rewind(self, step: int) -> bool:
        """The same as on the first rank."""
        if self.shards is not None:
            return bool(self.shards.rewind(step))
        if self.is_finished or not self.position.may_return_to(step, self.next_step):
            return False
        self.position.returned(self.next_step)
        self.steps.restart(step)
        self.writer.start_at = Start(time.time(), step)
        return True

    def optimizers(self) -> set[int]:
        return {id(one) for tap in self._taps if isinstance(tap, OptimizerTap) for one in tap.watched}

    def optimizers_stepped(self, step: int) -> None:
        with attempt(self.breaker, "writing records"), quiet():
            self._watch.emit(step)
            self._compare(step)

    def step_begins(self, step: int) -> None: ...

    def step_ended(self, step: int) -> None:
        self.position.step_made()
        with attempt(self.breaker, "writing records"), quiet():
            self._watch.emit(step)

    def cut(self) -> Looks | None:
        with quiet():
            return self._watch.cut(self.step_number)

    def keep(self, measured: Looks | None) -> None:
        if measured is not None:
            self._watch.keep(measured)

    def retire(self, measured: Looks | None) -> None:
        if measured is not None:
            self._watch.drop(measured, self.step_number)

    drop = retire

    def restart(self) -> None: ...

    def _compare(self, step: int) -> None:
        model = self._names.model()
        if model is not None and is_due(step + self.writer.offset):
            with quiet():
                value = model_fingerprint(model)
                if value is not None:
                    self.writer.put(later_event(value, step), 16, step=step)

    def finish(self, status: RunStatus = "finished", reason: str = "", *, deadline_s: float | None = None) -> None:
        if not self.is_finished:
            self.is_finished = True
            self._detach()
            self.writer.close(deadline_s or self.settings.exit_deadline_s)
            if self.shards is not None:
                self.shards.finish(status, reason, deadline_s=deadline_s)

    def _detach(self) -> None:
        for tap in self._taps:
            tap.detach()
        self._taps = []

    def __exit__(self, *exc: object) -> None:
        if self.shards is not None:
            error = exc[1] if len(exc) > 1 else None
            self.shards._end(error if isinstance(error, BaseException) else None)
        self.finish()


def _nothing(step: OptimizerStep) -> None:
    """Before the step there is nothing to check."""


class _Later:
    """Waits for numbers off the training thread, and records what they show."""

    def __init__(self, dir: Path, number: int) -> None:
        self.dir, self.number = dir, number
        self._since = time.time()
        self.start_at = Start(self._since, None)
        self.first_step = 0
        """The step that the first rank started with, once it is known."""
        self._items: queue.SimpleQueue[tuple[Callable[[], Event | None], Start] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._num_dropped = 0
        self._has_failed = False

    @property
    def offset(self) -> int:
        """The offset to add to this rank's steps, as far as it is known."""
        return self.first_step if self.start_at.first_step is None else 0

    def put(self, item: Callable[[], Event | None], num_bytes: int, *, step: int) -> None:
        if self._is_over:
            return
        if self._items.qsize() < MAX_PENDING:
            self._items.put((item, self.start_at))
        else:
            self._num_dropped += 1

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
            # At once, not at the first event: by then the first rank may have finished and removed its note.
            log = self._find()
            while log is not None and (item := self._items.get()) is not None:
                resolve, start = item
                event = self._resolved(resolve)
                note_thread_time()
                if event is not None:
                    log.write(event, start)
            if log is not None and self._num_dropped:
                lost = f"{self._num_dropped} steps were not checked for NaN: the device was slow to answer"
                log.write(_loss(lost), self.start_at)
        except OSError:  # a full or read-only disk; training continues
            return
        finally:
            self._is_over = True  # also if there is no run to report to: the first rank records elsewhere, or not

    def _resolved(self, resolve: Callable[[], Event | None]) -> Event | None:
        try:
            return resolve()
        except Exception as error:  # noqa: BLE001 - for example a failed device; training continues, and so do later checks
            is_known, self._has_failed = self._has_failed, True
            return None if is_known else _loss(f"a check for NaN failed: {type(error).__name__}: {error}"[:500])

    def _find(self) -> RankLog | None:
        deadline, pause_s = time.monotonic() + PATIENCE_S, POLL_S[0]
        while time.monotonic() < deadline:
            found = find_announced(self.dir, since=self._since)
            if found is not None:
                self.first_step = found.step
                return RankLog(found.run, self.number, found.step)
            time.sleep(pause_s)
            pause_s = min(1.1 * pause_s, POLL_S[1])
        return None


def _loss(message: str) -> Event:
    return Event(type="warning", message=message, step=-1, time=time.time(), severity="warning")
