"""Loops that differ in what is trained: layers that freeze or are replaced, copies, tied weights, several dtypes."""

from __future__ import annotations

import copy
from itertools import islice

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from synthetic import clusters, curves, pictures, sequences
from trial import Trial, loop

STEPS = 40


def classifier(features: int = 12, classes: int = 4, width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes)
    )


def adamw(model: nn.Module, lr: float = 3e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def train(trial: Trial, model, optimizer, steps, batches, called=None) -> None:
    for step, (x, y) in zip(steps, batches, strict=False):
        optimizer.zero_grad()
        loss = functional.cross_entropy((called or model)(x), y)
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


class Backbone(nn.Module):
    """A body and a head, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.fc = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


@loop("EMA copy by hand", is_quick=True)
def ema(trial: Trial) -> None:
    model = classifier()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, other in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.1)
            agreement = (average(x).argmax(1) == model(x).argmax(1)).float().mean()
        trial.log({"loss": loss, "agreement": agreement}, at=step)
    trial.keep(average=average.state_dict())


@loop("AveragedModel with batch norm")
def averaged(trial: Trial) -> None:
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = adamw(model)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        trial.log({"loss": loss}, at=step)
    batches = clusters(seed=5)
    update_bn([next(batches) for _ in range(3)], average)
    trial.keep(average=average.state_dict())


@loop("mean teacher, called with gradients on")
def mean_teacher(trial: Trial) -> None:
    """The teacher is a copy and not a part of what is watched."""
    model = classifier()
    teacher = copy.deepcopy(model)
    for parameter in teacher.parameters():
        parameter.detach_()
    optimizer = adamw(model)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        logits = model(x + 0.1 * torch.randn_like(x))
        wanted = teacher(x + 0.1 * torch.randn_like(x))
        consistency = functional.mse_loss(logits.softmax(1), wanted.softmax(1))
        loss = functional.cross_entropy(logits, y) + consistency
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for mine, other in zip(teacher.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.95).add_(other.data, alpha=0.05)
        trial.log({"loss": loss, "consistency": consistency}, at=step)


@loop("unfreezing midway, one optimizer")
def unfreezing(trial: Trial) -> None:
    model = Backbone()
    model.body.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trial.watch(model, optimizer)
    batches = clusters()
    train(trial, model, optimizer, range(20), batches)
    model.body.requires_grad_(True)
    train(trial, model, optimizer, range(20, 50), batches)


@loop("unfreezing midway, a group is added", is_quick=True)
def unfreezing_group(trial: Trial) -> None:
    model = Backbone()
    model.body.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.fc.parameters(), lr=5e-3)
    trial.watch(model, optimizer)
    batches = clusters()
    train(trial, model, optimizer, range(20), batches)
    model.body.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 1e-3})
    train(trial, model, optimizer, range(20, 50), batches)


@loop("freezing midway")
def freezing(trial: Trial) -> None:
    model = Backbone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trial.watch(model, optimizer)
    batches = clusters()
    train(trial, model, optimizer, range(20), batches)
    model.body.requires_grad_(False)
    for parameter in model.body.parameters():
        parameter.grad = None
    train(trial, model, optimizer, range(20, 40), batches)


@loop("a new head and a new optimizer midway", is_quick=True)
def replacement(trial: Trial) -> None:
    """Fine-tuning in one script: train, replace the head for another task, train the rest."""
    model = Backbone()
    optimizer = adamw(model)
    trial.watch(model)
    trial.follow(optimizer)
    train(trial, model, optimizer, range(25), clusters())
    model.fc = nn.Linear(32, 3)
    trial.leave(optimizer)
    optimizer = adamw(model, 1e-3)
    trial.follow(optimizer)
    train(trial, model, optimizer, range(25, 60), clusters(classes=3, seed=7))


@loop("a head replaced before training")
def replaced_first(trial: Trial) -> None:
    model = Backbone()
    model.fc = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = adamw(model)
    trial.watch(model, optimizer)
    train(trial, model, optimizer, range(STEPS), clusters())


@loop("tied weights", is_quick=True)
def tied(trial: Trial) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 32)
            self.mix = nn.GRU(32, 32, batch_first=True)
            self.head = nn.Linear(32, 20, bias=False)
            self.head.weight = self.embed.weight
            nn.init.normal_(self.embed.weight, std=0.1)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.mix(self.embed(tokens))[0])

    model = Tied()
    optimizer = adamw(model, 1e-2)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(sequences(), 60)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@loop("sparse gradients of an embedding", is_quick=True)
def sparse(trial: Trial) -> None:
    embed = nn.EmbeddingBag(50, 16, sparse=True)
    head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model = nn.Sequential(embed, head)
    optimizers = [torch.optim.SparseAdam(embed.parameters(), lr=1e-2), torch.optim.Adam(head.parameters(), lr=1e-2)]
    trial.watch(model, optimizers)
    made = torch.Generator().manual_seed(0)
    for step in range(50):
        y = torch.randint(4, (32,), generator=made)
        words = (12 * y[:, None] + torch.randint(14, (32, 6), generator=made)) % 50
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = functional.cross_entropy(model(words), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        trial.log({"loss": loss}, at=step)


@loop("sparse gradients and SGD")
def sparse_sgd(trial: Trial) -> None:
    model = nn.Sequential(nn.EmbeddingBag(50, 16, sparse=True), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trial.watch(model, optimizer)
    made = torch.Generator().manual_seed(0)
    for step in range(60):
        y = torch.randint(4, (32,), generator=made)
        words = (12 * y[:, None] + torch.randint(14, (32, 6), generator=made)) % 50
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(words), y)
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


class Mixed(nn.Module):
    """A body in bfloat16, a head in float64, a norm in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 32, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.gelu(self.norm(self.body(x.bfloat16()).float())).double())


