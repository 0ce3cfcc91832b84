"""Loops with several losses or players: GAN, actor-critic, REINFORCE, penalties, teachers, VAE, diffusion, tasks."""

from __future__ import annotations

import itertools
from itertools import islice

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from synthetic import clusters, curves
from trial import Trial, loop


def mlp(*widths: int, act=nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers[:-1])


def ring(num: int, made: torch.Generator) -> Tensor:
    """Points on a circle with noise: what the generators here have to make."""
    angle = 6.2832 * torch.rand(num, generator=made)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(num, 2, generator=made)


def leaky() -> nn.Module:
    return nn.LeakyReLU(0.2)


@loop("GAN")
def gan(trial: Trial) -> None:
    generator, critic = mlp(4, 32, 32, 2, act=leaky), mlp(2, 32, 32, 1, act=leaky)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    trial.watch(generator, optimizer_g, prefix="generator.")
    trial.watch(critic, optimizer_d, prefix="critic.")
    made = torch.Generator().manual_seed(0)
    for step in range(60):
        real, fake = ring(64, made), generator(torch.randn(64, 4))
        judged, judged_fake = critic(real), critic(fake.detach())
        loss_d = functional.softplus(-judged).mean() + functional.softplus(judged_fake).mean()
        optimizer_d.zero_grad()
        loss_d.backward()
        optimizer_d.step()
        loss_g = functional.softplus(-critic(fake)).mean()
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
        trial.log({"critic": loss_d, "generator": loss_g}, at=step)


@loop("GAN, both clipped", is_quick=True)
def gan_clipped(trial: Trial) -> None:
    generator, critic = mlp(4, 32, 32, 2, act=leaky), mlp(2, 32, 32, 1, act=leaky)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    trial.watch(generator, optimizer_g, prefix="generator.")
    trial.watch(critic, optimizer_d, prefix="critic.")
    made = torch.Generator().manual_seed(0)
    for step in range(60):
        fake = generator(torch.randn(64, 4))
        loss_d = functional.softplus(-critic(ring(64, made))).mean() + functional.softplus(critic(fake.detach())).mean()
        optimizer_d.zero_grad()
        loss_d.backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 0.2)
        optimizer_d.step()
        loss_g = functional.softplus(-critic(fake)).mean()
        optimizer_g.zero_grad()
        loss_g.backward()
        nn.utils.clip_grad_norm_(generator.parameters(), 0.1)
        optimizer_g.step()
        trial.log({"critic": loss_d, "generator": loss_g}, at=step)


@loop("WGAN-GP, three critic steps for one", is_quick=True)
def wgan(trial: Trial) -> None:
    """Each critic step is a step; the generator's belongs to the third of them."""
    generator, critic = mlp(4, 32, 2), mlp(2, 32, 32, 1, act=leaky)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    trial.watch(generator, optimizer_g, prefix="generator.")
    trial.watch(critic, optimizer_d, prefix="critic.")
    made = torch.Generator().manual_seed(0)
    for turn in range(20):
        for again in range(3):
            real, fake = ring(64, made), generator(torch.randn(64, 4)).detach()
            between = torch.lerp(real, fake, torch.rand(64, 1)).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            loss_d = critic(fake).mean() - critic(real).mean() + 10 * penalty
            optimizer_d.zero_grad()
            loss_d.backward()
            optimizer_d.step()
            trial.log({"critic": loss_d, "penalty": penalty}, at=3 * turn + again)
        loss_g = -critic(generator(torch.randn(64, 4))).mean()
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
        trial.log({"generator": loss_g}, at=3 * turn + 2)


@loop("gradient penalty")
def penalty(trial: Trial) -> None:
    model = mlp(6, 24, 24, 1, act=nn.Tanh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(curves(), 60)):
        x = x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        smooth = slope.square().sum(1).mean()
        loss = functional.mse_loss(out, y) + 1e-2 * smooth
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss, "smooth": smooth}, at=step)


