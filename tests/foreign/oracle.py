"""An independent witness of a training: plain hooks and float64, no part of sonde.

It watches a separate training, which is then repeated bit for bit with sonde. `compare(run, oracle)` of comparison.py
reports what differs. In a plain loop:

    oracle = Oracle(model, optimizer)
    for x, y in batches:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        oracle.log({"loss": loss})
    oracle.detach()

Inside a trainer call `oracle.follow(optimizer)` once the optimizer is made, and set `oracle.step` after a rewind.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tally import EXACT, ROUNDED, SQUARES, Expected, Tally, added, dot, second_moment_lag

Key = tuple[str, str, int]
"""(kind, site, step)."""
MAX_CLIPS = 8
COUNTERS = frozenset({"step", "eta", "mu", "mu_product"})
"""What torch's optimizers keep one number of for each parameter."""


attached: set[Oracle] = set()
"""Those that are not detached yet: a test that fails must not leave its replaced functions to the next one."""


class Oracle:
    """Sees every module call in grad mode, every clipping and every step of the given optimizers.

    `rename` maps the names of torch to the names a user of sonde sees, where a trainer wraps the model. With `steps`
    only these are measured: all the others are counted and nothing more.
    """

    def __init__(
        self,
        model: nn.Module,
        *optimizers: Optimizer,
        rename: Callable[[str], str] = lambda name: name,
        prefix: str = "",
        steps: Container[int] | None = None,
    ) -> None:
        self.model, self.rename, self.prefix, self.steps = model, rename, prefix, steps
        self.step = 0
        self.is_over = False
        """The step has been made; the next forward pass begins another."""
        self.tallies: dict[Key, Tally] = {}
        self.counted: set[Key] = set()
        """What was there in the steps that are not measured."""
        self.more: dict[Key, dict[str, Expected]] = {}
        """Stats that need more than one tensor: clipping, gradient and update, moments."""
        self.scalars: dict[tuple[str, int], Expected] = {}
        self._optimizers: list[Optimizer] = []
        self._has_stepped: set[int] = set()
        self._is_paused = False
        self._passed: list[tuple[str, Tally]] = []
        """Outputs of modules whose step is not known yet."""
        self._unclipped: dict[int, Tally] = {}
        self._clips: dict[int, Clip] = {}
        """The first of this step for each parameter."""
        self._raw: dict[str, Tally] = {}
        """Gradients of this step before clipping: two optimizers may have a parameter in common."""
        self._moves: dict[str, list[Move]] = {}
        attached.add(self)
        self._undo: list[Callable[[], None]] = []
        self._watch_modules()
        self._watch_clipping()
        for optimizer in optimizers:
            self.follow(optimizer)

    def detach(self) -> None:
        attached.discard(self)
        self._place_passes()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Module calls in here belong to no step."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def measures(self, step: int) -> bool:
        return self.steps is None or step in self.steps

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """What the loop gives to `sonde.log` at this moment."""
        for name, value in values.items():
            number = float(value.detach()) if isinstance(value, Tensor) else float(value)
            self.scalars[name, self.step if step is None else step] = Expected(number, EXACT)

    # --------------------------------------------------------------------------------------------------- activations

    def _watch_modules(self) -> None:
        named = list(self.model.named_modules())
        root = root_name([self.rename(name) for name, _ in named])
        for name, module in named:
            site = (self.prefix + self.rename(name)).rstrip(".") or root
            handle = module.register_forward_hook(functools.partial(self._called, site))
            self._undo.append(handle.remove)

    def _called(self, site: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_paused or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return  # evaluation; or the backward pass recomputes a checkpointed part
        self._begin_step_if_over()
        self._outputs(site, output)

    def _outputs(self, site: str, output: Any) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for number, (path, tensor) in enumerate(floating(output)):
                self._passed.append((f"{site}:{path}" if number else site, Tally.of(tensor)))
        if not self._has_stepped:
            self._place_passes()

    def _place_passes(self) -> None:
        """Where some optimizers have stepped and others not, the next one to step tells whose passes these were."""
        for site, tally in self._passed:
            key = ("act", site, self.step)
            self.tallies[key] = self.tallies[key] + tally if key in self.tallies else tally
        self._passed.clear()

    def _begin_step_if_over(self) -> None:
        if self.is_over:
            self.step, self.is_over = self.step + 1, False
            self._has_stepped.clear()
            self._raw.clear()
            self._moves.clear()

    def _add(self, kind: str, site: str, tensor: Tensor) -> Tally | None:
        key = (kind, site, self.step)
        if not self.measures(self.step):
            self.counted.add(key)
            return None
        tally = Tally.of(tensor)
        self.tallies[key] = self.tallies[key] + tally if key in self.tallies else tally
        return tally

    # ----------------------------------------------------------------------------------------------------- clipping

    def _watch_clipping(self) -> None:
        for place in (nn.utils, nn.utils.clip_grad):
            self._replace(place, "clip_grad_norm_", self._clip_by_norm)
            self._replace(place, "clip_grad_value_", self._clip_by_value)

    def _replace(self, place: Any, name: str, by: Callable[..., Any]) -> None:
        original = getattr(place, name)
        setattr(place, name, functools.wraps(original)(functools.partial(by, original)))
        self._undo.append(lambda: setattr(place, name, original))

    def _clip_by_norm(self, original: Any, parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        listed = as_list(parameters)
        self._keep_unclipped(listed)
        total = sum(Tally.of(p.grad).sumsq for p in listed if p.grad is not None) ** 0.5
        result = original(listed, max_norm, *args, **kwargs)
        # torch computes it in the type of the gradients: the number that the factor was made of is what counts.
        rounding = max([1e-5, *(torch.finfo(p.grad.dtype).eps for p in listed if p.grad is not None)])
        assert abs(float(result) - total) <= rounding * total, f"clip_grad_norm_ saw {float(result)}, not {total}"
        clip = Clip(Expected(float(result), EXACT), Expected(float(max_norm), EXACT))
        for p in listed:
            if p.grad is not None:
                self._clips.setdefault(id(p), clip)
        return result

    def _clip_by_value(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = as_list(parameters)
        self._keep_unclipped(listed)
        return original(listed, *args, **kwargs)

    def _keep_unclipped(self, parameters: list[Tensor]) -> None:
        """As before the first clipping of this step."""
        if not self.measures(self._next_step):
            return
        for p in parameters:
            if p.grad is not None:
                self._unclipped.setdefault(id(p), Tally.of(p.grad))

    # ---------------------------------------------------------------------------------------------- optimizer steps

    @property
    def _next_step(self) -> int:
        return self.step + self.is_over

    def follow(self, optimizer: Optimizer) -> None:
        """Read what this optimizer is given and what it does, around its `step`."""
        if any(known is optimizer for known in self._optimizers):
            return
        self._optimizers.append(optimizer)
        number, original = len(self._optimizers) - 1, optimizer.step

        @functools.wraps(original)
        def step(self_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._stepped(number, original, *args, **kwargs)

        # A bound method, as learning rate schedulers expect it.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        self._undo.append(lambda: optimizer.__dict__.pop("step", None))

    def _stepped(self, number: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if number in self._has_stepped:
            self.is_over = True  # this one steps again: the others sat the step out
        self._begin_step_if_over()
        self._place_passes()
        optimizer = self._optimizers[number]
        named = list(self._named(optimizer))
        has_closure = bool(args) or kwargs.get("closure") is not None
        before = {name: p.detach().clone() for name, p, _ in named}
        place = f"optim/{number}" if number else "optim"
        for number_, group in enumerate(optimizer.param_groups):
            name = f"{place}/group{number_}/lr" if number_ else f"{place}/lr"
            self.scalars[name, self.step] = Expected(float(group["lr"]), EXACT)
        for name, p, _ in named:
            self._add("param", name, p)
            if not has_closure and p.grad is not None:
                self._gradient(name, p)
        # An optimizer may change or clear the gradients it was given.
        grads = {name: p.grad.detach().clone() for name, p, _ in named if p.grad is not None}
        result = original(*args, **kwargs)
        for name, p, group in named:
            if has_closure and p.grad is not None:
                self._gradient(name, p)
                grads[name] = p.grad.detach().clone()
            self._update(name, p, before[name], grads.get(name), optimizer.state.get(p, {}), group)
        self._clipped(place, optimizer)
        self._has_stepped.add(number)
        self.is_over = len(self._has_stepped) == len(self._optimizers)
        return result

    def _clipped(self, place: str, optimizer: Optimizer) -> None:
        """The norms that clipping saw; where layers were clipped one by one, of each."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        clips = dict.fromkeys(clip for p in params if (clip := self._clips.pop(id(p), None)) is not None)
        for number, clip in enumerate(list(clips)[:MAX_CLIPS]):
            where = f"{place}/clip.{number}" if number else place
            self.scalars[f"{where}/grad_norm", self.step] = clip.total
            self.scalars[f"{where}/max_norm", self.step] = clip.limit

    def _named(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        names = {id(p): self.prefix + self.rename(name) for name, p in self.model.named_parameters()}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in names:
                    yield names[id(p)], p, group

    def _gradient(self, name: str, p: Tensor) -> None:
        assert p.grad is not None
        own = self._add("grad", name, p.grad)
        if own is None:
            return
        unclipped = self._unclipped.pop(id(p), own)
        raw = self._raw[name] = self._raw[name] + unclipped if name in self._raw else unclipped
        tally = self.tallies["grad", name, self.step]
        # Clipping multiplies numbers by a factor of their type: that is rounded once for each of them.
        tolerance = SQUARES if unclipped is own else max(1e-6, torch.finfo(p.grad.dtype).eps)
        is_known = unclipped is own and own.num_finite
        factor = 1.0 if is_known else _over(tally.norm, raw.norm)  # NaN if every element is zero or NaN
        self.more["grad", name, self.step] = {
            "norm_preclip": Expected(raw.norm, tolerance * raw.norm),
            "clip_factor": Expected(factor, tolerance * factor),
        }

    def _update(
        self, name: str, p: Tensor, before: Tensor, grad: Tensor | None, state: Any, group: dict[str, Any]
    ) -> None:
        moved = p.detach().double() - before.double() if not p.is_complex() else p.detach() - before
        for key, value in state.items():
            if isinstance(value, Tensor) and _is_of_elements(key, value, p):
                self._add("optim", f"{name}.{key}", value)
        if self._add("update", name, moved) is None:
            return
        moves = self._moves.setdefault(name, [])
        moves.append(Move(grad, moved, dict(state), group))
        update, param = (self.tallies[kind, name, self.step] for kind in ("update", "param"))
        ratio = _over(update.norm, param.norm)  # infinite for a bias that begins at zero
        more = {"ratio": Expected(ratio, 2 * ROUNDED * ratio)}
        if all(move.grad is not None and move.grad.layout is torch.strided for move in moves):
            more |= self._paired(name, moves, update)
        self.more["update", name, self.step] = more

    def _paired(self, name: str, moves: list[Move], update: Tally) -> dict[str, Expected]:
        grad = self.tallies["grad", name, self.step]
        product = added(dot(move.grad, move.moved) for move in moves)
        more = {"grad_update_dot": product, **_cosine("grad_cosine", product, grad.norm * update.norm)}
        if all(move.has_moments for move in moves):
            product = added(dot(move.grad, move.state["exp_avg"]) for move in moves)
            first = self.tallies["optim", f"{name}.exp_avg", self.step]
            lag = added(second_moment_lag(move.grad, move.state, move.group) for move in moves)
            more["grad_moment_dot"] = product
            more["second_moment_lag"] = Expected(lag.value / len(moves), lag.tolerance / len(moves))
            more |= _cosine("moment_cosine", product, grad.norm * first.norm)
        return more


@dataclasses.dataclass(eq=False)
class Clip:
    """One call of `clip_grad_norm_`."""

    total: Expected
    limit: Expected


class Move(NamedTuple):
    """What one optimizer did to one parameter."""

    grad: Any
    moved: Tensor
    state: dict[str, Any]
    group: dict[str, Any]

    @property
    def has_moments(self) -> bool:
        moments = (self.state.get("exp_avg"), self.state.get("exp_avg_sq"))
        return all(isinstance(m, Tensor) and m.shape == self.moved.shape for m in moments)


def _is_of_elements(key: str, value: Tensor, p: Tensor) -> bool:
    """Whether a state belongs to the elements of a parameter, and is not one number that is kept for all of them."""
    return value.numel() > 1 or (value.shape == p.shape and key not in COUNTERS)


def _cosine(name: str, product: Expected, norms: float) -> dict[str, Expected]:
    """NaN if one of the vectors is zero."""
    return {name: Expected(_over(product.value, norms), _over(product.tolerance, norms) + ROUNDED)}


def _over(value: float, by: float) -> float:
    if by:
        return value / by
    return math.inf if value else math.nan


def root_name(names: Iterable[str]) -> str:
    """The site of the model itself: "model", unless one of its modules has that name."""
    taken = set(names)
    return next(name for name in ("model", "root", "the model") if name not in taken)


def as_list(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def floating(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of every floating-point or complex tensor in tuples, lists, mappings and dataclasses."""
    if isinstance(output, Tensor):
        if type(output) in (Tensor, nn.Parameter) and (output.is_floating_point() or output.is_complex()):
            yield path, output
        return
    for key, item in children(output):
        yield from floating(item, f"{path}.{key}" if path else str(key))


def children(output: Any) -> list[tuple[Any, Any]]:
    if isinstance(output, Mapping):
        return list(output.items())
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return list(zip(output._fields, output, strict=True))
    if isinstance(output, list | tuple):
        return list(enumerate(output))
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [(field.name, getattr(output, field.name, None)) for field in dataclasses.fields(output)]
    return []
