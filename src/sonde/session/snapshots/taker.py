"""Whole tensors while training runs: who asked for a snapshot, whether there is room, and what became of it.

A snapshot is taken whole or not at all. While the memory set aside is full of earlier ones, training waits, for a
bounded time; one that finds no room is skipped, counted, and an event of the run. Nothing here raises into training.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sonde.errors import UsageError
from sonde.session.recording import Recording
from sonde.session.snapshots.ledger import Ledger
from sonde.session.snapshots.plan import ON_DEMAND, Snapshots, as_plan, check_kinds
from sonde.session.snapshots.requests import SCHEDULED, Ask, Asks
from sonde.session.threads import TrainingThreads
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

_PATIENCE_S: Final = 1.0
"""After this long `finish` says what it waits for, and training is said to have waited."""


class Followed:
    """One watched model and what its snapshots hold."""

    def __init__(
        self, watching: WatchedModel, plan: Snapshots, gather: Gather, probe: Probe | None, *, at_once: bool
    ) -> None:
        self.watching, self.plan, self.gather, self.probe = watching, plan, gather, probe
        self.at_once = at_once
        # Several processes join their gradients in buffers that the next backward pass fills, uncounted.
        self.grads_at_once = at_once or world_size() > 1


class SnapshotTaker:
    """One per session. Its methods are called on the training thread unless they say otherwise."""

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
        """The plan that says which store; a session has one."""
        self._opened: Any = None
        self._trainer = threading.get_ident()
        """The thread that trains."""
        self._gave_up_at = -1
        """How many snapshots were done when training last waited for memory in vain."""

    # ---------------------------------------------------------------------------------------------------- start-up

    def follow(self, watching: WatchedModel, snapshots: Any) -> None:
        """Begin with a model. What cannot work is said here, before training starts."""
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
        if self._opened is None:
            self._opened = open_store(plan.store, self.recording.path, plan.options)
            self._store = plan
        elif (plan.store, dict(plan.options)) != (self._store.store, dict(self._store.options)):
            raise UsageError(f'snapshots of this run go to "{self._store.store}" already; a run has one store.')

    def _check_size(self, plan: Snapshots, gather: Gather) -> None:
        """One snapshot holds all watched models."""
        from sonde.session.snapshots.size import expected_bytes
        from sonde.session.snapshots.staging import mib

        sizes = Counter(expected_bytes(gather, plan.kinds))
        for followed in self._followed.values():
            sizes.update(expected_bytes(followed.gather, followed.plan.kinds))
        limit, total = self._memory().limit_bytes, sum(sizes.values())
        if total > limit:
            parts = ", ".join(f"{kind} {mib(nbytes)}" for kind, nbytes in sizes.items())
            raise UsageError(
                f"a snapshot takes {mib(total)} ({parts}), and {mib(limit)} of host memory are set aside for them. "
                f"Allow more:  sonde.init(snapshot_mib={2 * ((total >> 20) + 1)})  or choose fewer kinds or sites."
            )

    def _refusal(self) -> str:
        """Why nobody can have a snapshot; asked on the writer thread."""
        return "" if self._followed else "the run watches no model; its program calls no sonde.watch"

    def _changed(self) -> None:
        """Somebody writes to gradients before they are copied: from now on training waits for them."""
        for followed in list(self._followed.values()):
            followed.grads_at_once = True

    def _left_out(self, name: str, why: str) -> None:
        self.recording.warn_once(f"snapshot without {why}", f"{name} is in no snapshot: it is {why}.")

    def unfollow(self, watching: WatchedModel) -> None:
        self._followed.pop(id(watching), None)

    # ---------------------------------------------------------------------------------- where several threads train

    @property
    def training(self) -> TrainingThread:
        """The thread whose steps are kept: that of the first model which was watched with `snapshots=`, or the first
        that trains. A snapshot shows one step, and each thread counts its own."""
        planned = self._first_planned()
        return self.threads.all[0] if planned is None else planned.training

    def are_of(self, training: TrainingThread) -> bool:
        """Whether the steps of this thread are kept. As long as the model was not run, it may be the turn of a thread
        that has yet to begin, unless the one that trains has watched it."""
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
        """What is kept of this model; None where another thread's are kept."""
        return self._followed.get(id(watching)) if self.are_of(watching.training) else None

    def _kept(self) -> list[Followed]:
        training = self.training
        return [followed for followed in tuple(self._followed.values()) if followed.watching.training is training]

    def check_threads(self) -> None:
        """A model was found to be trained by another thread: what cannot be kept is said."""
        training = self.training
        for followed in tuple(self._followed.values()):
            if followed.plan is not ON_DEMAND and followed.watching.training is not training:
                name = followed.watching.plan.prefix.rstrip(".") or "a watched model"
                self.recording.warn_once(
                    f"snapshots of another thread {name}",
                    f"no snapshots of {name}: another thread trains it, and snapshots hold the models of one thread.",
                )

    # ------------------------------------------------------------------------------------------------ who wants one

    def ask(self, kinds: Any = None) -> int:
        """From code: one of the step that has not been made yet. Its number."""
        ask = Ask("asked", check_kinds(kinds))
        if not self._followed:
            raise UsageError("snapshot() needs a watched model. Watch one first:  sonde.watch(model, optimizer)")
        if self._trainer != threading.get_ident():  # another thread of the user's: the one that trains will take it
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
        """One is being taken already: it will do, unless other kinds are wanted."""
        held = [set(self._kinds(draft, followed)) for followed in self._kept()]
        wanted = [set(ask.kinds or followed.plan.kinds) for followed in self._kept()]
        if all(one <= other for one, other in zip(wanted, held, strict=True)):
            draft.is_asked = True
            return draft.step
        self.asks.put(ask)
        return draft.step + 1

    # -------------------------------------------------------------------------------------------------- the step

    def begin_step(self, step: int) -> None:
        """Decide whether this step has a snapshot."""
        self._trainer = threading.get_ident()
        if self.draft is not None and self.draft.step == step:
            return
        if self.draft is not None:
            self._drop("its step never came to an end", is_loss=self.draft.is_asked)
        try:
            asks = self._due(step)
            if asks and not self.recording.breaker.is_open:
                self._open(step, asks)
        except Exception as error:  # noqa: BLE001 - a schedule may be a function of the user's
            self.recording.breaker("schedule of snapshots", error)

    def _due(self, step: int) -> list[Ask]:
        asks = self.asks.take()
        if any(followed.plan.when(step) for followed in self._kept()):
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
        """How long training may wait for memory. Once in vain: not again before the disk has taken another one."""
        is_stuck = self._writer is not None and self._writer.num_done == self._gave_up_at
        return 0.0 if is_stuck else self.recording.settings.snapshot_wait_s

    def forward_begins(self, watching: WatchedModel) -> None:
        """The first forward pass of a step: copying begins."""
        draft = self.draft
        if draft is None or draft.has_begun(id(watching)):
            return
        followed = self._of(watching)
        if followed is None or followed.at_once:
            return
        self._do(lambda: draft.begin(id(watching), followed.gather, self._kinds(draft, followed)))

    def output(self, watching: WatchedModel, place: ModuleRef, output: Any) -> None:
        """What a module returned."""
        from sonde.probe.outputs import floating_tensors

        draft, followed = self.draft, self._of(watching)
        if draft is None or followed is None or "act" not in self._kinds(draft, followed):
            return
        if draft.step != watching.training.steps.number or not followed.gather.wants_output(place):
            return
        for suffix, tensor in floating_tensors(output):
            self._do(partial(draft.add_outputs, [(f"act/{place.name}{suffix}", tensor)]))

    def restart(self, watching: WatchedModel) -> None:
        """The pass that begins now may be the one that is shown: what modules return is copied again."""
        draft, followed = self.draft, self._of(watching)
        if draft is not None and followed is not None:
            draft.restart()

    def called(self, watching: WatchedModel, args: Any, kwargs: Any) -> None:
        """What the model was given."""
        draft, followed = self.draft, self._of(watching)
        if draft is not None and followed is not None and "batch" in self._kinds(draft, followed):
            self._do(lambda: draft.add_outputs(followed.gather.inputs(args, kwargs)))

    def before_update(self, watching: WatchedModel, step: OptimizerStep) -> None:
        """An optimizer is about to step, or `sonde.step` was called: this is the moment that the snapshot shows."""
        draft, followed = self.draft, self._of(watching)
        if draft is None or followed is None:
            return
        self._do(lambda: self._settle(draft, followed, watching))
        are_grads_made = not (step.has_closure or step.is_made)
        if self.draft is draft and "grad" in self._kinds(draft, followed) and are_grads_made:
            self._gradients(draft, followed, step)

    def after_update(self, watching: WatchedModel, step: OptimizerStep) -> None:
        """With a closure the gradients are made inside the step."""
        draft, followed = self.draft, self._of(watching)
        if draft is not None and followed is not None and step.has_closure and "grad" in self._kinds(draft, followed):
            self._gradients(draft, followed, step)

    def step_over(self) -> None:
        """All optimizers have stepped: what was collected is a snapshot."""
        draft = self.draft
        if draft is not None and draft.step == self.training.steps.number:
            self._do(lambda: self._hand_over(draft))

    def rewound(self) -> None:
        """Training returns to an earlier step. The step in progress was given up, and so is its snapshot; one that was
        asked for is taken of the step that comes next."""
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
        except Exception as error:  # noqa: BLE001 - a batch that the model cannot take: said once, then left out
            followed.probe = None
            why = f"{type(error).__name__}: {error}"
            self.recording.warn_once("probe", f"the model cannot be run on the probe batch ({why}); it is left out.")
        if failed:
            raise failed[0]

    def _gradients(self, draft: Draft, followed: Followed, step: OptimizerStep) -> None:
        at_once = followed.grads_at_once or step.has_closure
        self._do(lambda: draft.add_gradients(followed.gather, step, at_once=at_once))

    def _kinds(self, draft: Draft, followed: Followed) -> frozenset[str]:
        return draft.kinds.union(followed.plan.kinds if draft.is_as_planned else ())

    def _do(self, work: Callable[[], None]) -> None:
        """A piece of work on the training thread. Whatever goes wrong costs this one snapshot."""
        if self.draft is None:
            return
        from sonde.session.snapshots.copies import TooSlowError
        from sonde.session.snapshots.staging import NoRoomError

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

    # ----------------------------------------------------------------------------------------------- what becomes of it

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
        message = f"training waited {draft.waited_s:.1f} s until there was memory for the snapshot of step {draft.step}"
        self.recording.event("snapshot_waited", message, details={"step": draft.step, "waited_s": draft.waited_s})
        self.recording.warn_once(
            "snapshots come too fast",
            f"{message}: earlier ones are still being written. Take fewer, or allow more memory with snapshot_mib.",
        )

    def _drop_for_room(self, why: str) -> None:
        if self.draft is not None and self.draft.has_waited_in_vain:
            self._gave_up_at = -1 if self._writer is None else self._writer.num_done
            why += f"; training waited {self.draft.waited_s:.1f} s for them"
        self._drop(why)

    def _nothing(self, draft: Draft) -> str:
        """Which kinds were wanted, and the likeliest reason that there is none of them."""
        kinds = sorted(set().union(*(self._kinds(draft, followed) for followed in self._followed.values())))
        sites = {str(followed.plan.sites) for followed in self._followed.values()} - {"*"}
        if kinds == ["probe"]:
            reason = "no probe batch was given: Snapshots(probe=batch)"
        elif sites:
            reason = f"does a site match {' or '.join(sorted(sites))}?"
        else:
            reason = "the model has none of it at this step"
        return f"there was nothing that could be copied of {', '.join(kinds)}: {reason}"

    def _drop(self, why: str, *, is_loss: bool = True) -> None:
        draft, self.draft = self.draft, None
        if draft is not None:
            draft.drop()
            if is_loss:
                self.ledger.skip(draft.step, why, draft.tickets)

    # ------------------------------------------------------------------------------------------------- how it ends

    def flush(self, timeout_s: float) -> bool:
        return self._writer is None or self._writer.flush(timeout_s)

    def finish(self, deadline_s: float, status: RunStatus, *, is_patient: bool = False) -> None:
        """Write what is on its way within the deadline; patient: as long as something is written. Say what is lost."""
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
        if self._copier is not None:
            self._copier.close()
        if self._staging is not None:
            self._staging.clear()

    def _last_draft(self, *, is_crash: bool) -> None:
        """One that was asked for is taken now: no further step will come. Others belong to a step that never was."""
        draft = self.draft
        if draft is None or is_crash or not draft.is_asked:
            self._drop("the run ended in the middle of its step", is_loss=draft is not None and draft.is_asked)
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
            self.recording.say(f"writing {num} more snapshot{'s' if num > 1 else ''} ({mib:,} MiB written) …")

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
        """In a forked child: all of it is the parent's."""
        self.draft = None
        self._followed.clear()
        abandon(self._opened, self._copier)
        if self._writer is not None:
            self._writer.abandon()
        self._opened = self._writer = self._copier = None

    # ------------------------------------------------------------------------------------------------- made when needed

    def _memory(self) -> Staging:
        from sonde.session.snapshots.staging import Staging, default_limit

        if self._staging is None:
            set_mib = self.recording.settings.snapshot_mib
            self._staging = Staging(default_limit() if set_mib is None else int(set_mib * (1 << 20)))
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