@loop("backward with create_graph")
def double_backward(trial: Trial) -> None:
    """The gradient's own norm is minimised too: `p.grad` has a graph."""
    model = mlp(6, 24, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(curves(), 60)):
        loss = functional.mse_loss(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        total = loss + 1e-2 * sum(g.square().sum() for g in grads)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


class ActorCritic(nn.Module):
    """A trunk, and two heads on it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(4, 32, 32, act=nn.Tanh)
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.actor(hidden), self.critic(hidden)[:, 0]


def reward_of(x: Tensor, action: Tensor) -> Tensor:
    return 1.0 - (action != (x[:, 0] > 0)).float()


@loop("actor-critic, two optimizers on a shared trunk")
def actor_critic(trial: Trial) -> None:
    model = ActorCritic()
    of_actor = torch.optim.Adam([*model.trunk.parameters(), *model.actor.parameters()], lr=3e-3)
    of_critic = torch.optim.Adam(model.critic.parameters(), lr=1e-2)
    trial.watch(model, [of_actor, of_critic])
    made = torch.Generator().manual_seed(0)
    for step in range(60):
        x = torch.randn(64, 4, generator=made)
        logits, value = model(x)
        policy = torch.distributions.Categorical(logits=logits)
        action = policy.sample()
        reward = reward_of(x, action)
        advantage = reward - value
        loss_actor = -(policy.log_prob(action) * advantage.detach()).mean() - 0.01 * policy.entropy().mean()
        loss_critic = advantage.square().mean()
        of_actor.zero_grad()
        of_critic.zero_grad()
        (loss_actor + loss_critic).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        of_actor.step()
        of_critic.step()
        trial.log({"actor": loss_actor, "critic": loss_critic, "reward": reward.mean()}, at=step)


@loop("actor-critic, two backward passes", is_quick=True)
def actor_critic_apart(trial: Trial) -> None:
    """The trunk is in both optimizers, each of which steps it."""
    model = ActorCritic()
    of_actor = torch.optim.SGD([*model.trunk.parameters(), *model.actor.parameters()], lr=0.05)
    of_critic = torch.optim.SGD([*model.trunk.parameters(), *model.critic.parameters()], lr=0.05)
    trial.watch(model, [of_actor, of_critic])
    made = torch.Generator().manual_seed(0)
    for step in range(60):
        x = torch.randn(64, 4, generator=made)
        logits, value = model(x)
        policy = torch.distributions.Categorical(logits=logits)
        action = policy.sample()
        reward = reward_of(x, action)
        loss_critic = (reward - value).square().mean()
        loss_actor = -(policy.log_prob(action) * (reward - value).detach()).mean()
        of_critic.zero_grad()
        loss_critic.backward(retain_graph=True)
        grads = torch.autograd.grad(loss_actor, [*model.trunk.parameters(), *model.actor.parameters()])
        of_critic.step()
        of_actor.zero_grad()
        for parameter, grad in zip([*model.trunk.parameters(), *model.actor.parameters()], grads, strict=True):
            parameter.grad = grad
        of_actor.step()
        trial.log({"actor": loss_actor, "critic": loss_critic, "reward": reward.mean()}, at=step)


@loop("REINFORCE", is_quick=True)
def reinforce(trial: Trial) -> None:
    """Rollouts without gradients first, then one step for each."""
    policy = mlp(4, 32, 2, act=nn.Tanh)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    trial.watch(policy, optimizer)
    made = torch.Generator().manual_seed(0)
    baseline = torch.zeros(())
    for step in range(60):
        seen, actions, rewards = [], [], []
        for _ in range(4):
            x = torch.randn(16, 4, generator=made)
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=policy(x)).sample()
            seen.append(x)
            actions.append(action)
            rewards.append(reward_of(x, action))
        x, action, reward = torch.cat(seen), torch.cat(actions), torch.cat(rewards)
        baseline = 0.9 * baseline + 0.1 * reward.mean()
        chosen = torch.distributions.Categorical(logits=policy(x)).log_prob(action)
        loss = -(chosen * (reward - baseline)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.log({"policy_loss": loss, "reward": reward.mean()}, at=step)


@loop("Q-learning with a target network")
def q_learning(trial: Trial) -> None:
    model, target = mlp(4, 32, 2), mlp(4, 32, 2)
    target.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trial.watch(model, optimizer)
    made = torch.Generator().manual_seed(0)
    for step in range(60):
        x, after = torch.randn(2, 64, 4, generator=made)
        action = torch.randint(2, (64,), generator=made)
        with torch.no_grad():
            wanted = reward_of(x, action) + 0.5 * target(after).max(1).values
        loss = functional.smooth_l1_loss(model(x).gather(1, action[:, None])[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            target.load_state_dict(model.state_dict())
        trial.log({"loss": loss}, at=step)
    trial.keep(target=target.state_dict())


@loop("distillation from a frozen teacher")
def distillation(trial: Trial) -> None:
    torch.manual_seed(5)
    teacher, student = mlp(12, 64, 4).eval().requires_grad_(False), mlp(12, 16, 4)
    nn.init.normal_(teacher[2].weight, std=0.5)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    trial.watch(student, optimizer)
    for step, (x, _) in enumerate(islice(clusters(), 60)):
        wanted = teacher(x)  # nothing of it wants a gradient
        logits = student(x)
        loss = functional.kl_div(
            functional.log_softmax(logits / 2, 1),
            functional.log_softmax(wanted / 2, 1),
            reduction="batchmean",
            log_target=True,
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


class Distilling(nn.Module):
    """Teacher and student in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = mlp(12, 64, 4).requires_grad_(False)
        self.student = mlp(12, 16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


@loop("distillation, the teacher is a part of the model", is_quick=True)
def distillation_inside(trial: Trial) -> None:
    model = Distilling()
    nn.init.normal_(model.teacher[2].weight, std=0.5)
    optimizer = torch.optim.AdamW(model.student.parameters(), lr=1e-2)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), 60)):
        logits, wanted = model(x)
        hard = functional.cross_entropy(logits, y)
        soft = functional.mse_loss(logits, wanted)
        loss = 0.5 * hard + 0.5 * soft
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss, "hard": hard, "soft": soft}, at=step)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(12, 32, 8), mlp(4, 32, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(code), mean, log_var


@loop("VAE")
def vae(trial: Trial) -> None:
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    trial.watch(model, optimizer)
    for step, (x, _) in enumerate(islice(clusters(batch=64), 80)):
        out, mean, log_var = model(x)
        reconstruction = functional.mse_loss(out, x)
        divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
        loss = reconstruction + 0.01 * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss, "reconstruction": reconstruction, "kl": divergence}, at=step)


