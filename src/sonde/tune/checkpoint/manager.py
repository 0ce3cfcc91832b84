"""`CheckpointManager`: saves everything a run needs to resume, at intervals, keeps the best ones, and restores one.

A restored run continues bit by bit: weights, optimizer, scheduler, scaler, data position, random states.
"""

from __future__ import annotations

import atexit
import os
import platform
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch

from sonde.display import warn
from sonde.distribution import version
from sonde.errors import RunError, RunNotFoundError, UsageError
from sonde.read.run.checkpoints import Checkpoint, abandoned_checkpoints
from sonde.read.run.sharded import open_state
from sonde.schema.checkpoints import CHECKPOINTS_FOLDER, RUN_STEP
from sonde.session import NullSession, Session, active_session
from sonde.tune.checkpoint.capture import Capture, as_mapping, require_state
from sonde.tune.checkpoint.host import copied_to_host
from sonde.tune.checkpoint.optimizers import take_state
from sonde.tune.checkpoint.retention import Retention
from sonde.tune.checkpoint.storage import LocalStorage, Payload, StorageBackend
from sonde.write.items import KeptRow
from sonde.write.ranks import rank

Checkpoints = list[Checkpoint]  # inside the class, `list` is its method
Problems = dict[int, list[str]]
Which = int | str | None
"""A step, "latest", "best", or None for the latest."""


