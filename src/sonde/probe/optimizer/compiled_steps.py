"""Optimizer steps inside code compiled by `torch.compile`, where no hook of ours is called.

A compiler that traces a step hook runs our function once, while it traces. The function leaves a call of ours in the
code around the compiled graphs, as the compiler does for a `print` that may wait until a graph has run: the graphs stay
the same, and none is broken. Uses the compiler only when it is already running; never imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch.optim import Optimizer

StepHook = Callable[[Optimizer, Any, Any], None]


class Follower(Protocol):
    """Receives steps in compiled code. Must not raise."""

    def begun(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Its step is about to be made."""

    def ended(self, optimizer: Optimizer) -> None:
        """The step that had started is done."""

    def made(self, optimizer: Optimizer) -> None:
        """Its step was made, in one graph: nothing of ours ran before it."""

    def unseen(self, optimizer: Optimizer) -> None:
        """Its step is being compiled, and no call could be left there. Called while it is compiled, not at each
        step."""


_followers: list[Follower] = []


def follow(follower: Follower) -> None:
    _followers.append(follower)


def unfollow(follower: Follower) -> None:
    _followers[:] = [other for other in _followers if other is not follower]


def beginning(hook: StepHook) -> StepHook:
    """A hook for the start of a step, which notifies followers from compiled code."""

    def begins(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            from torch._dynamo.comptime import comptime

            comptime(_trace_beginning)
            return
        hook(optimizer, args, kwargs)

    return begins


def ending(hook: StepHook) -> StepHook:
    """A hook for the end of a step, which notifies followers from compiled code."""

    def ends(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            from torch._dynamo.comptime import comptime

            comptime(_trace_ending)
            return
        hook(optimizer, args, kwargs)

    return ends


# ---------------------------------------------------------------------------------------------- called by compiled code


def _begun(optimizer: Optimizer, has_closure: bool) -> None:
    for follower in (*_followers,):
        follower.begun(optimizer, has_closure=has_closure)


def _ended(optimizer: Optimizer) -> None:
    for follower in (*_followers,):
        follower.ended(optimizer)


def _made(optimizer: Optimizer) -> None:
    for follower in (*_followers,):
        follower.made(optimizer)


_CALLS: Final[dict[str, Callable[..., None]]] = {"begun": _begun, "ended": _ended, "made": _made}
begun, ended, made = _begun, _ended, _made
"""The same functions, once a compiler is present: marked so that it does not compile what they call."""


# ---------------------------------------------------------------------------------------------- while a compiler traces


def _trace_beginning(context: Any) -> None:
    _trace(context, _leave_beginning)


def _trace_ending(context: Any) -> None:
    _trace(context, _leave_ending)


def _trace(context: Any, leave: Callable[[Any, Any, Any], None]) -> None:
    optimizer = None
    try:
        variable = context.get_local("optimizer")._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
        optimizer = variable.value
        tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        if tracer.export:
            return  # an exported program is not this training
        _check_that_calls_can_be_left(tracer, variable)
        _keep_compiler_out()
        leave(context, tracer.output.root_tx, variable)
    except Exception:  # noqa: BLE001 - internals of another version of torch: then steps cannot be followed
        if isinstance(optimizer, Optimizer):
            for follower in (*_followers,):
                follower.unseen(optimizer)


def _check_that_calls_can_be_left(tracer: Any, variable: Any) -> None:
    from torch._dynamo import config

    if variable.source is None:
        raise LookupError("compiled code has no name for an optimizer that is created inside it")
    if getattr(config, "nested_graph_breaks", False):
        raise NotImplementedError("the compiler loses calls where the graph breaks in an inner function")
    if not isinstance(tracer.output.root_tx.debug_locals, list):
        raise NotImplementedError("the compiler keeps its calls elsewhere")


def _keep_compiler_out() -> None:
    """Our work between two graphs must not be compiled in turn."""
    if begun is _begun:
        from torch._dynamo import disable

        globals().update({name: disable(call) for name, call in _CALLS.items()})  # type: ignore[no-untyped-call]


def _leave_beginning(context: Any, root: Any, optimizer: Any) -> None:
    if _find(root, "begun", optimizer) is None:  # one of another session's hooks, or of a base class
        _leave(root, "begun", optimizer, _has_closure(context))


def _leave_ending(context: Any, root: Any, optimizer: Any) -> None:
    """With no end of a graph since the step started, both calls would come after it."""
    entry = _find(root, "begun", optimizer)
    if entry is not None:
        root.debug_locals.remove(entry)
    _leave(root, "ended" if entry is None else "made", optimizer)


def _leave(root: Any, name: str, optimizer: Any, *constants: bool) -> None:
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.misc import DebuggingVariable

    call = DebuggingVariable(globals()[name], source=AttrSource(root.import_source(__name__), name))
    root.debug_locals.append((call, [optimizer, *(ConstantVariable.create(constant) for constant in constants)]))


def _find(root: Any, name: str, optimizer: Any) -> Any:
    """A call that was left since the last graph."""
    for entry in root.debug_locals:
        call, args = entry
        if call.value is globals()[name] and args[0].value is optimizer.value:
            return entry
    return None


def _has_closure(context: Any) -> bool:
    """Whether `step` got a closure; torch passes the optimizer itself as the first argument."""
    args = context.get_local("args")._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
    kwargs = context.get_local("kwargs")._i_will_not_complain_if_bc_breaks_VariableTracker().realize()
    given = [*args.items[1:], *kwargs.items.values()]
    return any(not (one.is_python_constant() and one.as_python_constant() is None) for one in given)
