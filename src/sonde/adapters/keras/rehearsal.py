"""Runs a recorded compiled step twice: as a rehearsal, which is measured, and then by Keras's own function.

A compiler fuses a measured step differently from an unmeasured one, and the last bits of the weights would differ. So
the rehearsal works on a copy of the state, or everything it changes is restored, and the step that counts is the one
that would have been made without sonde: by the same compiled function.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from sonde.adapters.keras.backend import BACKEND, is_compiled

Function = Callable[..., Any]
_OF_PYTHON: Final = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
"""TensorFlow operations that call the user's code, which must not be called twice."""


class Made(NamedTuple):
    """The result of a step."""

    result: Any
    """The value returned to Keras."""
    logs: Any = None
    """The sketches of the recorded step; None if it was not recorded."""
    error: Exception | None = None
    """Why it could not be recorded, although the step itself was made."""


class Stage(Protocol):
    """How a recorded step is made."""

    why_not: str
    """Why nothing is recorded; empty if something is."""
    kinds: frozenset[str]
    """The kinds of whole tensors that the next step returns: another compiled function for each set of them."""

    def make(self, plain: Function, recording: Function, *args: Any) -> Made:
        """Call Keras's function, and ours. Of several steps in one call, the first is recorded."""


def stage_for(model: Any) -> Stage:
    if BACKEND == "tensorflow" and not model.run_eagerly:
        return TensorFlowRehearsal(model)
    if BACKEND == "jax":
        return JaxRehearsal(model) if is_compiled(model) and not model.run_eagerly else EagerJax(model)
    return Eager(model)


class Eager:
    """Operations run one by one, and ours change none: the step is measured as it is made."""

    why_not = ""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.kinds: frozenset[str] = frozenset()

    def make(self, plain: Function, recording: Function, *args: Any) -> Made:
        if BACKEND == "torch":
            logs = recording(*args)
            return Made(logs, logs)
        first, rest = _taken(args[0], self._model)
        logs = recording(iter(first or args[0]))
        return Made(plain(iter(rest)) if rest else logs, logs)


class EagerJax(Eager):
    """The same, with a state that is passed from step to step."""

    def make(self, plain: Function, recording: Function, *args: Any) -> Made:
        first, rest = _taken(args[1], self._model)
        logs, state = recording(args[0], iter(first))
        return Made(plain(state, iter(rest)) if rest else (logs, state), logs)


class JaxRehearsal(Eager):
    """On a copy of the state, whose result is discarded."""

    def make(self, plain: Function, recording: Function, *args: Any) -> Made:
        state, iterator = args
        first, rest = _taken(iterator, self._model)
        logs, error = _rehearsed(lambda: recording(copied_tree(state), iter(first))[0]) if first else (None, None)
        return Made(plain(state, iter([*first, *rest])), logs, error)


class TensorFlowRehearsal:
    """On the variables themselves, which are restored."""

    def __init__(self, model: Any) -> None:
        import tensorflow as tf

        self._model, self._tf = model, tf
        self.why_not = ""
        step = tf.autograph.experimental.do_not_convert(self._one_step)
        compiled = functools.partial(tf.function, reduce_retracing=True, jit_compile=model.jit_compile)
        self._functions: defaultdict[frozenset[str], Any] = defaultdict(lambda: compiled(step))
        self._converted = model._autoconvert_optionals(lambda data: data)
        self._known: set[int] = set()
        self.kinds: frozenset[str] = frozenset()

    def make(self, plain: Function, recording: Function, *args: Any) -> Made:
        iterator = args[0]
        if not isinstance(iterator, self._tf.data.Iterator):
            self.why_not = "the data comes from tf.distribute"
            return Made(plain(iterator))
        spec = iterator.element_spec
        first, rest = _taken(iterator, self._model)
        logs, error = _rehearsed(lambda: self._rehearse(self._converted(first[0]))) if first else (None, None)
        return Made(plain(self._again([*first, *rest], spec) if first else iterator), logs, error)

    def _one_step(self, data: Any) -> Any:
        return self._model.distribute_strategy.run(self._model.train_step, args=(data,))

    def _rehearse(self, data: Any) -> Any:
        function = self._functions[self.kinds]
        graph = function.get_concrete_function(data).graph
        if not self._may_be_made_twice(graph):
            return None
        before = [(variable, variable.read_value()) for variable in graph.variables]
        try:
            return function(data)
        finally:
            for variable, value in before:
                variable.assign(value)

    def _may_be_made_twice(self, graph: Any) -> bool:
        if id(graph) not in self._known:
            document = graph.as_graph_def()
            nodes = [*document.node, *(node for function in document.library.function for node in function.node_def)]
            if any(node.op in _OF_PYTHON for node in nodes):
                self.why_not = "its training step calls Python code (tf.py_function), which must not be called twice"
            self._known.add(id(graph))
        return not self.why_not

    def _again(self, items: list[Any], spec: Any) -> Any:
        """An iterator over these, of the same type: Keras's function is not traced again for it."""
        data = self._tf.data
        whole = data.Dataset.from_tensors(items[0])
        for item in items[1:]:
            whole = whole.concatenate(data.Dataset.from_tensors(item))
        return iter(data.experimental.from_variant(data.experimental.to_variant(whole), spec))


def _taken(iterator: Iterator[Any], model: Any) -> tuple[list[Any], list[Any]]:
    """The first batch of this call, and the others; both are empty at the end of the data."""
    items = list(islice(iterator, int(model.steps_per_execution)))
    return items[:1], items[1:]


def _rehearsed(rehearse: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result of the rehearsal, or its error: if that is the user's, the step itself will raise it too."""
    with _same_draws():
        try:
            return rehearse(), None
        except Exception as error:  # noqa: BLE001 - raised by the step itself, or reported after it
            return None, error


@contextlib.contextmanager
def _same_draws() -> Iterator[None]:
    """Code that is traced a second time may draw random numbers in Python."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def copied_tree(state: Any) -> Any:
    """Keras donates the state, and its memory, to the compiled step."""
    import jax
    import jax.numpy as jnp

    return jax.tree_util.tree_map(lambda x: jnp.array(x, copy=True) if isinstance(x, jax.Array) else x, state)
