"""The structure of a model as plain words and numbers: modules, parameters, optimizers. Reads no tensor values.

Also finds layers and parameters kept in plain lists, dicts or attributes, where `model.parameters()` misses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from sonde.probe.model import ModelNames, ModuleRef, NamedParameter, class_of, type_name
from sonde.schema.words import dtype_name

_ACTIVATIONS: Final = tuple(
    getattr(nn, name)
    for name in (
        "ReLU", "ReLU6", "LeakyReLU", "PReLU", "RReLU", "ELU", "CELU", "SELU", "GELU", "SiLU", "Mish", "Tanh",
        "Sigmoid", "Hardtanh", "Hardswish", "Hardsigmoid", "Softplus", "Softsign", "Tanhshrink", "Softshrink",
        "Hardshrink", "Threshold", "LogSigmoid", "GLU",
    )
)  # fmt: skip
_NORMS: Final = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
_KINDS: Final[tuple[tuple[str, tuple[type, ...]], ...]] = (
    ("activation", _ACTIVATIONS),
    ("norm", _NORMS),
    ("dropout", (nn.modules.dropout._DropoutNd, nn.FeatureAlphaDropout)),
    ("conv", (nn.modules.conv._ConvNd,)),
    ("linear", (nn.Linear, nn.Bilinear)),
    ("embedding", (nn.Embedding, nn.EmbeddingBag)),
    ("rnn", (nn.RNNBase, nn.RNNCellBase)),
    ("attention", (nn.MultiheadAttention,)),
    ("softmax", (nn.Softmax, nn.LogSoftmax, nn.Softmax2d, nn.Softmin)),
    ("loss", (nn.modules.loss._Loss,)),
)
# Models from elsewhere have their own layers, whose class names follow torch's.
_ENDINGS: Final = (("norm", "Norm"), ("loss", "Loss"), ("attention", "Attention"), ("linear", "Linear"))
MAX_ITEMS: Final = 256
_OWN: Final = ("_parameters", "_buffers", "_modules")
"""The dictionaries in which torch keeps registered members."""


def kind_of(module: nn.Module) -> str:
    """One word for the function of a module.

    >>> kind_of(nn.ReLU()), kind_of(nn.Linear(2, 2)), kind_of(nn.Sequential(nn.Linear(2, 2)))
    ('activation', 'linear', 'container')
    """
    for kind, types in _KINDS:
        if issubclass(class_of(module), types):
            return kind
    name = type_name(module)
    for kind, ending in _ENDINGS:
        if name.endswith(ending):
            return kind
    return "container" if module._modules else "other"


def is_mode_dependent(module: nn.Module) -> bool:
    """Whether `train()` and `eval()` make a difference to it: dropout that drops, batch norm with running
    statistics."""
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return module.track_running_stats
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


def describe(
    names: ModelNames,
    optimizers: Mapping[int, Optimizer],
    calls: Mapping[str, tuple[int, int]],
    loss: str,
    fed_by: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The structure document. `optimizers` are listed by their numbers; `calls` is name -> (order of first call, number
    of calls) in one forward pass.

    `fed_by` names, for a linear layer, the one whose output it takes without a nonlinearity in between.
    """
    fed_by = fed_by or {}
    groups = {
        id(parameter): (number, place)
        for number, optimizer in optimizers.items()
        for place, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    parameters = [(named, named.ref()) for named in names.parameters.values()]
    described = [_parameter(named, p, groups.get(id(p))) for named, p in parameters if p is not None]
    model = names.model()
    # Not `if model`: that would ask a compiled model for its length, which it does not have.
    weights = list(model.parameters()) if model is not None else []
    return {
        "modules": [_module(place, calls, fed_by) for place in names.places.values() if place.ref() is not None],
        "parameters": described,
        "optimizers": [_optimizer(number, optimizer) for number, optimizer in optimizers.items()],
        "loss": loss,
        "unregistered": unregistered(model) if model is not None else [],
        "total_parameters": sum(_numel(p) for p in weights),
        "trainable_parameters": sum(_numel(p) for p in weights if p.requires_grad),
    }


def _module(place: ModuleRef, calls: Mapping[str, tuple[int, int]], fed_by: Mapping[str, str]) -> dict[str, Any]:
    module = place.ref()
    assert module is not None
    order, count = calls.get(place.name, (-1, 0))
    found = {
        "name": place.name,
        "type": place.module_type,
        "kind": kind_of(module),
        "order": order,
        "calls": count,
        "is_leaf": not module._modules,
    }
    if place.name in fed_by:
        found["fed_by"] = fed_by[place.name]
    for key in ("p", "dim", "inplace"):
        value = module.__dict__.get(key)
        if isinstance(value, bool | int | float):
            found[key] = value
    scaling = _scaling(module)
    if scaling:
        found["scaling"] = scaling
    return found


def _scaling(module: nn.Module) -> dict[str, float]:
    """The factor of B A in a low-rank adapter, by the adapter's name; it is not in any tensor."""
    if not any(name.startswith("lora_") for name in (*module._modules.keys(), *module._parameters.keys())):
        return {}  # attention has a number of the same name
    value = module.__dict__.get("scaling")
    by_name = value if isinstance(value, dict) else {"": value}
    return {str(name): float(scale) for name, scale in by_name.items() if isinstance(scale, int | float)}


def _parameter(named: NamedParameter, parameter: nn.Parameter, group: tuple[int, int] | None) -> dict[str, Any]:
    shape = [] if _is_lazy(parameter) else [int(n) for n in parameter.shape]
    return {
        "name": named.name,
        "shape": shape,
        "dtype": dtype_name(parameter.dtype),
        "trainable": bool(parameter.requires_grad),
        "owner": named.owner,
        "module_type": named.module_type,
        "in_optimizer": group is not None,
        "optimizer": -1 if group is None else group[0],
        "group": -1 if group is None else group[1],
        "fan_in": _fan_in(shape, named.module_type),
        "aliases": list(named.aliases),
    }


def _fan_in(shape: list[int], module_type: str) -> int:
    """The number of inputs that are summed into one output; 0 if nothing is summed."""
    if len(shape) < 2 or "Embedding" in module_type:
        return 0
    size = 1
    # A transposed convolution keeps its inputs in the first dimension, as do Linear layers written `x @ w`.
    summed = [shape[0], *shape[2:]] if "Transpose" in module_type or module_type == "Conv1D" else shape[1:]
    for length in summed:
        size *= length
    return size


def _numel(parameter: nn.Parameter) -> int:
    return 0 if _is_lazy(parameter) else parameter.numel()


def _optimizer(number: int, optimizer: Optimizer) -> dict[str, Any]:
    groups = [_group(group) for group in optimizer.param_groups]
    return {"number": number, "type": type(optimizer).__name__, "groups": groups}


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: _number(value) for key, value in group.items() if key != "params" and _is_plain(value)}
    found["num_params"] = len(group["params"])
    return found


