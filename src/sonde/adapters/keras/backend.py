"""In what Keras's back-ends differ: where values live, how they are kept, how many replicas there are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import keras
from keras import ops

BACKEND: Final[str] = keras.backend.backend()


def place() -> Any:
    """Where values made now may be used: the trace of JAX, the graph of TensorFlow."""
    if BACKEND == "jax":
        from jax.extend.core import get_opaque_trace_state

        return get_opaque_trace_state(convention="nnx")  # type: ignore[no-untyped-call]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    return None


def no_grad() -> Any:
    if BACKEND == "torch":
        import torch

        return torch.no_grad()
    return contextlib.nullcontext()


def optimizers(model: Any) -> list[Any]:
    """The one it was compiled with, and those a model of several parts keeps beside it."""
    found = [model.optimizer, *vars(model).values()]
    known = {id(one): one for one in found if isinstance(one, keras.optimizers.Optimizer)}
    return list(known.values())


def scale_of(optimizer: Any) -> Any:
    """What the loss, and so each gradient, is a multiple of."""
    dynamic = getattr(optimizer, "dynamic_scale", None)
    return optimizer.loss_scale_factor if dynamic is None else dynamic


def copied(value: Any) -> Any:
    """A value that stays what it is when the optimizer steps."""
    tensor = ops.convert_to_tensor(value)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.identity(tensor)  # Keras may give the variable itself, which is read when it is used: after the step
    return tensor.detach().clone() if BACKEND == "torch" else tensor


def dense(grad: Any) -> Any:
    """TensorFlow's gradients of embeddings are rows and their places."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(grad)
    return grad


def clipped(optimizer: Any, grads: Sequence[Any]) -> list[Any] | None:
    """What the optimizer makes of these gradients before it uses them; None where it leaves them as they are."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    limits = (inner.clipnorm, inner.global_clipnorm, inner.clipvalue)
    # Where gradients are accumulated it is their mean that is clipped, when all are there.
    if not any(limits) or inner.gradient_accumulation_steps:
        return None
    return list(inner._clip_gradients(list(grads)))


def is_compiled(model: Any) -> bool:
    """Whether a compiler sees the training step, and no operation of ours may be anything but Keras's."""
    return BACKEND != "torch" or bool(model.jit_compile)


def kept(value: Any) -> Any:
    """A number of its own: the next step may be given the memory of this one."""
    if BACKEND == "jax" and ops.is_tensor(value):
        import jax.numpy as jnp

        return jnp.array(value, copy=True)
    return value.detach().clone() if BACKEND == "torch" and ops.is_tensor(value) else value


def num_replicas(model: Any) -> int:
    return int(model.distribute_strategy.num_replicas_in_sync) if BACKEND == "tensorflow" else 1


def dtype(x: Any) -> str:
    return str(keras.backend.standardize_dtype(x.dtype))


def index(variables: Sequence[Any], wanted: Any) -> int:
    return next(i for i, variable in enumerate(variables) if variable is wanted)
