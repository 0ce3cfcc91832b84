"""Plain loops as people write them: reinforcement learning, GANs, distillation, embeddings, unequal classes."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import sonde
from trainers.points import blobs, convnet, curves, images, mlp
from trainers.program import program

STUCK = ("underfitting", "loss_plateau", "constant_output")


def watch(folder: Path, model: nn.Module, optimizer: Any) -> Any:
    return sonde.watch(model, optimizer, project="trainers", dir=str(folder), verbose=False)


def fit(
    folder: Path, model: nn.Module, loader: Any, step_loss: Callable[[Any], Tensor], *, lr: float = 2e-3,
    steps: int = 200, optimizer: Any = None, val: Callable[[], float] | None = None, is_logged: bool = True,
) -> None:  # fmt: skip
    """The loop that most programs here share."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr)
    with watch(folder, model, optimizer):
        number = 0
        while number < steps:
            for batch in loader:
                optimizer.zero_grad()
                loss = step_loss(batch)
                loss.backward()
                optimizer.step()
                if is_logged:
                    sonde.log({"loss": loss.item()})
                number += 1
                if val is not None and number % 25 == 0:
                    sonde.log({"val_loss": val()})
                if number >= steps:
                    break


# ------------------------------------------------------------------------------------------- reinforcement learning


class Pole:
    """A pole on a cart, in a few lines. Episodes start in nearly the same state."""

    def reset(self, *, same: bool = False) -> Tensor:
        self.state, self.age = torch.zeros(4) if same else 0.1 * (torch.rand(4) - 0.5), 0
        return self.state

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        x, v, angle, w = self.state.tolist()
        force = 10.0 if action else -10.0
        angle_a = 14.0 * angle - 1.5 * force / 10 * 4
        self.state = torch.tensor([x + 0.02 * v, v + 0.2 * force / 10, angle + 0.02 * w, w + 0.02 * angle_a * 4])
        self.age += 1
        is_over = abs(float(self.state[2])) > 0.3 or abs(float(self.state[0])) > 2.4 or self.age >= 60
        return self.state, 1.0, is_over