@loop("several dtypes in one model", is_quick=True)
def mixed(trial: Trial) -> None:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trial.watch(model, optimizer)
    train(trial, model, optimizer, range(STEPS), clusters())


@loop("a model in bfloat16")
def bfloat16(trial: Trial) -> None:
    model = classifier().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trial.watch(model, optimizer)
    batches = ((x.bfloat16(), y) for x, y in clusters())
    train(trial, model, optimizer, range(STEPS), batches)


@loop("a model in float64")
def float64(trial: Trial) -> None:
    model = classifier().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trial.watch(model, optimizer)
    batches = ((x.double(), y) for x, y in clusters())
    train(trial, model, optimizer, range(STEPS), batches)


@loop("complex parameters")
def complex_parameters(trial: Trial) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 7, dtype=torch.complex64) / 4)
            self.head = nn.Linear(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x + torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=12))

    model = Spectral()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trial.watch(model, optimizer)
    train(trial, model, optimizer, range(STEPS), clusters())


class Spectrum(nn.Module):
    """Returns complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x)


@loop("complex activations, inputs and Adam", is_quick=True)
def complex_activations(trial: Trial) -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spectrum, self.mix = Spectrum(), nn.Linear(7, 7, dtype=torch.complex64)
            self.head = nn.Linear(14, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.view_as_real(self.mix(self.spectrum(x.real + x.imag))).flatten(1))

    model = Spectral()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    trial.watch(model, optimizer)
    batches = ((torch.complex(x, x.flip(1)), y) for x, y in clusters())
    train(trial, model, optimizer, range(STEPS), batches)


@loop("torch.compile, eager")
def compiled_eager(trial: Trial) -> None:
    """What is inside of a compiled region is not seen: only its output."""
    model = classifier()
    optimizer = adamw(model)
    trial.watch(model, optimizer, compiled=model)
    called = torch.compile(model, backend="eager")
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        logits = called(x)
        trial.saw("model", logits)
        loss = functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@loop("torch.compile, aot_eager, watched as compiled", is_quick=True)
def compiled_aot(trial: Trial) -> None:
    model = torch.compile(classifier(), backend="aot_eager")
    optimizer = adamw(model)
    trial.watch(model, optimizer, compiled=model)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        logits = model(x)
        trial.saw("model", logits)
        loss = functional.cross_entropy(logits, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@loop("torch.compile of the model and the loss")
def compiled_loss(trial: Trial) -> None:
    """No module is called outside of the compiled function."""
    model = classifier()
    optimizer = adamw(model)
    trial.watch(model, optimizer, compiled=model)

    @torch.compile(backend="aot_eager")
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y)

    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@loop("torch.compile of a block inside")
def compiled_block(trial: Trial) -> None:
    """Regional compilation, in place: hooks are compiled too, so that only the layers around it are seen."""
    model = Backbone()
    model.body.compile(backend="aot_eager")
    optimizer = adamw(model)
    trial.watch(model, optimizer, compiled=model.body)
    train(trial, model, optimizer, range(STEPS), clusters())


@loop("torch.compile in place")
def compiled_in_place(trial: Trial) -> None:
    model = classifier()
    model.compile(backend="aot_eager")
    optimizer = adamw(model)
    trial.watch(model, optimizer, compiled=model)
    train(trial, model, optimizer, range(STEPS), clusters())


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward pass, with dropout, which then must be the same."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(12, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32)) for _ in range(3)
        )
        self.head = nn.Linear(32, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@loop("gradient checkpointing")
def checkpointed(trial: Trial) -> None:
    model = Checkpointed(reentrant=False)
    optimizer = adamw(model)
    trial.watch(model, optimizer)
    train(trial, model, optimizer, range(STEPS), clusters())


@loop("gradient checkpointing, reentrant", is_quick=True)
def checkpointed_reentrant(trial: Trial) -> None:
    model = Checkpointed(reentrant=True)
    optimizer = adamw(model)
    trial.watch(model, optimizer, is_reentrant=True)
    train(trial, model, optimizer, range(STEPS), clusters())


@loop("checkpoint_sequential")
def checkpointed_sequential(trial: Trial) -> None:
    model = classifier()
    optimizer = adamw(model)
    trial.watch(model, optimizer)
    train(
        trial,
        model,
        optimizer,
        range(STEPS),
        clusters(),
        lambda x: checkpoint_sequential(model, 2, x, use_reentrant=False),
    )


@loop("siamese double forward")
def siamese(trial: Trial) -> None:
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = adamw(model)
    trial.watch(model, optimizer)
    for step, ((one, a), (two, b)) in enumerate(islice(zip(clusters(seed=1), clusters(seed=2), strict=True), 60)):
        distance = functional.pairwise_distance(model(one), model(two))
        same = (a == b).float()
        loss = (same * distance.square() + (1 - same) * (2 - distance).clamp(min=0).square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@loop("contrastive, two views", is_quick=True)
def contrastive(trial: Trial) -> None:
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = adamw(model)
    trial.watch(model, optimizer)
    for step, (x, _) in enumerate(islice(clusters(), 60)):
        one, two = (functional.normalize(model(x + 0.3 * torch.randn_like(x)), dim=1) for _ in range(2))
        logits = one @ two.T / 0.2
        loss = functional.cross_entropy(logits, torch.arange(len(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@loop("triplet loss, called three times")
def triplet(trial: Trial) -> None:
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = adamw(model)
    distance = nn.TripletMarginLoss(margin=2.0)
    trial.watch(model, optimizer)
    made = torch.Generator().manual_seed(3)
    for step, (x, y) in enumerate(islice(clusters(batch=64), 60)):
        order = torch.argsort(y)
        x, y = x[order], y[order]
        far = torch.randperm(64, generator=made)
        keep = y[far] != y
        near = torch.arange(64).roll(1)
        keep &= y[near] == y
        loss = distance(model(x[keep]), model(x[near][keep]), model(x[far][keep]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@loop("weight and spectral norm")
def parametrized(trial: Trial) -> None:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(12, 32)),
        nn.ReLU(),
        parametrizations.spectral_norm(nn.Linear(32, 32)),
        nn.ReLU(),
        nn.Linear(32, 4),
    )
    optimizer = adamw(model, 5e-3)
    trial.watch(model, optimizer)
    train(trial, model, optimizer, range(STEPS), clusters())


@loop("lazy modules")
def lazy(trial: Trial) -> None:
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    batches = pictures()
    model(next(batches)[0])
    optimizer = adamw(model)
    trial.watch(model, optimizer)
    train(trial, model, optimizer, range(STEPS), batches)


@loop("parameters outside any module")
def bare_parameters(trial: Trial) -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.tables = nn.ParameterList([torch.randn(6, 16) / 2, torch.randn(16, 1) / 4])
            self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(1))})

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * torch.tanh(x @ self.tables[0]) @ self.tables[1] + self.named["shift"]

    model = Mixture()
    optimizer = adamw(model, 1e-2)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(curves(), 60)):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@loop("two models, one optimizer")
def two_models(trial: Trial) -> None:
    encoder, decoder = nn.Sequential(nn.Linear(12, 16), nn.Tanh()), nn.Linear(16, 4)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    trial.watch(encoder, optimizer, prefix="encoder.")
    trial.watch(decoder, optimizer, prefix="decoder.")
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(decoder(encoder(x)), y)
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@loop("functional_call with fast weights")
def fast_weights(trial: Trial) -> None:
    """MAML's inner step: the model is called with weights that are not its own."""
    model = regressor = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = adamw(model, 5e-3)
    trial.watch(model, optimizer)
    for step, ((x, y), (again, target)) in enumerate(islice(zip(curves(seed=1), curves(seed=2), strict=True), 60)):
        weights = dict(regressor.named_parameters())
        inner = functional.mse_loss(torch.func.functional_call(model, weights, (x,)), y)
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: w - 0.05 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        loss = functional.mse_loss(torch.func.functional_call(model, fast, (again,)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@pytest.mark.parametrize("program", loop.of(__name__))
def test_loop(program, tmp_path) -> None:
    program.examine(tmp_path).check()
