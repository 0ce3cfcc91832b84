"""JAX, Flax and Optax: sketches are computed inside `jit` and handed over outside.

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
        sonde_jax.step(opt_state, loss=loss)          # waits for nothing

Any tree can be sketched by hand: `sketch({"grad": grads})` inside `jit`, `step(sketches)` outside. Of sharded arrays
the sketch is of the whole; under `pmap` it is the first device's.
"""

from sonde.adapters.jax.recorder import describe, recorded, sketch, step
from sonde.adapters.jax.sketches import Sketches

__all__ = ["Sketches", "describe", "recorded", "sketch", "step"]
