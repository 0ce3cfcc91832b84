"""Sees calls of Python functions of torch, whoever holds them and however they were imported.

The function object stays what it is and only its code is exchanged. Replacing the attribute of its module would miss
those who took it before (`criterion = F.cross_entropy`), would make a model that holds one unpicklable, and would be
remembered by torch.compile, which knows these functions by identity. The price: a warning such a function gives its
caller names our line, not the caller's.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

Seen = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]
"""(name, positional arguments, keywords, result) of a call; must not raise: see `guards.protected`."""

_originals: Final[dict[str, types.FunctionType]] = {}
"""Copies with the true code. They stay for good: another thread may be in the middle of a call when watching ends."""
_watchers: Final[dict[str, tuple[Seen, ...]]] = {}
_swapped: Final[dict[str, types.FunctionType]] = {}


class FunctionTap:
    """Calls `seen` after each eager call of these functions, until `detach`. The last tap to go restores them.

    tap = FunctionTap(torch.nn.functional, ["relu"], protected(seen, on_error, "relu"))
    """

    def __init__(self, module: types.ModuleType, names: Iterable[str], seen: Seen) -> None:
        self.seen = seen
        self.names: list[str] = []
        for name in names:
            function = getattr(module, name, None)
            # Compiled into torch, or with a closure our code has no cells for: such calls are simply not seen.
            if isinstance(function, types.FunctionType) and not function.__closure__:
                self.names.append(name)
                _add(name, function, seen)

    def detach(self) -> None:
        for name in self.names:
            _remove(name, self.seen)
        self.names = []


def _add(name: str, function: types.FunctionType, seen: Seen) -> None:
    if name not in _swapped:
        _originals[name] = _copy(function)
        function.__code__ = _code(name)
        # What asks for the signature or the source (inspect, TorchScript) is led to the original.
        function.__wrapped__ = _originals[name]  # type: ignore[attr-defined]
        _swapped[name] = function
    _watchers[name] = (*_watchers.get(name, ()), seen)


def _remove(name: str, seen: Seen) -> None:
    _watchers[name] = tuple(other for other in _watchers.get(name, ()) if other is not seen)
    if _watchers[name]:
        return
    function = _swapped.pop(name, None)
    # Unless somebody has exchanged it again since.
    if function is not None and function.__code__.co_filename == __file__:
        function.__code__ = _originals[name].__code__
        if getattr(function, "__wrapped__", None) is _originals[name]:
            del function.__wrapped__  # type: ignore[attr-defined]


def _copy(function: types.FunctionType) -> types.FunctionType:
    copied = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__annotations__ = dict(function.__annotations__)
    copied.__module__, copied.__doc__ = function.__module__, function.__doc__
    copied.__dict__.update(function.__dict__)
    return copied


def _template(*args: Any, **kwargs: Any) -> Any:
    # It runs with the globals of the module it was put into: everything else is imported here.
    from sonde.probe.functions import call

    return call("<name>", args, kwargs)


def _code(name: str) -> types.CodeType:
    code = _template.__code__
    consts = tuple(name if const == "<name>" else const for const in code.co_consts)
    return code.replace(co_name=name, co_consts=consts)


def call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The original's result, after those who watch have seen it."""
    result = _originals[name](*args, **kwargs)
    if not torch.compiler.is_compiling():
        for seen in _watchers[name]:
            seen(name, args, kwargs, result)
    return result
