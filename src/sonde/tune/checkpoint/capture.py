"""Copies everything a run needs to resume from live objects into a `Payload`, and restores it from one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from sonde.errors import CorruptError, UsageError
from sonde.tune.checkpoint.optimizers import (
    check_optimizer,
    encode_optimizer,
    parameter_names,
    put_optimizer,
    put_state,
    take_state,
)
from sonde.tune.checkpoint.rng import put_rng, take_rng
from sonde.tune.checkpoint.storage import Payload
from sonde.tune.checkpoint.tree import Encoder, decode
from sonde.tune.checkpoint.weights import Weights, put_weights, take_weights

_KEY: Final = re.compile(r"[\w+-]{1,64}", re.ASCII)


def as_mapping(given: Any, what: str) -> dict[str, Any]:
    """One object, several in a list, or several by name; a single one has the name ""."""
    if given is None:
        return {}
    if isinstance(given, Mapping) and not hasattr(given, "state_dict"):
        named = dict(given)
    elif isinstance(given, list | tuple):
        named = {str(number): each for number, each in enumerate(given)}
    else:
        return {"": given}
    for key in named:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise UsageError(f"the name of a {what} may contain letters, digits, _, + and -; got {key!r}.")
    return named


def require_state(named: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The same, checking that each has a state_dict()."""
    for each in named.values():
        if not callable(getattr(each, "state_dict", None)):
            raise UsageError(
                f"{what}= must be an object with a state_dict(), or a list or mapping of them; got {each!r}."
            )
    return dict(named)


@dataclass(slots=True, kw_only=True)
class Capture:
    """The live objects. `models` and `optimizers` go to separate files, the rest to state.json."""

    models: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By group ("scheduler", "scaler", "dataloader", "extra") and name."""
    adapters_only: bool = False

    def take(self) -> Payload:
        """Tensors are the live ones, not copies."""
        payload = Payload()
        weights = {key: take_weights(model, adapters_only=self.adapters_only) for key, model in self.models.items()}
        rest = Encoder()
        for key, kept in weights.items():
            payload.tensors[_model_file(key)] = kept.tensors
        payload.state["models"] = {
            key: {"ties": kept.ties, "base": kept.base, "others": rest.encode(kept.others, f"model.{key}")}
            for key, kept in weights.items()
        }
        optim = Encoder()
        names = parameter_names(self.models)
        payload.state["optimizers"] = {
            key: encode_optimizer(optim, optimizer, key, names) for key, optimizer in self.optimizers.items()
        }
        for group, owners in self.others.items():
            payload.state[group] = {
                key: rest.encode(take_state(owner, f"{group} {key}".strip()), f"{group}.{key}" if key else group)
                for key, owner in owners.items()
            }
        payload.state["rng"] = rest.encode(take_rng(), "rng")
        for stem, tensors in (("optimizer", optim.tensors), ("state", rest.tensors)):
            if tensors:
                payload.tensors[stem] = tensors
        return payload

    def put(self, payload: Payload, *, rng: bool = True) -> None:
        """Everything is checked before anything is changed; the random states come last."""
        state = payload.state
        rest = payload.tensors.get("state", {})
        weights = {key: _weights(payload, key, rest) for key in self.models}
        optimizers = {
            key: decode(_entry(state, "optimizers", key), payload.tensors.get("optimizer", {}))
            for key in self.optimizers
        }
        others = {
            group: {key: decode(_entry(state, group, key), rest) for key in owners}
            for group, owners in self.others.items()
        }
        random_states = decode(state.get("rng"), rest)
        for key, optimizer in self.optimizers.items():
            check_optimizer(optimizer, optimizers[key], key)
        for key, model in self.models.items():
            put_weights(model, weights[key])
        for key, optimizer in self.optimizers.items():
            put_optimizer(optimizer, optimizers[key])
        for group, owners in self.others.items():
            for key, owner in owners.items():
                put_state(owner, others[group][key])
        if rng:
            put_random_states(random_states)


def put_random_states(states: Any) -> None:
    """Restore the random states; CorruptError if a generator rejects one."""
    try:
        put_rng(states)
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        if isinstance(error, UsageError):
            raise
        raise CorruptError(f"cannot read the checkpoint's random states ({error!r}).") from error


def _model_file(key: str) -> str:
    return f"model.{key}" if key else "model"


def _weights(payload: Payload, key: str, rest: Mapping[str, Any]) -> Weights:
    entry = _entry(payload.state, "models", key)
    try:
        tensors = payload.tensors[_model_file(key)]
        ties = {str(name): str(known) for name, known in entry["ties"].items() if known in tensors}
        base = {str(name): int(checksum) for name, checksum in entry["base"].items()}
        return Weights(tensors, ties, decode(entry["others"], rest), base)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptError(f"the checkpoint's state does not match its files ({error!r}).") from error


def _entry(state: Mapping[str, Any], group: str, key: str) -> Any:
    entries = state.get(group) or {}
    if not isinstance(entries, dict) or key not in entries:
        has = ", ".join(repr(name) for name in entries) or "none"
        raise UsageError(f"the checkpoint has no {group} {key!r}; it has {has}. Restore without it.")
    return entries[key]
