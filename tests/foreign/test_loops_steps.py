"""Loops that differ in how a step is made: closures, accumulation, scalers, schedules, steps inside of backward."""

# ruff: noqa: B023 - a closure is called before its loop continues

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from synthetic import clusters, curves, pictures, sequences, signals
from trial import Trial, loop

STEPS = 40


def classifier(features: int = 12, classes: int = 4, width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, classes)
    )


def regressor(features: int = 6, width: int = 24) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, 1))


@loop("SGD with a closure")
def sgd_closure(trial: Trial) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        trial.log({"loss": loss}, at=step)


@loop("closure that clips", is_quick=True)
def clipping_closure(trial: Trial) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return loss

        loss = optimizer.step(closure)
        trial.log({"loss": loss}, at=step)


@loop("L-BFGS", is_quick=True)
def lbfgs(trial: Trial) -> None:
    model = regressor()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(curves(batch=256), 12)):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        trial.log({"loss": loss}, at=step)


@loop("L-BFGS with a line search")
def lbfgs_line_search(trial: Trial) -> None:
    model = regressor()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(curves(batch=256), 8)):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        trial.log({"loss": loss}, at=step)


@loop("accumulation, last group incomplete")
def accumulation(trial: Trial) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trial.watch(model, optimizer)
    step, total, num = 0, torch.zeros(()), 50  # 4 + 4 + … + 2
    for batch, (x, y) in enumerate(islice(clusters(), num)):
        loss = functional.cross_entropy(model(x), y) / 4
        loss.backward()
        total = total + loss.detach()
        if batch % 4 == 3 or batch == num - 1:
            optimizer.step()
            optimizer.zero_grad()
            trial.log({"loss": total}, at=step)
            step, total = step + 1, torch.zeros(())


@loop("accumulation with clipping, logged before the step", is_quick=True)
def accumulation_clipped(trial: Trial) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trial.watch(model, optimizer)
    batches = clusters()
    for step in range(STEPS // 2):
        optimizer.zero_grad(set_to_none=False)
        losses = []
        for x, y in islice(batches, 3):
            loss = functional.cross_entropy(model(x), y)
            (loss / 3).backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        trial.log({"loss": torch.stack(losses).mean(), "norm": norm}, at=step)
        optimizer.step()


@loop("clipping by value")
def clipping_by_value(trial: Trial) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@loop("every layer clipped by itself", is_quick=True)
def clipping_by_layer(trial: Trial) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        for layer, limit in ((model[0], 0.1), (model[2], 0.2), (model[4], 0.3)):
            nn.utils.clip_grad_norm_(layer.parameters(), limit)
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@loop("clipping by value, then by norm")
def clipping_twice(trial: Trial) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@loop("a norm measured by clipping to infinity")
def measured_norm(trial: Trial) -> None:
    """`clip_grad_norm_(…, inf)`, and logged: nothing is clipped."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.step()
        trial.log({"loss": loss, "norm": norm}, at=step)


@loop("gradients changed by hand")
def manual_gradients(trial: Trial) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        for number, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            parameter.grad.mul_(0.5 if number < 2 else 1.0)
            parameter.grad.add_(torch.randn_like(parameter), alpha=1e-3)
        model[0].weight.grad = model[0].weight.grad.clone().clamp_(-0.1, 0.1)
        optimizer.step()
        trial.log({"loss": loss}, at=step)


@loop("GradScaler on the CPU")
def scaler_cpu(trial: Trial) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        trial.log({"loss": loss}, at=step)
    trial.keep(scaler=scaler.state_dict())


@loop("GradScaler that unscales by itself")
def scaler_step(trial: Trial) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        trial.log({"loss": loss}, at=step)
    trial.keep(scaler=scaler.state_dict())


@loop("GradScaler that finds its scale", is_quick=True)
def scaler_skips(trial: Trial) -> None:
    """It begins too high: the first steps are skipped, as always, and count."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        scaler.scale(8 * loss).backward()
        scaler.unscale_(optimizer)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            trial.skipped(optimizer)
        trial.log({"loss": loss}, at=step)
    trial.keep(scaler=scaler.state_dict())


@loop("SGD by hand, without an optimizer")
def by_hand(trial: Trial) -> None:
    model = classifier()
    trial.watch(model)
    for step, (x, y) in enumerate(islice(clusters(), 60)):
        model.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        trial.log({"loss": loss}, at=step)
        trial.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.3 * parameter.grad


@loop("autocast to bfloat16")
def autocast(trial: Trial) -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(pictures(), STEPS)):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


SCHEDULES = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 10, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [15, 30], 0.3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.98),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=STEPS),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 5e-3, step_size_up=5, cycle_momentum=False),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=10),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=10),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, STEPS, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda s: min(1.0, (s + 1) / 10)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda s: 0.99),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=8), lr_scheduler.CosineAnnealingLR(o, STEPS)], [8]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.2, total_iters=8), lr_scheduler.ExponentialLR(o, 0.99)], optimizer=o
    ),
}


def scheduled(name: str):
    @loop(f"schedule {name}")
    def program(trial: Trial) -> None:
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        schedule = SCHEDULES[name](optimizer)
        trial.watch(model, optimizer)
        for step, (x, y) in enumerate(islice(clusters(), STEPS)):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            trial.log({"loss": loss}, at=step)

    return program


for _name in SCHEDULES:
    scheduled(_name)


@loop("schedule ReduceLROnPlateau")
def plateau(trial: Trial) -> None:
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3, threshold=0.2)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step(loss.item())
        trial.log({"loss": loss.item()}, at=step)