def q_learning(folder: Path, *, lr: float = 1e-3, is_target_frozen: bool = True) -> None:
    net = mlp(4, 48, 48, 2)
    target = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr)
    memory: deque[Any] = deque(maxlen=2000)
    pole = Pole()
    with watch(folder, net, optimizer):
        state = pole.reset()
        for step in range(700):
            with torch.no_grad():
                greedy = int(net(state).argmax())
            action = random.randrange(2) if random.random() < max(0.1, 1 - step / 300) else greedy
            new, reward, is_over = pole.step(action)
            memory.append((state, action, reward, new, float(is_over)))
            state = pole.reset() if is_over else new
            if len(memory) < 64:
                continue
            columns = zip(*random.sample(list(memory), 32), strict=True)
            states, actions, rewards, news, overs = (list(column) for column in columns)
            with torch.no_grad():
                best = target(torch.stack(news)).amax(1)
                aim = torch.tensor(rewards) + 0.9 * (1 - torch.tensor(overs)) * best
            q = net(torch.stack(states)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
            loss = F.smooth_l1_loss(q, aim)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sonde.log({"loss": loss.item(), "reward": float(pole.age)})
            if is_target_frozen and step % 20 == 0:
                target.load_state_dict(net.state_dict())


@program("h_plain_dqn", source="a replay buffer")
def _(folder: Path, fixed: bool) -> None:
    q_learning(folder)


@program("plain_dqn_lr_high", "lr_too_high", also_ok=("dead_relu", "loss_oscillation", "exploding_gradients", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    q_learning(folder, lr=1e-3 if fixed else 1.0)


def reinforce(folder: Path, *, same: bool) -> None:
    policy = mlp(4, 48, 2)
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    pole = Pole()
    with watch(folder, policy, optimizer):
        for _ in range(80):
            states, actions, rewards = [], [], []
            for _ in range(4):
                state, is_over = pole.reset(same=same), False
                while not is_over:
                    with torch.no_grad():
                        action = int(torch.distributions.Categorical(logits=policy(state)).sample())
                    states.append(state)
                    actions.append(action)
                    state, _, is_over = pole.step(action)
                rewards += list(range(pole.age, 0, -1))
            gains = torch.tensor(rewards, dtype=torch.float32)
            gains = (gains - gains.mean()) / (gains.std() + 1e-6)
            log_p = torch.distributions.Categorical(logits=policy(torch.stack(states))).log_prob(torch.tensor(actions))
            loss = -(log_p * gains).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sonde.log({"loss": loss.item(), "length": len(states) / 4})


@program("h_plain_reinforce", source="policy gradients")
def _(folder: Path, fixed: bool) -> None:
    reinforce(folder, same=False)


@program("h_plain_reinforce_same_start", source="all episodes start in the same state")
def _(folder: Path, fixed: bool) -> None:
    reinforce(folder, same=True)


@program("h_plain_actor_critic", source="parallel environments that start in the same state")
def _(folder: Path, fixed: bool) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.actor, self.critic = mlp(4, 48, 48), nn.Linear(48, 2), nn.Linear(48, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.body(x).tanh()
            return self.actor(hidden), self.critic(hidden).squeeze(-1)

    net = Both()
    optimizer = torch.optim.RMSprop(net.parameters(), 1e-3)
    poles = [Pole() for _ in range(8)]
    state = torch.stack([pole.reset(same=True) for pole in poles])
    with watch(folder, net, optimizer):
        for _ in range(250):
            logits, value = net(state)
            policy = torch.distributions.Categorical(logits=logits)
            action = policy.sample()
            moved = [pole.step(int(a)) for pole, a in zip(poles, action, strict=True)]
            overs = torch.tensor([float(over) for _, _, over in moved])
            state = torch.stack(
                [pole.reset(same=True) if over else new for pole, (new, _, over) in zip(poles, moved, strict=True)]
            )
            with torch.no_grad():
                aim = 1.0 + 0.95 * (1 - overs) * net(state)[1]
            gain = (aim - value).detach()
            loss = -(policy.log_prob(action) * gain).mean() + F.mse_loss(value, aim) - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sonde.log({"loss": loss.item()})


# -------------------------------------------------------------------------------------------------------------- GANs


@program(
    "plain_gan_generator_detached",
    "detached_graph",
    also_ok=("lr_not_applied", "frozen_layers", *STUCK),
    where="generator",
)
def _(folder: Path, fixed: bool) -> None:
    gan = nn.ModuleDict({"generator": mlp(8, 48, 48, 2), "critic": mlp(2, 48, 48, 1)})
    adversaries(folder, gan, is_detached=not fixed)


@program("h_plain_gan")
def _(folder: Path, fixed: bool) -> None:
    gan = nn.ModuleDict({"generator": mlp(8, 64, 64, 2), "critic": mlp(2, 64, 64, 1)})
    adversaries(folder, gan, is_detached=False, steps=350)


def adversaries(folder: Path, gan: nn.ModuleDict, *, is_detached: bool, steps: int = 250) -> None:
    generator, critic = gan["generator"], gan["critic"]
    first = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.99))
    second = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.5, 0.99))
    real_points = blobs(width=2).tensors[0]
    with (
        sonde.watch(generator, first, project="trainers", dir=str(folder), verbose=False, prefix="generator."),
        sonde.watch(critic, second, prefix="critic."),
    ):
        for _ in range(steps):
            real = real_points[torch.randint(len(real_points), (48,))]
            fake = generator(torch.randn(48, 8))
            d_loss = F.binary_cross_entropy_with_logits(critic(real), torch.ones(48, 1))
            d_loss = d_loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), torch.zeros(48, 1))
            second.zero_grad()
            d_loss.backward()
            second.step()
            judged = critic(fake.detach() if is_detached else fake)
            g_loss = F.binary_cross_entropy_with_logits(judged, torch.ones(48, 1))
            first.zero_grad()
            g_loss.backward()
            first.step()
            sonde.log({"g_loss": g_loss.item(), "d_loss": d_loss.item()})


# ------------------------------------------------------------------------------------------------------ distillation


