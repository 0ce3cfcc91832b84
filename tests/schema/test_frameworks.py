"""The same weights in three frameworks: a PyTorch model that is given another's tensors gives the other's answers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sonde.schema.frameworks.layers import canonical
from sonde.schema.frameworks.layouts import change_layout, detect, layer_type, split_name
from sonde.schema.frameworks.match import match_models


def shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


# ----------------------------------------------------------------------------------------------------- names and rules


@pytest.mark.parametrize(
    ("names", "framework"),
    [
        (["0.weight", "0.bias"], "torch"),
        (["lstm.weight_ih_l0"], "torch"),
        (["blocks.0.gamma", "blocks.0.fc.weight", "norm.scale"], "torch"),
        (["sequential/dense/kernel", "sequential/dense/bias"], "keras"),
        (["bn/gamma", "bn/moving_mean"], "keras"),
        (["params/Dense_0/kernel"], "flax"),
        (["Dense_0.kernel"], "flax"),
        (["emb.embedding", "emb.linear.kernel"], "flax"),
    ],
)
def test_framework_is_recognised_by_the_names(names: list[str], framework: str) -> None:
    assert detect(names) == framework


def test_names_are_split_however_they_are_separated() -> None:
    assert (
        split_name("a/b/kernel:0") == split_name("a.b.kernel") == split_name("a%2Fb%2Fkernel") == ("a", "b", "kernel")
    )
    assert split_name("attn/value/kernel") == ("attn", "value", "kernel")
    assert split_name("linear/kernel/value") == ("linear", "kernel")


@pytest.mark.parametrize(
    ("name", "shape", "expected", "role"),
    [
        ("dense/kernel", (3, 8), (8, 3), "weight"),
        ("conv1d/kernel", (5, 3, 8), (8, 3, 5), "weight"),
        ("conv/kernel", (5, 4, 3, 8), (8, 3, 5, 4), "weight"),
        ("conv3d/kernel", (2, 5, 4, 3, 8), (8, 3, 2, 5, 4), "weight"),
        ("conv2d_transpose/kernel", (5, 4, 8, 3), (3, 8, 5, 4), "weight"),
        ("depthwise_conv2d/kernel", (5, 4, 3, 2), (6, 1, 5, 4), "weight"),
        ("embedding/embeddings", (10, 4), (10, 4), "weight"),
        ("norm/gamma", (4,), (4,), "weight"),
        ("norm/beta", (4,), (4,), "bias"),
        ("norm/moving_variance", (4,), (4,), "running_var"),
        ("attention/query/kernel", (6, 2, 3), (6, 6), "weight"),
        ("attention/attention_output/kernel", (2, 3, 7), (7, 6), "weight"),
        ("attention/key/bias", (2, 3), (2, 3), "bias"),
    ],
)
def test_layouts(name: str, shape: tuple[int, ...], expected: tuple[int, ...], role: str) -> None:
    (found,) = canonical({name: shape}, "keras")
    assert (found.shape, found.role) == (expected, role)
    assert found.read(lambda _: np.zeros(shape)).shape == expected


def test_steps_are_written_down() -> None:
    (found,) = canonical({"params/ConvTranspose_0/kernel": (3, 3, 4, 5)})
    assert found.parts[0].steps == (("transpose", (2, 3, 0, 1)), ("flip", (2, 3)))
    assert found.layer_type == "ConvTranspose"


@pytest.mark.parametrize(
    ("classes", "name"),
    [
        (("Linear", "Dense", "DenseGeneral"), "Linear"),
        (("Conv2d", "Conv2D", "Conv", "Conv1D", "LazyConv3d"), "Conv"),
        (("ConvTranspose2d", "Conv2DTranspose", "ConvTranspose"), "ConvTranspose"),
        (("BatchNorm2d", "BatchNormalization", "BatchNorm", "SyncBatchNorm"), "BatchNorm"),
        (("LayerNorm", "LayerNormalization"), "LayerNorm"),
        (("RMSNorm", "LlamaRMSNorm", "RMSNormalization"), "RMSNorm"),
        (("Embedding", "Embed"), "Embedding"),
        (("MultiheadAttention", "MultiHeadAttention", "MultiHeadDotProductAttention"), "Attention"),
        (("LSTM", "LSTMCell", "OptimizedLSTMCell"), "LSTM"),
        (("GRU", "GRUCell"), "GRU"),
        (("ConvBlock",), "ConvBlock"),
    ],
)
def test_types_of_layers_have_one_name(classes: tuple[str, ...], name: str) -> None:
    assert {layer_type(one) for one in classes} == {name}


def test_gates_change_places() -> None:
    rows = np.repeat([10, 20, 30], 2).reshape(6, 1)
    assert change_layout(rows, [("gates", (1, 0, 2))]).ravel().tolist() == [20, 20, 10, 10, 30, 30]


def test_torch_to_itself_is_all_by_name_and_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    state = shapes(model.state_dict())
    found = match_models(state, state)
    assert {pair.by for pair in found.pairs} == {"name"}
    assert [pair.a.parts[0].source for pair in found.pairs] == list(state)
    assert all(pair.a.is_as_stored and not pair.a.parts[0].steps for pair in found.pairs)


def test_equal_layers_are_matched_in_order_and_ambiguous_ones_not_at_all() -> None:
    torch_like = {f"{i}.weight": (4, 4) for i in (0, 2, 10)}
    keras_like = {f"dense{'' if i == 0 else f'_{i}'}/kernel": (4, 4) for i in range(3)}
    found = match_models(torch_like, keras_like)
    assert [(p.a.parts[0].source, p.b.parts[0].source) for p in found.pairs] == [
        ("0.weight", "dense/kernel"),
        ("2.weight", "dense_1/kernel"),
        ("10.weight", "dense_2/kernel"),
    ]
    del keras_like["dense/kernel"]
    found = match_models(torch_like, keras_like)
    assert not found.pairs
    assert len(found.only_a) == 3


def test_alphabetical_order_is_not_the_order_of_layers() -> None:
    flax = dict.fromkeys(sorted(f"params/Dense_{i}/kernel" for i in range(12)), (4, 4))
    found = match_models({f"{i}.weight": (4, 4) for i in range(12)}, flax)
    assert found.pairs[2].b.name == "Dense_2.weight"
    assert found.pairs[10].b.name == "Dense_10.weight"


def test_equal_names_of_layers_go_before_order() -> None:
    found = match_models(
        {"decoder.fc.weight": (4, 4), "encoder.fc.weight": (4, 4)},
        {"model/encoder/fc/kernel": (4, 4), "model/decoder/fc/kernel": (4, 4)},
    )
    assert [(p.a.name, p.b.name, p.by) for p in found.pairs] == [
        ("decoder.fc.weight", "decoder.fc.weight", "name"),
        ("encoder.fc.weight", "encoder.fc.weight", "name"),
    ]


def test_alphabetical_order_of_unrelated_names_says_nothing() -> None:
    found = match_models(
        {"first.weight": (4, 4), "second.weight": (4, 4)}, {"params/Down/kernel": (4, 4), "params/Up/kernel": (4, 4)}
    )
    assert not found.pairs


@pytest.mark.parametrize("output", ["o_proj", "out_proj"])
def test_projections_are_told_apart_by_name_though_their_shapes_are_one(output: str) -> None:
    torch_like = {f"layers.0.self_attn.{p}.weight": (6, 6) for p in ("q_proj", "k_proj", "v_proj", output)}
    flax = {f"params/Attention_0/{p}/kernel": (6, 2, 3) for p in ("key", "query", "value")}
    flax["params/Attention_0/out/kernel"] = (2, 3, 6)
    found = match_models(torch_like, flax)
    assert [(p.a.parts[0].source.split(".")[-2], p.b.parts[0].source.split("/")[2]) for p in found.pairs] == [
        ("q_proj", "query"),
        ("k_proj", "key"),
        ("v_proj", "value"),
        (output, "out"),
    ]


# -------------------------------------------------------------------------------------------------------- real models


class Net(nn.Module):
    """Convolutions, norms, attention, recurrence: every layout that differs between frameworks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4, eps=1e-3)
        self.up = nn.ConvTranspose2d(4, 6, 3)
        self.ln = nn.LayerNorm(6, eps=1e-3)
        self.attn = nn.MultiheadAttention(6, 2, batch_first=True)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.gru = nn.GRU(5, 7, batch_first=True)
        self.head = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(torch.relu(self.bn(self.conv(x))))
        x = self.ln(x.flatten(2).transpose(1, 2))
        x = self.attn(x, x, x, need_weights=False)[0]
        x = self.gru(self.lstm(x)[0])[0]
        out: torch.Tensor = self.head(x[:, -1])
        return out


