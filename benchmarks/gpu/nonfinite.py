"""Plant 20 NaN and Inf in four models of real size, and compare the place that sonde names; then time the check.

    python benchmarks/gpu/nonfinite.py [resnet50 vit gpt2 llama] [--no-times] [--no-faults]

Needs torchvision and transformers. A fault is written into the output of one module at one step, most of them into a
single element, after the module has computed it and before anything uses it. The times compare the optimizer side at
every step, with and without the check, with the step alone: blocks of steps in turn, by the device's clock.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from training import OPTIMIZER_SIDE, Recorded, compare, print_table

import sonde

# Or transformers would take kernels.py for a package that it knows by this name.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).parent.resolve()]

AT = 2
"""The step of the fault; one more follows."""


class Trained(NamedTuple):
    """A model, and the loss of one forward pass."""

    model: nn.Module
    loss: Callable[[], Tensor]
    block: int
    """Steps per lap."""


class Fault(NamedTuple):
    """A value in the output of a module."""

    module: str
    value: float = math.nan
    is_single: bool = True


def resnet50() -> Trained:
    from torchvision.models import resnet50 as make

    model = make().cuda().to(memory_format=torch.channels_last)
    x = torch.randn(128, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 1000, (128,), device="cuda")
    return Trained(model, lambda: functional.cross_entropy(model(x), y), 10)


def vit() -> Trained:
    from torchvision.models import vit_b_16

    model = vit_b_16().cuda()
    x, y = torch.randn(128, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (128,), device="cuda")
    return Trained(model, lambda: functional.cross_entropy(model(x), y), 6)


def gpt2() -> Trained:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).cuda()
    x = torch.randint(0, 50257, (16, 1024), device="cuda")
    return Trained(model, lambda: model(input_ids=x, labels=x).loss, 4)


def llama() -> Trained:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5504, num_hidden_layers=16, num_attention_heads=16, vocab_size=32000,
        max_position_embeddings=1024, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).cuda()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    x = torch.randint(0, 32000, (8, 1024), device="cuda")
    return Trained(model.train(), lambda: model(input_ids=x, labels=x).loss, 3)


MODELS: dict[str, Callable[[], Trained]] = {"resnet50": resnet50, "vit": vit, "gpt2": gpt2, "llama": llama}
FAULTS: dict[str, list[Fault]] = {
    "resnet50": [
        Fault("conv1"),
        Fault("layer1.1.bn3"),
        Fault("layer2.0.conv2"),
        Fault("layer3.4.bn2", is_single=False),
        Fault("layer4.2.conv3", math.inf),
    ],
    "vit": [
        Fault("conv_proj"),
        Fault("encoder.layers.encoder_layer_3.self_attention"),
        Fault("encoder.layers.encoder_layer_5.mlp.0"),
        Fault("encoder.layers.encoder_layer_8.ln_2", math.inf),
        Fault("encoder.layers.encoder_layer_11.mlp.3", is_single=False),
    ],
    "gpt2": [
        Fault("transformer.h.0.ln_1"),
        Fault("transformer.h.4.attn.c_attn"),
        Fault("transformer.h.7.mlp.act", math.inf),
        Fault("transformer.h.11.mlp.c_proj"),
        Fault("lm_head", is_single=False),
    ],
    "llama": [
        Fault("model.embed_tokens"),
        Fault("model.layers.3.self_attn.q_proj"),
        Fault("model.layers.8.mlp.gate_proj", math.inf),
        Fault("model.layers.12.post_attention_layernorm", is_single=False),
        Fault("model.layers.15.mlp.down_proj"),
    ],
}


@contextmanager
def planted(module: nn.Module, fault: Fault, is_on: list[bool]) -> Iterator[None]:
    """The fault is in the module's output while `is_on[0]`, as if its kernel had computed it."""
    forward = module.forward

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        if is_on[0]:
            at = tuple(size // 3 for size in first.shape) if fault.is_single else ...
            first.data[at] = fault.value  # not in place for autograd: the graph is that of a sound model
        return output

    module.forward = spoiled
    try:
        yield
    finally:
        del module.forward


def train_step(trained: Trained, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = trained.loss()
    loss.backward()
    optimizer.step()


def find(trained: Trained, fault: Fault, folder: str) -> dict[str, Any]:
    """The details of the first event; empty if there is none."""
    model, is_on = trained.model, [False]
    kept = [tensor.clone() for tensor in model.state_dict().values()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    nothing = dict.fromkeys(("activations", "inspect", "params", "grads", "updates", "optim"), False)
    recorded = Recorded(model, optimizer, folder, **nothing, settings={"check_finite": True, "live_rules": False})
    with planted(model.get_submodule(fault.module), fault, is_on):
        for step in range(AT + 2):
            is_on[0] = step == AT
            train_step(trained, optimizer)
    recorded.stop()
    for tensor, before in zip(model.state_dict().values(), kept, strict=True):
        tensor.copy_(before)
    events = sonde.open(recorded.session.path).events().to_pylist()
    return next(({**e, **json.loads(e["details"])} for e in events if e["type"] == "nonfinite"), {})


def block_of(site: str) -> str:
    """The block of a model that a module belongs to: `layer1.0`, `encoder.layers.encoder_layer_3`, `model.layers.8`."""
    found = re.match(r"(.*?\.(?:encoder_layer_)?\d+)(?=\.|$)", site)
    return found.group(1) if found else site


def verdict(found: dict[str, Any], fault: Fault) -> tuple[bool, str]:
    """Whether the step is right; "exact", "interval", or the wrong place."""
    named = found.get("suspect") or ("" if found.get("unknown") else found.get("site"))
    if named == fault.module and (found["suspect"] or found["role"] == "output"):
        return found["step"] == AT, "exact"
    among = found.get("unknown", []) + [found.get("site")] * (found.get("role") == "output")
    is_within = fault.module in among and len({block_of(site) for site in among}) == 1
    where = f"{found.get('after')} to {found.get('role')} of {found.get('site')}" if found else "no event"
    return found.get("step") == AT, f"interval ({where})" if is_within else f"WRONG ({where})"


def plant_all(name: str, trained: Trained) -> list[tuple[bool, str]]:
    found = []
    for fault in FAULTS[name]:
        with tempfile.TemporaryDirectory() as folder:
            event = find(trained, fault, folder)
        found.append(verdict(event, fault))
        what = f"{'one' if fault.is_single else 'every'} element {fault.value}"
        is_right, place = found[-1]
        unknown = f"{event.get('num_unknown')} of {event.get('num_seen')} unknown"
        print(
            f"  {fault.module:48s} {what:18s} step {'right' if is_right else 'WRONG'}  {place}  ({unknown})", flush=True
        )
    return found


def time_check(name: str, trained: Trained, rounds: int) -> None:
    model = trained.model
    optimizer: torch.optim.Optimizer
    if name == "resnet50":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        nothing = dict.fromkeys(("activations", "inspect", "params", "grads", "updates", "optim"), False)
        on, off = ({"check_finite": is_on, "live_rules": False} for is_on in (True, False))
        attach = partial(Recorded, model, optimizer, folder, budget=None)
        arms: dict[str, Callable[[], Any]] = {
            "optimizer side, no check": partial(attach, **OPTIMIZER_SIDE, settings=off),
            "optimizer side and the check": partial(attach, **OPTIMIZER_SIDE, settings=on),
            "only the check": partial(attach, **nothing, settings=on),
        }
        print_table(name, compare(partial(train_step, trained, optimizer), arms, rounds, trained.block))


def main(arguments: list[str]) -> None:
    chosen = [name for name in MODELS if name in arguments] or list(MODELS)
    results = []
    for name in chosen:
        torch.manual_seed(0)
        trained = MODELS[name]()
        if "--no-faults" not in arguments:
            print(name)
            results += plant_all(name, trained)
        if "--no-times" not in arguments:
            time_check(name, trained, rounds=8)
        del trained
        torch.cuda.empty_cache()
    if results:
        steps, exact = sum(is_right for is_right, _ in results), sum(place == "exact" for _, place in results)
        within = exact + sum(place.startswith("interval") for _, place in results)
        num = len(results)
        print(f"step right in {steps} of {num}, exact module in {exact}, module or one block in {within}")


if __name__ == "__main__":
    main(sys.argv[1:])
