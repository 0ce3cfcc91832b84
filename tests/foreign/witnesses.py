"""An oracle of several models that make one step together, as those of a GAN, and of optimizers that come and go."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oracle import Oracle, floating, root_name


class Witnesses(Oracle):
    """`watch` adds a model; `follow` an optimizer, in the order in which sonde numbers them."""

    def __init__(self) -> None:
        self._models: list[tuple[nn.Module, str, list[nn.Module]]] = []
        self._hooked: list[nn.Module] = []
        self._waiting: list[tuple[str, Tensor]] = []
        self.histories: list[Witnesses] = []
        """What had been made before each rewind."""
        self.is_blind = False
        """No hook can be put on modules: they are compiled. What the model returns has to be told by `saw`."""
        self.is_reentrant = False
        """Checkpointed parts are computed without gradients first, and in the backward pass once more."""
        super().__init__(nn.Module())

    def watch(self, model: nn.Module, *, prefix: str = "", compiled: nn.Module | None = None) -> None:
        self._models.append((model, prefix, [] if compiled is None else list(compiled.modules())))
        self._watch_modules()

    def follow(self, optimizer: Optimizer) -> None:
        self._watch_modules()  # a layer may have been replaced together with its optimizer
        super().follow(optimizer)

    def leave(self, optimizer: Optimizer) -> None:
        """The program lets go of it: it is waited for no longer."""
        optimizer.__dict__.pop("step", None)
        self._optimizers = [known for known in self._optimizers if known is not optimizer]

    def rewind(self, step: int) -> None:
        """What was made from this step on does not count, but stays readable as an earlier attempt."""
        before = copy.copy(self)
        for name, value in vars(self).items():
            setattr(before, name, copy.copy(value) if isinstance(value, dict | set) else value)
        self.histories.append(before)
        self.counted = {key for key in self.counted if key[2] < step}
        for found in (self.tallies, self.more):
            for key in [key for key in found if key[2] >= step]:
                del found[key]
        for key in [key for key in self.scalars if key[1] >= step]:
            del self.scalars[key]
        self.step, self.is_over = step, True
        self._begin_step_if_over()
        self.step = step

    @property
    def last_step(self) -> int:
        """The last that an optimizer has made: a forward pass alone does not count."""
        return self.step if self._has_stepped or self.is_over else self.step - 1

    def _outputs(self, site: str, output: Any) -> None:
        """Of the step that an optimizer makes next, whichever that is."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for number, (path, tensor) in enumerate(floating(output)):
                self._waiting.append((f"{site}:{path}" if number else site, tensor.detach().clone()))

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        for site, tensor in waiting:
            self._add("act", site, tensor)

    def _stepped(self, number: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if number in self._has_stepped:
            self.is_over = True  # this one steps again: the others sat the step out
        self._begin_step_if_over()
        self._settle()
        result = super()._stepped(number, original, *args, **kwargs)
        self._settle()  # of a closure
        return result

    def sweep(self) -> None:
        """Parameters and gradients as they are, where no optimizer steps."""
        self._settle()
        for model, prefix, _ in self._models:
            for name, p in model.named_parameters():
                self._add("param", prefix + name, p)
                if p.grad is not None:
                    self._gradient(prefix + name, p)
        self.is_over = True

    def skip(self, optimizer: Optimizer) -> None:
        """A step that changes nothing."""
        number = next(n for n, known in enumerate(self._optimizers) if known is optimizer)
        self._stepped(number, lambda: None)

    def saw(self, site: str, output: Tensor) -> None:
        """A module returned this, on which no hook can be."""
        self._called(site, nn.Module(), (), output)

    def _watch_modules(self) -> None:
        for model, prefix, unseen in [] if self.is_blind else self._models:
            named = [(stripped(name), module) for name, module in model.named_modules()]
            root = root_name(name for name, _ in named)
            sites: set[str] = set()
            for name, module in named:
                site = (prefix + name).rstrip(".") or root
                is_wrapped = site in sites  # a wrapper and what it wraps are one
                sites.add(site)
                if not is_wrapped and not any(module is known for known in (*self._hooked, *unseen)):
                    self._hooked.append(module)
                    # Before the hooks of others, which may return something else.
                    handle = module.register_forward_hook(functools.partial(self._called, site), prepend=True)
                    self._undo.append(handle.remove)

    def _called(self, site: str, module: nn.Module, args: Any, output: Any) -> None:
        is_recomputed = torch._C._current_graph_task_id() != -1
        if is_recomputed and self.is_reentrant and torch.is_grad_enabled():
            self._outputs(site, output)  # the first pass was made without gradients, and not counted
        else:
            super()._called(site, module, args, output)

    def _named(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        names = {
            id(p): prefix + stripped(name) for model, prefix, _ in self._models for name, p in model.named_parameters()
        }
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in names:
                    yield names[id(p)], p, group


def stripped(name: str) -> str:
    """Without the names of wrappers: the same layer has the same name with and without them."""
    for wrapper in ("_orig_mod", "base_model.model", "module"):
        name = name.removeprefix(f"{wrapper}.") if name != wrapper else ""
    return "" if name == "base_model" else name