class CheckpointManager:
    """Checkpoints in a run's folder, or in any other.

    manager = CheckpointManager("checkpoints", model=model, optimizer=optimizer, interval=100, keep_last=3)
    for step in range(manager.restore_latest(), num_steps):
        train_one_step()
        manager.step(step + 1, {"eval_loss": loss})
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | Session | NullSession | None = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        extra: Mapping[str, Any] | None = None,
        interval: int | None = 100,
        keep_last: int | None = None,
        keep_best: int | None = None,
        metric: str = "eval_loss",
        mode: Literal["min", "max"] = "min",
        keep_every: int | None = None,
        adapters_only: bool = False,
        background: bool = False,
        storage: StorageBackend | None = None,
    ) -> None:
        """Each object may be one, a list, or a mapping by name; `extra` is anything else with a `state_dict`."""
        if interval is not None and interval < 1:
            raise UsageError(f"interval must be a number of steps, or None to save only on demand; got {interval!r}.")
        self.session = where if isinstance(where, Session | NullSession) else active_session()
        self.interval, self.background = interval, background
        self.retention = Retention(
            keep_last=keep_last, keep_best=keep_best, metric=metric, mode=mode, keep_every=keep_every
        )
        others = {"scheduler": scheduler, "scaler": scaler, "dataloader": dataloader, "extra": dict(extra or {})}
        self._capture = Capture(
            models=require_state(as_mapping(model, "model"), "model"),
            optimizers=require_state(as_mapping(optimizer, "optimizer"), "optimizer"),
            others={group: as_mapping(given, group) for group, given in others.items()},
            adapters_only=adapters_only,
        )
        self.storage = storage or self._local(where)
        self.num_steps = 0
        """Calls of `step` without a number are counted."""
        self.last_error: Exception | None = None
        self.documents: dict[str, Callable[[], Any]] = {}
        """Files for other programs, by name: the result of the function is written alongside the rest as JSON."""
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[Checkpoint] | None = None
        _refuse_plain_loader(self._capture.others["dataloader"])
        self._capture.take()  # report what cannot be saved now, not in the middle of a run

    def _local(self, where: Any) -> StorageBackend | None:
        if isinstance(where, str | os.PathLike):
            return LocalStorage(where)
        if self.session is None:
            raise UsageError("no run has started: pass a folder, or start one with sonde.init(...) first.")
        # Disabled, or not the first rank: there is no folder, and nothing is saved.
        return None if self.session.path is None else LocalStorage(Path(self.session.path) / CHECKPOINTS_FOLDER)

    # ----------------------------------------------------------------------------------------------------------- saving

    def step(self, step: int | None = None, metrics: Mapping[str, Any] | None = None) -> Checkpoint | None:
        """Call after each optimizer step with the number of steps made; saves if a checkpoint is due.

        A failing disk does not end training: the failure is reported, recorded, and retried when the next one is due.
        """
        self.num_steps = self.num_steps + 1 if step is None else int(step)
        if self.interval is None or self.num_steps % self.interval or self.num_steps <= 0:
            return None
        return self.try_save(self.num_steps, metrics)

    def try_save(self, step: int, metrics: Mapping[str, Any] | None = None) -> Checkpoint | None:
        """`save` that reports a failing disk instead of raising."""
        try:
            return self.save(step, metrics)
        except (OSError, RunError) as error:
            self._report(error)
            return None

    def save(
        self, step: int | None = None, metrics: Mapping[str, Any] | None = None, *, reason: str = ""
    ) -> Checkpoint | None:
        """Save now. In the background, the state is copied now and written while training continues; then None is
        returned."""
        if step is not None:
            self.num_steps = _checked_step(step)
        if self.storage is None or rank() != 0:
            return None
        metadata = {
            "step": self.num_steps,
            "time": time.time(),
            "metrics": {str(name): _number(value) for name, value in (metrics or {}).items()},
            "details": describe(reason, adapters_only=self._capture.adapters_only),
        }
        payload = self._capture.take()
        payload.documents.update({name: make() for name, make in self.documents.items()})
        payload.state["step"] = self.num_steps
        payload.state["session_step"] = None if self.session is None else self.session.next_step
        payload.state["session_run"] = None if self.session is None else str(self.session.path)
        if not self.background:
            return self._store(payload, metadata)
        self.wait()
        ready = copied_to_host(payload)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="sonde-checkpoint")
            atexit.register(self.close)
        self._pending = self._pool.submit(lambda: self._store(ready(), metadata))
        return None

    def wait(self) -> None:
        """Wait until background saves are on disk; raises their errors."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Finish pending saves. Needed only with `background`; the end of the program does it too."""
        try:
            self.wait()
        except (OSError, RunError) as error:
            self._report(error)
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
            atexit.unregister(self.close)

    def _store(self, payload: Payload, metadata: Mapping[str, Any]) -> Checkpoint:
        assert self.storage is not None
        saved = self.storage.save_checkpoint(payload, metadata)
        self._tell_catalog(saved, payload.state["session_step"])
        for surplus in self.retention.surplus(self.storage.list_checkpoints()):
            if surplus.id != saved.id:
                self.storage.delete_checkpoint(surplus.id)
        return saved

    def _tell_catalog(self, saved: Checkpoint, step: int | None) -> None:
        session = self.session
        if not isinstance(session, Session) or session.is_finished:
            return
        inside = saved.path.is_relative_to(session.path)
        where = saved.path.relative_to(session.path) if inside else saved.path.absolute()
        details = {**saved.metrics, "num_bytes": saved.num_bytes}
        if step is not None and step != saved.step:
            details[RUN_STEP] = step  # the checkpoint counts steps differently from the run
        session.recording.writer.kept(
            KeptRow(table="checkpoints", step=saved.step, time=saved.time, where=str(where), details=details)
        )

    def _report(self, error: Exception) -> None:
        self.last_error = error
        message = f"a checkpoint could not be saved: {error}"
        if isinstance(self.session, Session):
            self.session.recording.warn_once(f"checkpoint {type(error).__name__}", message)
            return
        warn(f"sonde: {message}", RuntimeWarning, stacklevel=3)

    # ---------------------------------------------------------------------------------------------------------- finding

    def list(self) -> Checkpoints:
        """Every checkpoint, by step; its `problem` says what is wrong with it."""
        return [] if self.storage is None else self.storage.list_checkpoints()

    def latest(self) -> Checkpoint | None:
        """The newest that looks intact, and that training has not returned from; `restore` reads every byte."""
        abandoned = self._abandoned()
        return next((c for c in reversed(self.list()) if not c.problem and c.path not in abandoned), None)

    def _abandoned(self) -> set[Path]:
        if not isinstance(self.session, Session):
            return set()
        return abandoned_checkpoints(open_state(self.session.path))

    def best(self) -> Checkpoint | None:
        """The best by `metric` and `mode`."""
        return next(iter(self.retention.best([c for c in self.list() if not c.problem])), None)

    def verify(self, which: Which = None) -> Problems:
        """Step -> its problems, for one checkpoint or for all; {} if there are none."""
        storage = self._storage()
        chosen = self.list() if which is None else [self._find(which)]
        problems = {c.step: storage.verify_checkpoint(c.id) for c in chosen}
        return {step: found for step, found in problems.items() if found}

    def delete(self, which: int | str) -> None:
        """Delete one checkpoint permanently."""
        self._storage().delete_checkpoint(self._find(which).id)

    def load(self, which: Which = None) -> Payload:
        """Its tensors and state, verified, on the CPU; nothing live is changed."""
        return self._storage().load_checkpoint(self._find(which).id)

    def restore(self, which: Which = None, *, rng: bool = True) -> int:
        """Restore everything; returns the number of steps made. A damaged checkpoint is rejected."""
        self.wait()
        found = self._find(which)
        payload = self._storage().load_checkpoint(found.id)
        self._capture.put(payload, rng=rng)
        self.num_steps = int(payload.state.get("step", found.step))
        self._continue_session(payload.state, found)
        return self.num_steps

    def restore_latest(self, *, rng: bool = True) -> int:
        """`restore()`, or 0 if there is nothing yet: the first line of a loop that may be restarted."""
        return self.restore(rng=rng) if self.latest() is not None else 0

    def _continue_session(self, state: Mapping[str, Any], found: Checkpoint) -> None:
        if not isinstance(self.session, Session) or self.session.is_finished:
            return
        step, run = state.get("session_step"), state.get("session_run")
        at = self.num_steps if step is None else int(step)
        is_of_this_run = found.path.is_relative_to(self.session.path) or run == str(self.session.path)
        is_rewound = (self.session.steps.threads.position.is_fresh or is_of_this_run) and self.session.rewind(at)
        self.session.recording.event(
            "restored",
            f"resumed from {found.id}" + ("" if is_rewound else "; step numbers continue"),
            details={"step": found.step, "path": str(found.path)},
        )

    def _storage(self) -> StorageBackend:
        if self.storage is None:
            raise UsageError("no run to read checkpoints from (sonde is disabled, or this is not the first rank).")
        return self.storage

    def _find(self, which: Which) -> Checkpoint:
        found = self.list()
        if which in (None, "latest"):
            chosen = self.latest() or next(iter(reversed(found)), None)
        elif which == "best":
            chosen = self.best()
        else:
            chosen = next((c for c in found if c.step == which or c.id == which), None)
        if chosen is None:
            has = ", ".join(str(c.step) for c in found[-8:]) or "none"
            what = "checkpoint" if which is None else f"checkpoint {which!r}"
            raise RunNotFoundError(f"no {what} in {getattr(self.storage, 'folder', self.storage)}. Available: {has}.")
        return chosen

    def __repr__(self) -> str:
        return f"<CheckpointManager {getattr(self.storage, 'folder', self.storage)} ({len(self.list())} checkpoints)>"


def _checked_step(step: Any) -> int:
    """A checkpoint below step 0 would have a name that no list shows."""
    try:
        number = int(step)
    except (TypeError, ValueError):
        raise UsageError(f"step= must be a whole number; got {step!r}.") from None
    if number < 0:
        raise UsageError(f"step= must be 0 or more; got {step!r}.")
    return number


def _number(value: Any) -> float:
    return float(value.detach() if hasattr(value, "detach") else value)


def _refuse_plain_loader(loaders: Mapping[str, Any]) -> None:
    """A plain DataLoader does not know its position; say so now, not when restoring."""
    for name, loader in loaders.items():
        try:
            take_state(loader, name)
        except UsageError:
            raise UsageError(
                f"a {type(loader).__name__} does not know its position. Wrap it and iterate over the wrapper:  "
                "loader = sonde.tune.ResumableLoader(loader)"
            ) from None


def describe(reason: str, *, adapters_only: bool) -> dict[str, Any]:
    """Versions and settings on which the next bits depend."""
    return {
        "reason": reason,
        "adapters_only": adapters_only,
        "sonde": version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "num_threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