def distil(folder: Path, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    teacher = mlp(16, 96, 10)
    data = blobs(2000, classes=10, seed=2)
    x, y = data.tensors
    optimizer = torch.optim.Adam(teacher.parameters(), 5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        optimizer.step()
    student = mlp(16, 24, 10)

    def step_loss(batch: Any) -> Tensor:
        with torch.no_grad():
            known = teacher(batch[0])
        return loss_of(student(batch[0]), known)

    fit(folder, student, DataLoader(data, 64, shuffle=True), step_loss)


@program("plain_distil_teacher_softmax_twice", "wrong_loss_activation_pair", also_ok=("lr_too_low", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    def loss_of(output: Tensor, known: Tensor) -> Tensor:
        soft = known.softmax(-1) if fixed else known.softmax(-1).softmax(-1)
        return F.kl_div(output.log_softmax(-1), soft, reduction="batchmean")

    distil(folder, loss_of)


@program("plain_distil_student_softmax_twice", "wrong_loss_activation_pair", also_ok=("lr_too_low", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    def loss_of(output: Tensor, known: Tensor) -> Tensor:
        logs = output.log_softmax(-1) if fixed else output.softmax(-1).log_softmax(-1)
        return F.kl_div(logs, known.softmax(-1), reduction="batchmean")

    distil(folder, loss_of)


@program("h_plain_distil_hot", source="a temperature of 8")
def _(folder: Path, fixed: bool) -> None:
    distil(
        folder,
        lambda output, known: (
            64 * F.kl_div((output / 8).log_softmax(-1), (known / 8).softmax(-1), reduction="batchmean")
        ),
    )


# -------------------------------------------------------------------------------------------------------- embeddings


class TwoTowers(nn.Module):
    """Users and items; which belong together is known for some pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(200, 24), nn.Embedding(200, 24)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.users(user) @ self.items(item).t()


def two_towers(folder: Path, lr: float, steps: int = 200) -> None:
    model = TwoTowers()
    g = torch.Generator().manual_seed(2)
    users = torch.randint(200, (3000,), generator=g)
    items = (users // 10 * 10 + torch.randint(10, (3000,), generator=g)) % 200

    def step_loss(at: Any) -> Tensor:
        return F.cross_entropy(model(users[at], items[at]) / 24**0.5, torch.arange(len(at)))

    fit(folder, model, [torch.randint(3000, (64,)) for _ in range(steps)], step_loss, lr=lr, steps=steps)


@program("plain_embeddings_lr_high", "lr_too_high", also_ok=("loss_oscillation", "output_logit_growth", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    two_towers(folder, 2e-2 if fixed else 30.0)


@program("h_plain_embeddings")
def _(folder: Path, fixed: bool) -> None:
    two_towers(folder, 1e-2, 250)


@program(
    "plain_word_vectors_lr_high", "lr_too_high", also_ok=("loss_oscillation", "nan_inf", "exploding_gradients", *STUCK)
)
def _(folder: Path, fixed: bool) -> None:
    model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 100))
    words = torch.randint(100, (4000,), generator=torch.Generator().manual_seed(4))
    near = (words + torch.randint(1, 4, (4000,), generator=torch.Generator().manual_seed(5))) % 100
    optimizer = torch.optim.SGD(model.parameters(), 1.0 if fixed else 500.0)
    fit(folder, model, [torch.randint(4000, (64,)) for _ in range(200)],
        lambda at: F.cross_entropy(model(words[at]), near[at]), optimizer=optimizer)  # fmt: skip


# ------------------------------------------------------------------------------------------------ self-supervision


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = mlp(16, 64, 32), mlp(32, 32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        return z, self.predictor(z)


def siamese(folder: Path) -> None:
    model = Twins()
    x = blobs(2000).tensors[0]

    def step_loss(at: Any) -> Tensor:
        views = [x[at] + 0.4 * torch.randn(len(at), 16) for _ in range(2)]
        (_, p), (_, q) = model(views[0]), model(views[1])
        scores = F.normalize(p) @ F.normalize(q).t() / 0.2
        return F.cross_entropy(scores, torch.arange(len(at)))

    steps = 400
    fit(folder, model, [torch.randint(2000, (64,)) for _ in range(steps)], step_loss, steps=steps, lr=5e-3)


@program("h_plain_contrastive")
def _(folder: Path, fixed: bool) -> None:
    siamese(folder)


# ------------------------------------------------------------------------------------------------------ other faults


@program("plain_zero_grad_between_micro_batches", "zero_grad_too_often", also_ok=("gradient_noise", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    model = mlp(8, 64, 64, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with watch(folder, model, optimizer):
        for number, (x, y) in enumerate(DataLoader(curves(2400), 4, shuffle=True)):
            if not fixed:
                optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) / 4
            loss.backward()
            if (number + 1) % 4 == 0:
                optimizer.step()
                if fixed:
                    optimizer.zero_grad()
                sonde.log({"loss": 4 * loss.item()})


@program("plain_same_batch", "data_duplication", also_ok=("overfitting",), source="next(iter(loader))")
def _(folder: Path, fixed: bool) -> None:
    model = convnet()
    loader = DataLoader(images(), 32, shuffle=fixed)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    with watch(folder, model, optimizer):
        for _ in range(150):
            x, y = next(iter(loader))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            sonde.log({"loss": loss.item()})


@program("plain_val_in_train_mode", "train_mode_validation", also_ok=("overfitting",))
def _(folder: Path, fixed: bool) -> None:
    model = convnet()
    x, y = images(200, seed=1).tensors

    def val() -> float:
        if fixed:
            model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(x), y).item()
        model.train()
        return loss

    fit(folder, model, DataLoader(images(), 32, shuffle=True), lambda pair: F.cross_entropy(model(pair[0]), pair[1]),
        val=val)  # fmt: skip


@program(
    "plain_group_lr_high",
    ("uneven_learning_rates", "lr_too_high"),
    also_ok=("loss_oscillation", "dead_relu", "exploding_gradients", *STUCK),
    where="0",
)
def _(folder: Path, fixed: bool) -> None:
    """The head is meant to learn ten times as fast as the body: the rates were exchanged, and a zero is missing."""
    model = mlp(16, 64, 64, 6)
    groups = [
        {"params": model[:4].parameters(), "lr": 1e-3 if fixed else 1.0},
        {"params": model[4].parameters(), "lr": 1e-2 if fixed else 1e-3},
    ]
    fit(folder, model, DataLoader(blobs(), 32, shuffle=True), lambda pair: F.cross_entropy(model(pair[0]), pair[1]),
        optimizer=torch.optim.Adam(groups))  # fmt: skip


@program(
    "plain_group_lr_zero",
    ("uneven_learning_rates", "frozen_layers"),
    also_ok=("lr_too_low", "lr_not_applied", *STUCK),
    where="0",
)
def _(folder: Path, fixed: bool) -> None:
    model = mlp(8, 64, 64, 64, 1)
    groups = [
        {"params": model[:5].parameters(), "lr": 2e-3 if fixed else 0.0},
        {"params": model[5:].parameters(), "lr": 2e-3},
    ]
    fit(folder, model, DataLoader(curves(), 32, shuffle=True), lambda pair: F.mse_loss(model(pair[0]), pair[1]),
        optimizer=torch.optim.Adam(groups))  # fmt: skip


@program("h_plain_group_rates", source="a head that learns ten times as fast")
def _(folder: Path, fixed: bool) -> None:
    model = mlp(16, 64, 64, 6)
    groups = [{"params": model[:4].parameters(), "lr": 5e-4}, {"params": model[4].parameters(), "lr": 5e-3}]
    fit(folder, model, DataLoader(blobs(), 32, shuffle=True), lambda pair: F.cross_entropy(model(pair[0]), pair[1]),
        optimizer=torch.optim.Adam(groups))  # fmt: skip


@program("plain_slow_leak", "memory_leak", source="total_loss += loss, of a recurrent loop")
def _(folder: Path, fixed: bool) -> None:
    model = mlp(16, 64, 64, 6)
    total: Any = 0.0

    def step_loss(pair: Any) -> Tensor:
        nonlocal total
        loss = F.cross_entropy(model(pair[0]), pair[1])
        total = total + (loss.item() if fixed else loss)
        return loss

    fit(folder, model, DataLoader(blobs(), 32, shuffle=True), step_loss, steps=250)


@program("h_plain_class_weights", source="one in twenty, weighted by nineteen")
def _(folder: Path, fixed: bool) -> None:
    model = mlp(8, 32, 2)
    x, y = blobs(8000, classes=2, width=8, noise=2.5).tensors
    keep = (y == 0) | (torch.rand(len(y), generator=torch.Generator().manual_seed(1)) < 0.05)
    x, y = x[keep], y[keep]
    weight = torch.tensor([1.0, 19.0])
    fit(folder, model, [torch.randint(len(x), (64,)) for _ in range(250)],
        lambda at: F.cross_entropy(model(x[at]), y[at], weight=weight), steps=250)  # fmt: skip


@program("h_plain_positive_weight", source="binary, pos_weight=15")
def _(folder: Path, fixed: bool) -> None:
    model = mlp(8, 32, 1)
    x, y = blobs(8000, classes=2, width=8, noise=2.0).tensors
    keep = (y == 0) | (torch.rand(len(y), generator=torch.Generator().manual_seed(1)) < 0.07)
    x, y = x[keep], y[keep].float()[:, None]
    fit(folder, model, [torch.randint(len(x), (64,)) for _ in range(250)],
        lambda at: F.binary_cross_entropy_with_logits(model(x[at]), y[at], pos_weight=torch.tensor(15.0)),
        steps=250)  # fmt: skip


@program("h_plain_short", source="60 steps of SGD, falling slowly")
def _(folder: Path, fixed: bool) -> None:
    model = mlp(16, 64, 64, 6)
    fit(folder, model, DataLoader(blobs(), 32, shuffle=True), lambda pair: F.cross_entropy(model(pair[0]), pair[1]),
        steps=60, optimizer=torch.optim.SGD(model.parameters(), 0.02))  # fmt: skip


@program("h_plain_full_batch", source="all the data there is in each step")
def _(folder: Path, fixed: bool) -> None:
    model = mlp(8, 64, 64, 1)
    x, y = curves(400).tensors
    held_x, held_y = curves(200, seed=1).tensors

    def val() -> float:
        with torch.no_grad():
            return F.mse_loss(model(held_x), held_y).item()

    fit(folder, model, [(x, y)] * 150, lambda pair: F.mse_loss(model(pair[0]), pair[1]), steps=150, val=val)


@program("h_plain_autoencoder")
def _(folder: Path, fixed: bool) -> None:
    model = mlp(144, 64, 12, 64, 144)
    fit(folder, model, DataLoader(images(), 32, shuffle=True),
        lambda pair: F.mse_loss(model(pair[0].flatten(1)), pair[0].flatten(1)), steps=250)  # fmt: skip


@program("h_plain_sharpness_aware", source="two backward passes per step, over the same batch")
def _(folder: Path, fixed: bool) -> None:
    model = mlp(16, 64, 64, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    parameters = list(model.parameters())
    with watch(folder, model, optimizer):
        for _ in range(5):
            for x, y in DataLoader(blobs(), 32, shuffle=True):
                F.cross_entropy(model(x), y).backward()
                with torch.no_grad():
                    norm = torch.stack([p.grad.norm() for p in parameters]).norm() + 1e-12
                    shifts = [0.05 * p.grad / norm for p in parameters]
                    for p, shift in zip(parameters, shifts, strict=True):
                        p.add_(shift)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                with torch.no_grad():
                    for p, shift in zip(parameters, shifts, strict=True):
                        p.sub_(shift)
                optimizer.step()
                optimizer.zero_grad()
                sonde.log({"loss": loss.item()})


@program("h_plain_dropout_ensemble", source="Monte-Carlo dropout: predictions in train mode, but no validation")
def _(folder: Path, fixed: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    x, y = curves(1200).tensors
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with watch(folder, model, optimizer):
        for number in range(200):
            at = torch.randint(len(x), (32,))
            loss = F.mse_loss(model(x[at]), y[at])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sonde.log({"loss": loss.item()})
            if number % 20 == 0:
                with torch.no_grad():
                    spread = torch.stack([model(x[:50]) for _ in range(5)]).std(0)
                sonde.log({"uncertainty": spread.mean().item()})