@loop("diffusion: the noise is what is learned")
def diffusion(trial: Trial) -> None:
    model = mlp(3, 64, 64, 2, act=nn.SiLU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trial.watch(model, optimizer)
    made = torch.Generator().manual_seed(0)
    kept = torch.linspace(0.99, 0.05, 50)
    for step in range(80):
        x = ring(128, made)
        time = torch.randint(50, (128,))
        noise = torch.randn_like(x)
        noisy = kept[time, None].sqrt() * x + (1 - kept[time, None]).sqrt() * noise
        loss = functional.mse_loss(model(torch.cat([noisy, time[:, None] / 25 - 1], 1)), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


class Tasks(nn.Module):
    """A trunk, a head that classifies, one that regresses, and how much each counts."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 32), nn.ReLU())
        self.heads = nn.ModuleDict({"kind": nn.Linear(32, 4), "size": nn.Linear(32, 1)})
        self.log_var = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(x)
        return {name: head(hidden) for name, head in self.heads.items()}


@loop("several tasks, learned weights")
def tasks(trial: Trial) -> None:
    model = Tasks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), 60)):
        out = model(x)
        losses = torch.stack(
            [functional.cross_entropy(out["kind"], y), functional.mse_loss(out["size"][:, 0], x[:, 0].tanh())]
        )
        loss = (losses * (-model.log_var).exp() + 0.5 * model.log_var).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss, "kind": losses[0], "size": losses[1]}, at=step)


@loop("several tasks, one backward pass each")
def tasks_apart(trial: Trial) -> None:
    model = Tasks()
    trained = [*model.trunk.parameters(), *model.heads.parameters()]
    model.log_var.requires_grad_(False)
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), 60)):
        optimizer.zero_grad()
        out = model(x)
        kind, size = functional.cross_entropy(out["kind"], y), functional.mse_loss(out["size"][:, 0], x[:, 0].tanh())
        kind.backward(retain_graph=True)
        size.backward()
        optimizer.step()
        trial.log({"loss": kind + size, "kind": kind, "size": size}, at=step)


@loop("tasks in turn, an optimizer each", is_quick=True)
def tasks_in_turn(trial: Trial) -> None:
    """Two optimizers of one model that step at different times: each of their steps counts."""
    model = Tasks()
    model.log_var.requires_grad_(False)
    shared = list(model.trunk.parameters())
    of_kind = torch.optim.AdamW([*shared, *model.heads["kind"].parameters()], lr=5e-3)
    of_size = torch.optim.AdamW(model.heads["size"].parameters(), lr=5e-3)
    trial.watch(model, [of_kind, of_size])
    for step, (x, y) in enumerate(islice(clusters(), 40)):
        of_kind.zero_grad()
        kind = functional.cross_entropy(model(x)["kind"], y)
        kind.backward()
        of_kind.step()
        of_size.zero_grad()
        size = functional.mse_loss(model(x)["size"][:, 0], x[:, 0].tanh())
        size.backward()
        of_size.step()
        trial.log({"kind": kind, "size": size}, at=step)


@loop("adversarial examples")
def adversarial(trial: Trial) -> None:
    """The input is moved along its own gradient first: a forward and a backward pass that train nothing."""
    model = mlp(12, 32, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), 60)):
        moved = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(functional.cross_entropy(model(moved), y), moved)
        loss = functional.cross_entropy(model(x + 0.1 * slope.sign()), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@pytest.mark.parametrize("program", loop.of(__name__))
def test_loop(program, tmp_path) -> None:
    program.examine(tmp_path).check()