def load_from(model: nn.Module, tensors: Mapping[str, np.ndarray]) -> list[str]:
    """Give a PyTorch model another framework's tensors; the names of what it did not get."""
    state = {name: tensor for name, tensor in model.state_dict().items() if "num_batches" not in name}
    found = match_models(shapes(state), shapes(tensors))
    with torch.no_grad():
        for name, tensor in state.items():  # biases that are a sum have one vector of zero
            tensor.zero_() if "bias_" in name else None
        for pair in found.pairs:
            value = torch.from_numpy(np.array(pair.b.read(lambda name: np.asarray(tensors[name]))))
            part = pair.a.parts[0]  # of a sum, the first holds it all
            target = state[part.source]
            for step, numbers in part.steps:
                assert step == "rows"
                target = target[numbers[0] : numbers[1]]
            target.copy_(value)
    return [c.name for c in found.only_a] + [c.name for c in found.only_b]


def values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Of both signs, so that nothing saturates and no two axes look alike; variances are above zero."""
    made = rng.uniform(0.5, 1.5, shape) if "var" in name else rng.normal(0.0, 0.7, shape)
    return made.astype(np.float32)


def images() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, 3, 6, 5)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's own
def test_keras_model_and_its_twin_in_torch_give_the_same_answers(tmp_path: Any) -> None:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    from sonde.read.tensors.files.formats import open_tensors

    layers = keras.layers
    inputs = keras.Input((6, 5, 3))
    x = layers.Conv2D(4, 3)(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    x = layers.Conv2DTranspose(6, 3)(x)
    x = layers.Reshape((30, 6))(x)
    x = layers.LayerNormalization()(x)
    x = layers.MultiHeadAttention(2, 3)(x, x)
    x = layers.LSTM(5, return_sequences=True)(x)
    x = layers.GRU(7, return_sequences=True)(x)
    model = keras.Model(inputs, layers.Dense(2)(x[:, -1]))
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(torch.from_numpy(values(weight.path, tuple(weight.shape), rng)))
    twin = Net().eval()
    assert load_from(twin, {weight.path: weight.value.detach().numpy() for weight in model.weights}) == []
    expected = model(torch.from_numpy(images().transpose(0, 2, 3, 1).copy()), training=False).detach().numpy()
    np.testing.assert_allclose(twin(torch.from_numpy(images())).detach().numpy(), expected, rtol=1e-4, atol=1e-5)

    # The files Keras writes say the same, though they only number a layer's variables.
    model.save(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    for file in ("m.keras", "m.weights.h5"):
        stored = open_tensors(tmp_path / file)
        assert set(stored) == {weight.path for weight in model.weights}
        other = Net().eval()
        assert load_from(other, stored) == []
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), twin.parameters(), strict=True))


@pytest.mark.slow
def test_flax_model_and_its_twin_in_torch_give_the_same_answers() -> None:
    import flax.linen as fnn
    import jax
    import jax.numpy as jnp

    class Flax(fnn.Module):
        @fnn.compact
        def __call__(self, x: Any) -> Any:
            x = fnn.Conv(4, (3, 3), padding="VALID")(x)
            x = fnn.relu(fnn.BatchNorm(use_running_average=True, epsilon=1e-3)(x))
            x = fnn.ConvTranspose(6, (3, 3), padding="VALID")(x)
            x = fnn.LayerNorm(epsilon=1e-3)(x.reshape(x.shape[0], -1, 6))
            x = fnn.MultiHeadDotProductAttention(num_heads=2)(x)
            x = fnn.RNN(fnn.OptimizedLSTMCell(5))(x)
            x = fnn.RNN(fnn.GRUCell(7))(x)
            return fnn.Dense(2)(x[:, -1])

    x = jnp.asarray(images().transpose(0, 2, 3, 1))
    rng = np.random.default_rng(0)
    variables = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(values(path[-1].key, leaf.shape, rng)), Flax().init(jax.random.key(0), x)
    )
    flat = {
        "/".join(key.key for key in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(variables)[0]
    }
    twin = Net().eval()
    assert load_from(twin, flat) == []
    expected = np.asarray(Flax().apply(variables, x))
    np.testing.assert_allclose(twin(torch.from_numpy(images())).detach().numpy(), expected, rtol=1e-4, atol=1e-5)
