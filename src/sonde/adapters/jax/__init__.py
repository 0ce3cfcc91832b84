"""JAX, Flax and Optax: sketches are computed inside `jit` and recorded outside.

    import sonde.adapters.jax as sonde_jax            # the same as sonde.jax

    tx = sonde_jax.recorded(optax.adamw(3e-4))        # records parameters, gradients and updates of every step

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    sonde.init(project="jax")
    for batch in batches:
        params, opt_state, loss = train_step(params, opt_state, batch)
        sonde_jax.step(opt_state, loss=loss)          # never waits

Any tree can be sketched explicitly: `sketch({"grad": grads})` inside `jit`, `step(sketches)` outside. Sharded arrays
are sketched as a whole; under `pmap` the sketch is of the first device.

Whole tensors: `snapshots(sonde.every(100))` once, and in the loop `keep(param=params, grad=grads, optim=opt_state)`.
"""

from sonde.adapters.jax.recorder import describe, keep, recorded, sketch, snapshots, step
from sonde.adapters.jax.sketches import Sketches

__all__ = ["Sketches", "describe", "keep", "recorded", "sketch", "snapshots", "step"]