def _is_plain(value: Any) -> bool:
    """A number, a bool, or several of them."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        # A learning rate on a device is not waited for.
        return value.item() if value.device.type == "cpu" else None
    if isinstance(value, list | tuple):
        return [_number(item) for item in value]
    return value


def _is_lazy(parameter: Any) -> bool:
    """Whether it has no shape yet."""
    return bool(is_lazy(parameter))


def unregistered(model: nn.Module) -> list[str]:
    """Their places and types: `blocks[0] (Linear)`. Frozen ones are left out: a teacher is hidden on purpose.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.blocks = [nn.Linear(2, 2)]
    >>> unregistered(Net())
    ['blocks[0] (Linear)']
    """
    known = {id(parameter) for parameter in model.parameters()}
    found = []
    for name, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            if attribute in _OWN or attribute.startswith("__"):
                continue
            path = f"{name}.{attribute}" if name else attribute
            found += [
                f"{path}{place} ({type(item).__name__})" for place, item in _items(value) if _is_lost(item, known)
            ]
    return found[:MAX_ITEMS]


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """The contents of a plain container, or a single tensor. Single modules are always registered."""
    if isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value[:MAX_ITEMS]))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in list(value.items())[:MAX_ITEMS])
    elif isinstance(value, Tensor):
        yield "", value


def _is_lost(item: Any, known: set[int]) -> bool:
    if isinstance(item, nn.Module):
        return any(parameter.requires_grad and id(parameter) not in known for parameter in item.parameters())
    return isinstance(item, Tensor) and item.requires_grad and item.is_leaf and id(item) not in known
