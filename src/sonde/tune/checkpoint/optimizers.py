"""The state of optimizers, schedulers and other objects with a `state_dict`, as a tree, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sonde.errors import UsageError
from sonde.schema.names import strip_wrappers
from sonde.tune.checkpoint.rng import is_generator, put_generator, take_generator
from sonde.tune.checkpoint.tree import Encoder


def encode_optimizer(encoder: Encoder, optimizer: Optimizer, key: str, names: Mapping[int, str]) -> Any:
    """Tensors are named after their parameter: `layers.0.weight.exp_avg`."""
    state = optimizer.state_dict()
    numbers = _parameter_names(optimizer, names)
    prefix = f"{key}/" if key else ""
    encoded: dict[str, Any] = {
        name: encoder.encode(value, f"{prefix}{name}") for name, value in state.items() if name != "state"
    }
    entries = [
        [number, encoder.encode(entry, f"{prefix}{numbers.get(number, f'state.{number}')}")]
        for number, entry in state["state"].items()
    ]
    return {**encoded, "state": {"$": "dict", "items": entries}}


def parameter_names(models: Mapping[str, nn.Module]) -> dict[int, str]:
    """id of each parameter -> its name."""
    found: dict[int, str] = {}
    for key, model in models.items():
        for name, parameter in model.named_parameters():
            found.setdefault(id(parameter), f"{key}/{strip_wrappers(name)}" if key else strip_wrappers(name))
    return found


def _parameter_names(optimizer: Optimizer, names: Mapping[int, str]) -> dict[int, str]:
    """A state dict numbers parameters in the order of the groups."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {number: names[id(p)] for number, p in enumerate(parameters) if id(p) in names}


def check_optimizer(optimizer: Optimizer, state: Mapping[str, Any], key: str) -> None:
    """Check that the state belongs to an optimizer like this one, before anything is changed."""
    live = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in state["param_groups"]]
    if live != saved:
        raise UsageError(
            f'the optimizer "{key}" has groups of {live} parameters, but the checkpoint has {saved}. Build it as it '
            "was when the checkpoint was saved."
        )


def put_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """torch casts the state to the type of the parameters and breaks lists of strings; here everything stays as it
    was."""
    optimizer.load_state_dict(state)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, saved in state["state"].items():
        live = optimizer.state[parameters[number]]
        for name, value in saved.items():
            if not isinstance(value, Tensor):
                live[name] = _moved(value, parameters[number].device)
            elif live[name].dtype != value.dtype:
                live[name] = value.to(live[name].device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    return value


def take_state(owner: Any, name: str) -> Any:
    """The state_dict of an object; functions in a scheduler's state stay with the live scheduler."""
    if is_generator(owner):
        return take_generator(owner)
    if not hasattr(owner, "state_dict"):
        raise UsageError(f'"{name}" is a {type(owner).__name__}, which has no state_dict() to save.')
    state = owner.state_dict()
    return {key: value for key, value in state.items() if not callable(value)} if isinstance(state, dict) else state


def put_state(owner: Any, state: Any) -> None:
    if is_generator(owner):
        put_generator(owner, state)
    else:
        owner.load_state_dict(state)