@loop("groups with different settings", is_quick=True)
def groups(trial: Trial) -> None:
    model = classifier()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed[:1], "lr": 1e-3},
            {"params": decayed[1:], "weight_decay": 0.1, "betas": (0.8, 0.95)},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=5e-3,
    )
    schedule = lr_scheduler.LambdaLR(optimizer, [lambda s: 1.0, lambda s: 0.99**s, lambda s: min(1.0, s / 10 + 0.1)])
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        trial.log({"loss": loss}, at=step)


class Sharpness(torch.optim.Optimizer):
    """SAM as it is published: climb to the worst point nearby, take the gradient there, step from where it was."""

    def __init__(self, parameters, base, rho: float = 0.05, **given) -> None:
        super().__init__(parameters, {"rho": rho, **given})
        self.base = base(self.param_groups, **given)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        everything = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in everything]).norm()
        for p in everything:
            self.state[p]["old_p"] = p.detach().clone()
            p.add_(p.grad, alpha=float(self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p]["old_p"])
        self.base.step()

    @torch.no_grad()
    def step(self, closure=None) -> None:
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


@loop("SAM")
def sam(trial: Trial) -> None:
    model = classifier()
    optimizer = Sharpness(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    trial.watch(model, optimizer.base)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.first_step()
        functional.cross_entropy(model(x), y).backward()
        optimizer.second_step()
        trial.log({"loss": loss}, at=step)


@loop("SAM by a closure", is_quick=True)
def sam_closure(trial: Trial) -> None:
    model = classifier()
    optimizer = Sharpness(model.parameters(), torch.optim.AdamW, lr=3e-3)
    trial.watch(model, follows=optimizer)
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):

        def closure() -> Tensor:
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.zero_grad()
        loss = closure()
        optimizer.step(closure)
        trial.log({"loss": loss}, at=step)


@loop("optimizer in backward", is_quick=True)
def in_backward(trial: Trial) -> None:
    """One optimizer for each parameter, which steps as soon as the gradient is there and frees it."""
    model = classifier()
    optimizers = {p: torch.optim.AdamW([p], lr=3e-3, foreach=False) for p in model.parameters()}

    def step_now(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    trial.watch(model, list(optimizers.values()))
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        trial.log({"loss": loss}, at=step)


@loop("optimizer in backward, not named", is_quick=True)
def in_backward_unnamed(trial: Trial) -> None:
    model = classifier()
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step_now(parameter: Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    trial.watch(model, follows=list(optimizers.values()))
    for step, (x, y) in enumerate(islice(clusters(), STEPS)):
        loss = functional.cross_entropy(model(x), y)
        trial.log({"loss": loss}, at=step)
        loss.backward()


@loop("truncated backpropagation through time", is_quick=True)
def truncated(trial: Trial) -> None:
    lstm, head = nn.LSTM(1, 24, batch_first=True), nn.Linear(24, 1)
    model = nn.ModuleDict({"lstm": lstm, "head": head})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trial.watch(model, optimizer)
    step = 0
    for x, y in islice(signals(length=24), 15):
        state = None
        for part, target in zip(x.split(8, 1), y.split(8, 1), strict=True):
            if state is not None:
                state = tuple(s.detach() for s in state)
            hidden, state = lstm(part, state)
            loss = functional.mse_loss(head(hidden), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            trial.log({"loss": loss}, at=step)
            step += 1


class Drawn(IterableDataset):
    """Every worker makes its own half."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        seed = 0 if info is None else info.id
        return islice(((x[0], y[0]) for x, y in clusters(batch=1, seed=seed)), self.num)


@loop("DataLoader with workers")
def workers(trial: Trial) -> None:
    x, y = next(clusters(batch=640))
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, num_workers=2)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    trial.watch(model, optimizer)
    step = 0
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            trial.log({"loss": loss}, at=step)
            step += 1


@loop("IterableDataset with workers that stay")
def iterable_workers(trial: Trial) -> None:
    loader = DataLoader(Drawn(320), batch_size=32, num_workers=2, persistent_workers=True)
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    trial.watch(model, optimizer)
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        trial.log({"loss": loss}, at=step)


OPTIMIZERS = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=2e-2),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=3e-3, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=3e-3, fused=True),
    "Adam with a tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(3e-3), foreach=False),
    "AdamW maximize": lambda p: torch.optim.AdamW(p, lr=3e-3, maximize=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=5e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=3e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=3e-4, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


def optimized(name: str):
    @loop(f"optimizer {name}")
    def program(trial: Trial) -> None:
        model = classifier()
        optimizer = OPTIMIZERS[name](model.parameters())
        sign = -1 if "maximize" in name else 1
        trial.watch(model, optimizer)
        for step, (x, y) in enumerate(islice(clusters(batch=128 if name == "Rprop" else 32), STEPS)):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            (sign * loss).backward()
            optimizer.step()
            trial.log({"loss": loss}, at=step)

    return program


for _name in OPTIMIZERS:
    optimized(_name)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 32), nn.Parameter(torch.randn(12, 32) / 4)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 20, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.norm(self.block(self.embed(tokens) + self.place, mask, is_causal=True)))


@loop("language model with accumulation and warm-up", is_quick=True)
def language_model(trial: Trial) -> None:
    """As people write it: nanoGPT's loop."""
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    trial.watch(model, optimizer)
    batches = sequences()
    for step in range(60):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 8)
        for _ in range(2):
            x, y = next(batches)
            loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        trial.log({"loss": loss.item() * 2}, at=step)


@pytest.mark.parametrize("program", loop.of(__name__))
def test_loop(program, tmp_path) -> None:
    program.examine(tmp_path).check()
