"""JAX and Flax: record the optimizer, and hand the state over once per step, outside `jit`.

You should see: the gradient norm of every parameter, computed inside the compiled step. Takes seconds; no torch.
Needs: pip install 'sonde-ml[jax]'
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import sonde


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden, self.out = nnx.Linear(10, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x)))


model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, sonde.jax.recorded(optax.adamw(1e-2)), wrt=nnx.Param)


@nnx.jit
def train_step(model: Net, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x.sum(1, keepdims=True)) ** 2))(model)
    optimizer.update(model, grads)
    return loss


key = jax.random.key(0)
with sonde.init(project="examples", name="flax"):
    for _ in range(40):
        key, now = jax.random.split(key)
        loss = train_step(model, optimizer, jax.random.normal(now, (64, 10)))
        sonde.jax.step(optimizer, loss=loss)

print(sonde.open("latest").stats("grad/*/norm", steps="-1:"))
