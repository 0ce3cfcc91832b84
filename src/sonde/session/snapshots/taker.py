"""Takes snapshots of whole tensors while training runs: requests, memory, and outcomes.

A snapshot is taken whole or not at all. While earlier ones fill the reserved memory, training waits for a bounded time;
a snapshot that finds no memory is skipped, counted, and recorded as an event. Nothing here raises into training.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sonde.errors import UsageError
from sonde.session.process.threads import TrainingThreads
from sonde.session.recording import Recording
from sonde.session.snapshot_plan import ON_DEMAND, Snapshots, as_plan, check_kinds
from sonde.session.snapshots.ledger import Ledger
from sonde.session.snapshots.requests import SCHEDULED, Ask, Asks
from sonde.write.ranks import world_size
from sonde.write.tensors.snapshots import ChangedError, SnapshotWriter, abandon
from sonde.write.tensors.store import open_store

if TYPE_CHECKING:
    from sonde.probe.model import ModuleRef
    from sonde.probe.optimizer.tap import OptimizerStep
    from sonde.schema.layout import RunStatus
    from sonde.session.model.watched import WatchedModel
    from sonde.session.snapshots.copies import Copier
    from sonde.session.snapshots.draft import Draft, Streams
    from sonde.session.snapshots.gather import Gather
    from sonde.session.snapshots.probes import Probe
    from sonde.session.snapshots.staging import Staging
    from sonde.session.training.thread import TrainingThread
    from sonde.write.tensors.snapshots import Pending

_PATIENCE_S: Final = 1.0
"""After this long, `finish` reports what it waits for, and a wait of training is reported."""


class Followed:
    """One watched model and the contents of its snapshots."""

    def __init__(
        self, watching: WatchedModel, plan: Snapshots, gather: Gather, probe: Probe | None, *, at_once: bool
    ) -> None:
        self.watching, self.plan, self.gather, self.probe = watching, plan, gather, probe
        self.at_once = at_once
        # With several processes, gradients are in buffers that the next backward pass fills, uncounted.
        self.grads_at_once = at_once or world_size() > 1


class SnapshotTaker:
    """One per session. Its methods are called on the training thread unless noted otherwise."""

    def __init__(self, recording: Recording, threads: TrainingThreads) -> None:
        self.recording, self.threads = recording, threads
        self._followed: dict[int, Followed] = {}
        self.asks = Asks(recording.path, self._refusal, recording.breaker)
        self.ledger = Ledger(recording, self.asks, self._changed)
        self.draft: Draft | None = None
        self._writer: SnapshotWriter | None = None
        self._staging: Staging | None = None
        self._copier: Copier | None = None
        self._streams: Streams | None = None
        self._store = ON_DEMAND
        """The plan that sets the store; a session has one."""
        self._opened: Any = None
        self._has_external = False
        """Whether the adapter of another framework takes snapshots."""
        self._trainer = threading.get_ident()
        """The thread that trains."""
        self._gave_up_at = -1
        """The number of finished snapshots when training last waited for memory in vain."""

    # --------------------------------------------------------------------------------------------------------- start-up

    def follow(self, watching: WatchedModel, snapshots: Any) -> None:
        """Follow a model. Invalid options raise here, before training starts."""
        from sonde.session.snapshots.gather import Gather
        from sonde.session.snapshots.probes import Probe

        plan = as_plan(snapshots)
        gather = Gather(watching, plan.sites, self._left_out)
        if plan is not ON_DEMAND:
            self._check(plan, gather)
            self.asks.least = plan.on_finding or self.asks.least
        probe = Probe(plan.probe) if plan.probe is not None else None
        self._followed[id(watching)] = Followed(watching, plan, gather, probe, at_once=plan.at_once)

    def _check(self, plan: Snapshots, gather: Gather) -> None:
        if gather.is_sharded():
            raise UsageError(
                "snapshots= needs whole parameters, and this model is sharded over several processes. "
                "Save it with torch.distributed.checkpoint; statistics are recorded without snapshots=."
            )
        self._check_size(plan, gather)
        self._open_store(plan)

    def follow_external(self, plan: Snapshots) -> None:
        """Allow snapshots of a model of another framework, whose adapter takes them with `ExternalSnapshots`."""
        if plan is not ON_DEMAND:
            self._open_store(plan)
            self.asks.least = plan.on_finding or self.asks.least
        self._has_external = True

    def keep(self, pending: Pending) -> None:
        """Write a snapshot of another framework."""
        self._writing().put(pending)

    @property
    def num_done(self) -> int:
        """The number of snapshots that have finished, one way or another; -1 before the first."""
        return -1 if self._writer is None else self._writer.num_done

    def _open_store(self, plan: Snapshots) -> None:
        if self._opened is None:
            self._opened = open_store(plan.store, self.recording.path, plan.options)
            self._store = plan
        elif (plan.store, dict(plan.options)) != (self._store.store, dict(self._store.options)):
            raise UsageError(f'snapshots of this run already go to "{self._store.store}"; a run has only one store.')

    def _check_size(self, plan: Snapshots, gather: Gather) -> None:
        """Check the size of a snapshot, which holds all watched models."""
        from sonde.session.snapshots.host_memory import mib
        from sonde.session.snapshots.size import expected_bytes

        sizes = Counter(expected_bytes(gather, plan.kind_names))
        for followed in self._followed.values():
            sizes.update(expected_bytes(followed.gather, followed.plan.kind_names))
        limit, total = self._memory().limit_bytes, sum(sizes.values())
        if total > limit:
            parts = ", ".join(f"{kind} {mib(nbytes)}" for kind, nbytes in sizes.items())
            raise UsageError(
                f"a snapshot needs {mib(total)} ({parts}), but only {mib(limit)} of host memory are reserved for them. "
                f"Allow more:  sonde.init(snapshot_mib={2 * ((total >> 20) + 1)})  or choose fewer kinds or sites."
            )

    def _refusal(self) -> str:
        """Why no snapshot is possible; called on the writer thread."""
        return (
            ""
            if self._followed or self._has_external
            else "the run watches no model: its program never calls sonde.watch"
        )

    def _changed(self) -> None:
        """Gradients are modified before they are copied: from now on training waits for the copy."""
        for followed in list(self._followed.values()):
            followed.grads_at_once = True

    def _left_out(self, name: str, why: str) -> None:
        self.recording.warn_once(f"snapshot without {why}", f"{name} is left out of snapshots: it is {why}.")

    def unfollow(self, watching: WatchedModel) -> None:
        self._followed.pop(id(watching), None)

    # ----------------------------------------------------------------------------------------- several training threads

    @property
    def training(self) -> TrainingThread:
        """The thread whose steps are kept: that of the first model watched with `snapshots=`, or the first that trains.
        A snapshot shows one step, and each thread counts its own."""
        planned = self._first_planned()
        return self.threads.all[0] if planned is None else planned.training

    def are_of(self, training: TrainingThread) -> bool:
        """Whether the steps of this thread are kept. As long as the model was not run, the thread that will train it
        may not have started, unless the one that trains has watched it."""
        planned = self._first_planned()
        if planned is None or planned.has_run:
            return self.training is training
        return planned.training is training and training.thread in (None, planned.watched_in)

    def _first_planned(self) -> WatchedModel | None:
        for followed in tuple(self._followed.values()):
            if followed.plan is not ON_DEMAND:
                return followed.watching
        return None

    def _of(self, watching: WatchedModel) -> Followed | None:
        """The plan for this model; None if another thread's models are kept."""
        return self._followed.get(id(watching)) if self.are_of(watching.training) else None

    def _kept(self) -> list[Followed]:
        training = self.training
        return [followed for followed in tuple(self._followed.values()) if followed.watching.training is training]

    def check_threads(self) -> None:
        """A model turned out to be trained by another thread: warn about what cannot be kept."""
        training = self.training
        for followed in tuple(self._followed.values()):
            if followed.plan is not ON_DEMAND and followed.watching.training is not training:
                name = followed.watching.plan.prefix.rstrip(".") or "a watched model"
                self.recording.warn_once(
                    f"snapshots of another thread {name}",
                    f"no snapshots of {name}: another thread trains it, and snapshots only cover the models of one "
                    "thread.",
                )

    # --------------------------------------------------------------------------------------------------------- requests

    def ask(self, kinds: Any = None) -> int:
        """Request a snapshot of the next step from code. Returns the step's number."""
        ask = Ask("asked", check_kinds(kinds))
        if self._has_external and not self._followed:
            self.asks.put(ask)
            return self.training.steps.number + self.training.steps.is_over
        if not self._followed:
            raise UsageError("snapshot() needs a watched model. Watch one first:  sonde.watch(model, optimizer)")
        if self._trainer != threading.get_ident():  # another thread of the user's: the training thread will take it
            self.asks.put(ask)
            return self.training.steps.number + 1
        if self.draft is not None:
            return self._join(self.draft, ask)
        step = self.training.steps.number + self.training.steps.is_over
        self._open(step, [ask, *self._due(step)])
        for watching in self.threads.models:
            self.forward_begins(watching)
        return step

    def _join(self, draft: Draft, ask: Ask) -> int:
        """Whether a snapshot in progress satisfies the request, unless it asks for other kinds."""
        held = [set(self._kinds(draft, followed)) for followed in self._kept()]
        wanted = [set(ask.kinds or followed.plan.kind_names) for followed in self._kept()]
        if all(one <= other for one, other in zip(wanted, held, strict=True)):
            draft.is_asked = True
            return draft.step
        self.asks.put(ask)
        return draft.step + 1

    # ------------------------------------------------------------------------------------------------------------- step

    def begin_step(self, step: int) -> None:
        """Decide whether this step has a snapshot."""
        self._trainer = threading.get_ident()
        if self.draft is not None and self.draft.step == step:
            return
        if self.draft is not None:
            self._drop("its step never finished", is_loss=self.draft.is_asked)
        try:
            asks = self._due(step)
            if asks and not self.recording.breaker.is_open:
                self._open(step, asks)
        except Exception as error:  # noqa: BLE001 - a schedule may be a user's function
            self.recording.breaker("snapshot schedule", error)

    def is_due(self, step: int) -> bool:
        """Whether a snapshot of this step is requested or scheduled."""
        return bool(self.asks) or any(followed.plan.is_due(step) for followed in self._followed.values())

    def _due(self, step: int) -> list[Ask]:
        asks = self.asks.take()
        if any(followed.plan.is_due(step) for followed in self._kept()):
            asks.append(Ask(SCHEDULED))
        return asks

    def _open(self, step: int, asks: list[Ask]) -> None:
        from sonde.session.snapshots.draft import Draft, Streams

        tickets = tuple(ticket for ask in asks for ticket in ask.tickets)
        is_asked = any(ask.reason != SCHEDULED for ask in asks)
        self._streams = self._streams or Streams()
        self.draft = Draft(
            step,
            ", ".join(dict.fromkeys(ask.reason for ask in asks)),
            self._memory(),
            self._copying(),
            self._streams,
            wait_s=self._wait_s(),
            tickets=tickets,
            kinds=frozenset(kind for ask in asks for kind in ask.kinds or ()),
            is_as_planned=any(ask.kinds is None for ask in asks),
            is_asked=is_asked,
        )

    def _wait_s(self) -> float:
        """How long training may wait for memory. After a wait in vain, not again until the disk has finished another
        one."""
        is_stuck = self._writer is not None and self._writer.num_done == self._gave_up_at
        return 0.0 if is_stuck else self.recording.settings.snapshot_wait_s

    def forward_begins(self, watching: WatchedModel) -> None:
        """Called at the first forward pass of a step: starts copying."""
        draft = self.draft
        if draft is None or draft.has_begun(id(watching)):
            return
        followed = self._of(watching)
        if followed is None or followed.at_once:
            return
        self._do(lambda: draft.begin(id(watching), followed.gather, self._kinds(draft, followed)))

    def output(self, watching: WatchedModel, place: ModuleRef, output: Any) -> None:
        """Called with the output of a module."""
        from sonde.probe.outputs import floating_tensors

        draft, followed = self.draft, self._of(watching)
        if draft is None or followed is None or "act" not in self._kinds(draft, followed):
            return
        if draft.step != watching.training.steps.number or not followed.gather.wants_output(place):
            return
        for suffix, tensor in floating_tensors(output):
            self._do(partial(draft.add_outputs, [(f"act/{place.name}{suffix}", tensor)]))

    def restart(self, watching: WatchedModel) -> None:
        """The pass that starts now may be the one to show: outputs of modules are copied again."""
        draft, followed = self.draft, self._of(watching)
        if draft is not None and followed is not None:
            draft.restart()

    def called(self, watching: WatchedModel, args: Any, kwargs: Any) -> None:
        """Called with the inputs of the model."""
        draft, followed = self.draft, self._of(watching)
        if draft is not None and followed is not None and "batch" in self._kinds(draft, followed):
            self._do(lambda: draft.add_outputs(followed.gather.inputs(args, kwargs)))

    def before_update(self, watching: WatchedModel, step: OptimizerStep) -> None:
        """Called when an optimizer is about to step, or by `sonde.step`: the snapshot shows this moment."""
        draft, followed = self.draft, self._of(watching)
        if draft is None or followed is None:
            return
        self._do(lambda: self._settle(draft, followed, watching))
        are_grads_made = not (step.has_closure or step.is_made)
        if self.draft is draft and "grad" in self._kinds(draft, followed) and are_grads_made:
            self._gradients(draft, followed, step)

    def after_update(self, watching: WatchedModel, step: OptimizerStep) -> None:
        """With a closure, the gradients are computed inside the step."""
        draft, followed = self.draft, self._of(watching)
        if draft is not None and followed is not None and step.has_closure and "grad" in self._kinds(draft, followed):
            self._gradients(draft, followed, step)

    def step_over(self) -> None:
        """All optimizers have stepped: complete the snapshot."""
        draft = self.draft
        if draft is not None and draft.step == self.training.steps.number:
            self._do(lambda: self._hand_over(draft))

    def rewound(self) -> None:
        """Training returns to an earlier step. The step in progress is abandoned, and so is its snapshot; a requested
        one is taken of the next step instead."""
        draft = self.draft
        self._drop("training returned to an earlier step", is_loss=False)
        if draft is None or not draft.is_asked:
            return
        if draft.is_as_planned:
            self.asks.put(Ask(draft.reason, None, draft.tickets))
        if draft.kinds:
            self.asks.put(Ask(draft.reason, tuple(draft.kinds), () if draft.is_as_planned else draft.tickets))

    def _settle(self, draft: Draft, followed: Followed, watching: WatchedModel) -> None:
        model, kinds = id(watching), self._kinds(draft, followed)
        if draft.is_settled(model):
            return
        if not draft.has_begun(model):
            draft.take(followed.gather, kinds)
        draft.settle(model, followed.gather, kinds)
        if followed.probe is not None and "probe" in kinds:
            self._run_probe(draft, followed, watching)

    def _run_probe(self, draft: Draft, followed: Followed, watching: WatchedModel) -> None:
        failed: list[Exception] = []

        def seen(place: ModuleRef, suffix: str, tensor: Any) -> None:
            try:
                if followed.gather.wants_output(place):
                    draft.add_output(f"probe/{place.name}{suffix}", tensor)
            except Exception as error:  # noqa: BLE001 - raised again below, outside of the model
                failed.append(error)

        assert followed.probe is not None
        try:
            followed.probe.run(watching, seen)
        except Exception as error:  # noqa: BLE001 - a batch that the model cannot take: reported once, then left out
            followed.probe = None
            why = f"{type(error).__name__}: {error}"
            self.recording.warn_once(
                "probe", f"the model cannot run on the probe batch ({why}); its outputs are left out of snapshots."
            )
        if failed:
            raise failed[0]

    def _gradients(self, draft: Draft, followed: Followed, step: OptimizerStep) -> None:
        at_once = followed.grads_at_once or step.has_closure
        self._do(lambda: draft.add_gradients(followed.gather, step, at_once=at_once))

    def _kinds(self, draft: Draft, followed: Followed) -> frozenset[str]:
        return draft.kinds.union(followed.plan.kind_names if draft.is_as_planned else ())

    def _do(self, work: Callable[[], None]) -> None:
        """Run a piece of work on the training thread. Any failure costs only this snapshot."""
        if self.draft is None:
            return
        from sonde.session.snapshots.copies import TooSlowError
        from sonde.session.snapshots.host_memory import NoRoomError

        try:
            with self.training.governing.meter.span("snapshots"):
                work()
        except NoRoomError as error:
            self._drop_for_room(str(error))
        except (TooSlowError, ChangedError) as error:
            self._drop(str(error))
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self._drop(f"{type(error).__name__}: {error}")
            self.recording.breaker("snapshot", error)

    # ---------------------------------------------------------------------------------------------------------- outcome

    def _hand_over(self, draft: Draft) -> None:
        if draft.is_empty:
            self._drop(self._nothing(draft))
            return
        pending, writer = draft.pending(self.recording.writer.attempt()), self._writing()
        self.draft = None
        writer.put(pending)
        if draft.waited_s > _PATIENCE_S:
            self._tell_waited(draft)

    def _tell_waited(self, draft: Draft) -> None:
        message = f"training waited {draft.waited_s:.1f} s for memory for the snapshot of step {draft.step}"
        self.recording.event("snapshot_waited", message, details={"step": draft.step, "waited_s": draft.waited_s})
        self.recording.warn_once(
            "snapshots come too fast",
            f"{message}: earlier ones are still being written. Take fewer, or allow more memory with snapshot_mib.",
        )

    def _drop_for_room(self, why: str) -> None:
        if self.draft is not None and self.draft.has_waited_in_vain:
            self._gave_up_at = self.num_done
            why += f"; training waited {self.draft.waited_s:.1f} s for them"
        self._drop(why)

    def _nothing(self, draft: Draft) -> str:
        """The requested kinds, and the likeliest reason that there is nothing to copy."""
        kinds = sorted(set().union(*(self._kinds(draft, followed) for followed in self._followed.values())))
        sites = {str(followed.plan.sites) for followed in self._followed.values()} - {"*"}
        if kinds == ["probe"]:
            reason = "no probe batch was given: Snapshots(probe=batch)"
        elif sites:
            reason = f"does a site match {' or '.join(sorted(sites))}?"
        else:
            reason = "the model has none at this step"
        return f"there was nothing to copy for {', '.join(kinds)}: {reason}"

    def _drop(self, why: str, *, is_loss: bool = True) -> None:
        draft, self.draft = self.draft, None
        if draft is not None:
            draft.drop()
            if is_loss:
                self.ledger.skip(draft.step, why, draft.tickets)

    # ----------------------------------------------------------------------------------------------------------- ending

    def flush(self, timeout_s: float) -> bool:
        return self._writer is None or self._writer.flush(timeout_s)

    def finish(self, deadline_s: float, status: RunStatus, *, is_patient: bool = False) -> None:
        """Write pending snapshots within the deadline; `is_patient`: as long as there is progress. Report lost ones."""
        try:
            self._finish(max(deadline_s, 0.0), is_crash=status == "crashed", is_patient=is_patient)
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            self.recording.breaker("snapshots", error)

    def _finish(self, deadline_s: float, *, is_crash: bool, is_patient: bool) -> None:
        if self.draft is not None:
            self._last_draft(is_crash=is_crash)
        if self._writer is not None:
            self._close(self._writer, deadline_s, is_patient=is_patient)
        for ask in self.asks.take():
            self.asks.answer(ask.tickets, state="lost", why="the run ended before its next step")
            if self._has_external and ask.reason == "asked":
                self.recording.warn_once("snapshot at end", "a requested snapshot was lost: no further step came.")
        if self._copier is not None:
            self._copier.close()
        if self._staging is not None:
            self._staging.clear()

    def _last_draft(self, *, is_crash: bool) -> None:
        """Take a requested snapshot now, since no further step will come. Others belong to a step that never
        happened."""
        draft = self.draft
        if draft is None or is_crash or not draft.is_asked:
            self._drop("the run ended during its step", is_loss=draft is not None and draft.is_asked)
            return
        for watching in self.threads.models:
            followed = self._of(watching)
            if followed is not None:
                self._do(partial(self._settle, draft, followed, watching))
        self._do(lambda: self._hand_over(draft))

    def _close(self, writer: SnapshotWriter, deadline_s: float, *, is_patient: bool) -> None:
        end = time.monotonic() + deadline_s

        def tell() -> None:
            num, mib = writer.num_open, writer.written_bytes >> 20
            self.recording.say(f"writing {num} more snapshot{'s' if num > 1 else ''} ({mib:,} MiB so far) …")

        try:
            if not writer.flush(min(_PATIENCE_S, deadline_s)):
                tell()
                if is_patient:
                    writer.drain(deadline_s, tell)
        finally:  # also when the user does not want to wait, and presses Ctrl-C
            if not writer.close(max(end - time.monotonic(), 0.0), is_patient=is_patient):
                why = (
                    f"nothing was written for {deadline_s:.1f} s"
                    if is_patient
                    else f"not written in {deadline_s:.1f} s"
                )
                self.ledger.lose(writer.num_open, why)
        self.ledger.uploaded(writer.upload)
        self.ledger.ended()
        self.ledger.note()

    def forked(self) -> None:
        """Called in a forked child: everything belongs to the parent."""
        self.draft = None
        self._followed.clear()
        abandon(self._opened, self._copier)
        if self._writer is not None:
            self._writer.abandon()
        self._opened = self._writer = self._copier = None

    # ------------------------------------------------------------------------------------------------ created on demand

    def _memory(self) -> Staging:
        from sonde.session.snapshots.staging import Staging

        self._staging = self._staging or Staging.of(self.recording.settings.snapshot_mib)
        return self._staging

    def _copying(self) -> Copier:
        from sonde.session.snapshots.copies import Copier

        self._copier = self._copier or Copier(self.recording.breaker)
        return self._copier

    def _writing(self) -> SnapshotWriter:
        if self._writer is None:
            opened = self._opened
            plan, path = self._store, self.recording.path
            self.ledger.store = plan.store
            self._writer = SnapshotWriter(
                lambda: opened if opened is not None else open_store(plan.store, path, plan.options),
                plan.store,
                self.recording.writer,
                self.ledger.done,
                self.recording.breaker,
            )
        return self._writer
