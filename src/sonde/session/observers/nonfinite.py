"""Finds where a value became NaN or Inf: remembers every output of every module of a pass, by weak reference, and has
them read when the pass is over, but only if something is non-finite at its end. Then the first places in forward order
become an event.

Autograd keeps most outputs until the backward pass. For those that are freed or overwritten earlier, the event says
between which modules the value appeared.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from sonde.probe.cast_input import cast_input
from sonde.probe.model import ModuleRef
from sonde.probe.outputs import floating_tensors
from sonde.reduce.inspect.finite import END_BYTES, Scan, State, is_readable, scan, send
from sonde.schema.records import Event
from sonde.session.observers.nonfinite_event import Look, nonfinite_event

MAX_EVENTS: Final = 50
"""Maximum number of events: a diverged run is reported often enough."""
MAX_HELD: Final = 1 << 12
"""Number of checks after which those of whole forward passes are passed on before the step is over, which may never
happen."""
MAX_OPEN: Final = 1 << 16
"""Checks of one forward pass, or of a model whose parts are called separately; further ones are skipped."""
SMALL_BYTES: Final = 1 << 16
"""Smaller tensors are held until the pass is over, so that they are known."""
MAX_HELD_BYTES: Final = 4 << 20
"""Limit for all of them together."""


Seen = tuple[ModuleRef, bool, str, weakref.ref[Tensor] | Tensor, int, tuple[int, ...]]
"""An input or output of a module in the current pass: the module, whether it is a leaf, the role, a reference to the
tensor (or, if it is small, an alias without its graph), its version, and for an output the places of the module's
inputs. A plain tuple, because one is made at every call of every module."""


def _unchanged(seen: Seen) -> Tensor | None:
    """The tensor, if it still exists and was not overwritten."""
    known = seen[3]
    tensor = known if isinstance(known, Tensor) else known()
    if tensor is None:
        return None
    tensor._fix_weakref()  # type: ignore[attr-defined]  # it may have been kept by C++ alone
    return tensor if _version(tensor) == seen[4] else None


@dataclass(slots=True, eq=False)
class Checked:
    """The checks of one pass, or of a part of it."""

    looks: list[Look]
    scans: list[Scan]
    """The same tensors, under different conditions."""
    implied: list[tuple[int, int]]
    """Places of two checks: if the second tensor is finite, the first was too."""
    again: list[tuple[str, int, int]] = field(default_factory=list)
    """Outputs that the backward pass computed again: module, number of the scan, place among its states."""
    freed: frozenset[str] = field(init=False)
    """Modules with an output that could not be read."""

    def __post_init__(self) -> None:
        self.freed = frozenset(look.site for look in self.looks if not look.is_known and look.role == "output")

    def states(self, found: Sequence[list[State]]) -> list[State]:
        """The state of each check, given those of the scans."""
        merged: list[State] = [_worst(states) for states in zip(*found, strict=False)][: len(self.looks)]
        unknown: dict[str, list[int]] = {}
        for place, look in enumerate(self.looks):
            if merged[place] is None and look.role == "output":
                unknown.setdefault(look.site, []).append(place)
        for site, number, place in self.again:
            if unknown.get(site):
                merged[unknown[site].pop(0)] = found[number][place]
        for first, second in reversed(self.implied):
            if merged[first] is None and merged[second] == 0.0:
                merged[first] = 0.0
        return merged


class Looks(NamedTuple):
    """The checks of some passes; micro-batches are counted from 0."""

    parts: list[Checked]
    num_micro_batches: int


class Later(Protocol):
    """Calls a function off the training thread, and keeps the event it returns."""

    def put(self, item: Callable[[], Event | None], num_bytes: int, *, step: int) -> Any: ...


class NonFiniteWatch:
    """Checks the inputs and outputs of modules. While a model runs it only takes notes. Call it with gradients off."""

    def __init__(self, writer: Later, root: str) -> None:
        self.writer, self.root = writer, root
        self._open: list[Seen] = []
        """Tensors of the pass that is running."""
        self._noted: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        """The same by `id`, with version and place: an output is the next module's input."""
        self._implied: list[tuple[int, int]] = []
        """Places of two notes: a tensor, and a copy of it or what overwrote it. If the second is finite, so was the
        first."""
        self._num_held_bytes = 0
        self._thread = 0
        self._pass_in = 0
        """The thread that runs a pass, or 0."""
        self._unsure: tuple[list[Seen], Checked] | None = None
        """The last pass, if its outputs were read in part and the loss may show more."""
        self._newest: Checked | None = None
        """The checks of the last pass; None if it is known to be finite."""
        self._done: list[Checked] = []
        self._num_looks = 0
        self._micro_batch = self._num_dropped = 0
        self._kept: list[Looks] = []
        self._num_events = 0

    @property
    def num_held(self) -> int:
        """Number of checks whose result is not passed on yet."""
        return sum(len(one.looks) for one in self._done)

    # ------------------------------------------------------------------------------------------------------------ notes

    def begin(self, step: int) -> None:
        """Called when the model is called. Notes of a pass that was not completed, or of separate parts, end here."""
        if self._open:
            self._check(step)
        self._pass_in = threading.get_ident()

    def _end(self, step: int) -> None:
        """Called when a step ends: so do its notes, but not those of a pass that another thread is running."""
        if self._open and self._pass_in in (0, threading.get_ident()):
            self._check(step)

    def called(self, place: ModuleRef, is_leaf: bool, args: Any, output: Any, step: int) -> None:
        """Called when a module ran in a training forward pass."""
        is_root = place.name == self.root
        is_plain = type(output) is Tensor
        outputs = (output,) if is_plain else [tensor for _, tensor in floating_tensors(output)]
        inputs: list[int | None] = []
        for value in args:
            if type(value) is Tensor:
                if value is not output:  # changed in place, it is an output
                    at = self._note(place, is_leaf, "input", value)
                    if is_leaf and is_plain and value.dtype is not output.dtype and at is not None:
                        at = self._note_copy(place, value, output, at)
                    inputs.append(at)
            elif value is not None:
                inputs += [self._note(place, is_leaf, "input", tensor) for _, tensor in floating_tensors(value)]
        known = tuple([at for at in inputs if at is not None])
        places = [self._note(place, is_leaf, "output", tensor, known) for tensor in outputs]
        if is_root:
            self._check(step, [at for at in places if at is not None], is_whole=True)
            self._pass_in = 0
            if self._num_looks >= MAX_HELD:
                self._hand_over(step)

    def _note_copy(self, place: ModuleRef, value: Tensor, output: Tensor, at: int) -> int:
        """Remember the copy of an input that autocast has made; returns its place, or that of the input."""
        copy = cast_input(value, output)
        used = None if copy is None else self._note(place, True, "copy", copy)
        if used is None:
            return at
        self._implied.append((at, used))
        return used

    def _note(
        self, place: ModuleRef, is_leaf: bool, role: str, tensor: Tensor, inputs: tuple[int, ...] = ()
    ) -> int | None:
        """Remember a tensor. Returns its place among the notes; None if it is not checked. Runs at every call of every
        module: cheap."""
        # A view of all elements is the same tensor. Graphs keep its base, but not a view that another was made of.
        base = tensor._base
        if base is not None and base.numel() == tensor.numel() and base.dtype == tensor.dtype:
            tensor = base
        version = _version(tensor)
        at = len(self._open)
        if at == 0:
            self._thread = threading.get_ident()
        elif at >= MAX_OPEN:
            return None
        noted = self._noted.get(id(tensor))
        if noted is not None and noted[0]() is tensor:
            if noted[1] == version:
                return noted[2]
            self._implied.append((noted[2], at))  # overwritten
        elif not (tensor.is_floating_point() or tensor.is_complex()):
            return None
        reference = weakref.ref(tensor)
        self._noted[id(tensor)] = reference, version, at
        known: weakref.ref[Tensor] | Tensor = reference
        if self._num_held_bytes < MAX_HELD_BYTES and _is_small(tensor):
            self._num_held_bytes += tensor.nbytes
            known = tensor.detach()
        self._open.append((place, is_leaf, role, known, version, inputs))
        return at

    def recomputed(self, place: ModuleRef, output: Any) -> None:
        """Called when the backward pass ran a module of a checkpointed segment again: what was freed is known now."""
        newest = self._newest
        if newest is None or place.name not in newest.freed:
            return
        for _, tensor in floating_tensors(output):
            at = newest.scans[-1].add(tensor)
            if at is not None:
                newest.again.append((place.name, len(newest.scans) - 1, at))

    def wants_loss(self) -> bool:
        """Whether the loss may show something new: a pass was not checked, or only in part."""
        return self._thread == threading.get_ident() and (bool(self._open) or self._unsure is not None)

    def loss_known(self, losses: list[Tensor], step: int) -> None:
        """Called before the backward pass, while its tensors exist."""
        unsure, self._unsure = self._unsure, None
        if self._open:
            self._check(step, losses=losses, is_whole=True)
        elif unsure is not None:
            seen, checked = unsure
            tensors = [*map(_unchanged, seen), *losses]
            found = scan(tensors, range(len(seen), len(tensors)), range(0), step)
            if found is not None:
                checked.scans.append(found)
                self._newest = checked
                if checked not in self._done:
                    self._done.append(checked)

    # ----------------------------------------------------------------------------------------------------------- checks

    def _check(
        self, step: int, outputs: Sequence[int] = (), losses: Sequence[Tensor] = (), *, is_whole: bool = False
    ) -> None:
        """Have everything read that was noted, if it is needed, and forget the notes."""
        seen, self._open = self._open, []
        # Another thread may call the model while this pass returns, and end some of its notes: their places are gone.
        num = len(seen)
        outputs = [at for at in outputs if at < num]
        implied, self._implied = [pair for pair in self._implied if max(pair) < num], []
        self._noted.clear()
        self._num_held_bytes, self._newest, self._unsure = 0, None, None
        if seen and self._num_events < MAX_EVENTS:
            tensors = [*map(_unchanged, seen), *losses]
            last = [*outputs, *range(len(seen), len(tensors))]
            found = scan(tensors, last, [at for at, one in enumerate(seen) if one[2] == "output"], step)
            is_unsure = any(_is_read_in_part(tensors[at]) for at in outputs) and not losses
            if found is not None or is_unsure:
                looks = [self._look(one, tensors[at], at in outputs, at) for at, one in enumerate(seen)]
                checked = Checked(looks, [] if found is None else [found], implied)
                self._unsure = (seen, checked) if is_unsure and not _has_number(tensors, outputs) else None
                if found is not None:
                    self._newest = checked
                    self._done.append(checked)
        self._num_looks += len(seen)
        self._micro_batch += is_whole

    def _look(self, seen: Seen, tensor: Tensor | None, is_root: bool, at: int) -> Look:
        place, is_leaf, role, _, _, known = seen
        is_known, inputs = tensor is not None, tuple([one for one in known if one < at])
        return Look(place.name, role, self._micro_batch, is_leaf, is_root, place.module_type, is_known, inputs)

    def cut(self, step: int) -> Looks | None:
        """The checks since the last cut, removed from the step."""
        self._end(step)
        num_micro_batches, self._micro_batch = self._micro_batch, 0
        done, self._done = self._done, []
        self._num_looks = 0
        return Looks(done, num_micro_batches) if done or num_micro_batches else None

    def keep(self, looks: Looks) -> None:
        """These checks belong to the step after all."""
        self._kept.append(looks)

    def drop(self, looks: Looks, step: int) -> None:
        """These checks belong to no step; a non-finite value is reported all the same."""
        self._put([looks], step, first=self._num_dropped)
        self._num_dropped += looks.num_micro_batches

    def emit(self, step: int) -> None:
        """Called when the step is over."""
        self._end(step)
        self._hand_over(step)
        self._micro_batch = self._num_dropped = 0
        self._newest = self._unsure = None

    def _hand_over(self, step: int) -> None:
        """Pass the checks to the writer, which waits for their numbers and records the event."""
        kept, self._kept = self._kept, []
        done, self._done = self._done, []
        self._num_looks = 0
        self._put([*kept, Looks(done, 0)], step)
        self._micro_batch += sum(part.num_micro_batches for part in kept)

    def _put(self, all: list[Looks], step: int, *, first: int = 0) -> None:
        parts = _numbered(all, first)
        if parts and self._num_events < MAX_EVENTS:
            num_looks = sum(len(part.looks) for part in parts)
            self.writer.put(self._later(parts, step), 16 * num_looks, step=step)

    def _later(self, parts: list[Checked], step: int) -> Callable[[], Event | None]:
        now = time.time()
        resolve = send([scan for part in parts for scan in part.scans])

        def say() -> Event | None:
            found = iter(resolve())
            states = [part.states([next(found) for _ in part.scans]) for part in parts]
            passes = [(part.looks, known) for part, known in zip(parts, states, strict=True)]
            event = nonfinite_event(passes, step, now)
            self._num_events += event is not None
            return event if self._num_events <= MAX_EVENTS else None

        return say


def _numbered(all: list[Looks], first: int) -> list[Checked]:
    """All checks, with consecutive micro-batch numbers."""
    found: list[Checked] = []
    for some in all:
        for part in some.parts:
            if first:
                part.looks = [look._replace(micro_batch=look.micro_batch + first) for look in part.looks]
            found.append(part)
        first += some.num_micro_batches
    return found


def _worst(states: Sequence[State]) -> State:
    """The state of a tensor that was checked several times: non-finite if it was once, unknown if it never was."""
    known = [state for state in states if state is not None]
    return next((state for state in known if state != 0.0), 0.0) if known else None


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # a tensor of inference mode does not count its versions
        return -1


def _is_small(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.nbytes <= SMALL_BYTES


def _is_read_in_part(tensor: Tensor | None) -> bool:
    return tensor is not None and is_readable(tensor) and tensor.nbytes > END_BYTES["cpu" if tensor.is_cpu else "cuda"]


def _has_number(tensors: Sequence[Tensor | None], outputs: Sequence[int]) -> bool:
    """Whether the loss is among the outputs."""
    return any(tensor is not None and tensor.numel() == 1 for tensor in (tensors[at] for at in outputs))
