"""Differences between Keras back-ends: where values are, how they are kept, and the number of replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import keras
from keras import ops

BACKEND: Final[str] = keras.backend.backend()


def place() -> Any:
    """The scope in which values created now may be used: the trace of JAX, the graph of TensorFlow."""
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
    """The optimizer it was compiled with, and those that a model of several parts keeps in addition."""
    found = [model.optimizer, *vars(model).values()]
    known = {id(one): one for one in found if isinstance(one, keras.optimizers.Optimizer)}
    return list(known.values())


def scale_of(optimizer: Any) -> Any:
    """The factor of the loss, and so of each gradient."""
    dynamic = getattr(optimizer, "dynamic_scale", None)
    return optimizer.loss_scale_factor if dynamic is None else dynamic


def copied(value: Any) -> Any:
    """A value that does not change when the optimizer steps."""
    tensor = ops.convert_to_tensor(value)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.identity(tensor)  # Keras may return the variable itself, which is read on use: after the step
    return tensor.detach().clone() if BACKEND == "torch" else tensor


def dense(grad: Any) -> Any:
    """TensorFlow's gradients of embeddings are rows and their indices."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(grad)
    return grad


def clipped(optimizer: Any, grads: Sequence[Any]) -> list[Any] | None:
    """The gradients as the optimizer modifies them before use; None if it does not."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    limits = (inner.clipnorm, inner.global_clipnorm, inner.clipvalue)
    # With accumulated gradients, their mean is clipped, when all are there.
    if not any(limits) or inner.gradient_accumulation_steps:
        return None
    return list(inner._clip_gradients(list(grads)))


def is_compiled(model: Any) -> bool:
    """Whether the training step is compiled, so that we may only use Keras's operations."""
    return BACKEND != "torch" or bool(model.jit_compile)


def kept(value: Any) -> Any:
    """A separate copy of a number: the next step may reuse the memory of this one."""
    if BACKEND == "jax" and ops.is_tensor(value):
        import jax.numpy as jnp

        return jnp.array(value, copy=True)
    return value.detach().clone() if BACKEND == "torch" and ops.is_tensor(value) else value


def wait_for_callbacks() -> None:
    """Wait for what compiled functions of JAX still have to report."""
    import jax

    jax.effects_barrier()  # type: ignore[no-untyped-call]


def num_replicas(model: Any) -> int:
    return int(model.distribute_strategy.num_replicas_in_sync) if BACKEND == "tensorflow" else 1


def dtype(x: Any) -> str:
    return str(keras.backend.standardize_dtype(x.dtype))


def index(variables: Sequence[Any], wanted: Any) -> int:
    return next(i for i, variable in enumerate(variables) if variable is wanted)
