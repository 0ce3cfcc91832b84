"""Check on a GPU: the same bits with and without sonde, no synchronisation on the training thread, correct numbers.

    PYTHONPATH=src:vendor python benchmarks/gpu/check.py

Needs torch, numpy, pyarrow, and what sonde itself imports. Prints one line per check; exits 1 if one fails.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "programs"))

import sonde
from awkward import Awkward
from sonde.config import Settings
from sonde.reduce.numpy import sketch
from sonde.reduce.torch import Reducer
from sonde.schema.sketch import FIELDS, INDEX
from sonde.session import begin
from sonde.testing.by_hand import digest

FOLDER = Path(tempfile.mkdtemp(prefix="sonde-gpu-"))


def train(
    watched: bool,
    *,
    optimizer: str,
    autocast: bool,
    scaler: bool,
    compiled: bool = False,
    sync_error: bool = False,
    steps: int = 6,
) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    model = Awkward(width=64, vocabulary=64).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=optimizer == "fused", foreach=optimizer == "foreach")
    called: Any = torch.compile(model) if compiled else model
    scale = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=scaler)
    session: Any = None
    if watched:
        settings = Settings.load(project="gpu", dir=FOLDER, verbose=False, hist_every=1)
        session = begin(settings).watch(model, opt, activations=sonde.every(1), activation_grads=sonde.every(1))
    losses = []
    norms = []
    hand: dict[str, list[torch.Tensor]] = {"ratios": [], "cosines": [], "lags": []}
    for step in range(steps):
        # The first steps create plans and pinned buffers; after them nothing may wait for the device.
        torch.cuda.set_sync_debug_mode("error" if sync_error and step >= 3 else "default")
        opt.zero_grad()
        tokens = torch.randint(0, 64, (8, 32), device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            logits = called(tokens)["logits"]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        scale.scale(loss).backward()
        if not scaler:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            norms.append(model.second.up.weight.grad.norm())
        if scaler:
            torch.cuda.set_sync_debug_mode("default")  # GradScaler itself waits for the device
        before = model.second.up.weight.detach().double()
        scale.step(opt)
        scale.update()
        by_hand(model.second.up.weight, before, opt, step + 1, hand)
        losses.append(loss.detach())
        if session is not None:
            session.log({"loss": loss})
    torch.cuda.set_sync_debug_mode("default")
    state = {k: v.cpu() for k, v in model.state_dict().items()}
    moments = {
        f"{i}.{k}": v.cpu() for i, s in enumerate(opt.state.values()) for k, v in s.items() if torch.is_tensor(v)
    }
    result = {
        "bits": digest(state)
        + digest(moments)
        + digest(torch.cuda.get_rng_state())
        + digest([x.cpu() for x in losses]),
        "losses": [x.item() for x in losses],
        "norms": [x.item() for x in norms],
        **{name: [x.item() for x in values] for name, values in hand.items()},
        "errors": session.recording.breaker.num_errors if session else 0,
    }
    if session is not None:
        path = session.path
        session.finish()
        result["run"] = sonde.open(path)
    return result


def by_hand(weight: Any, before: torch.Tensor, opt: Any, taken: int, hand: dict[str, list[torch.Tensor]]) -> None:
    """The effect of the optimizer step on one weight, in plain float64."""
    update, grad = weight.detach().double() - before, weight.grad.double()
    second = opt.state[weight]["exp_avg_sq"].double() / (1 - 0.999**taken)
    hand["ratios"].append(update.norm() / before.norm())
    hand["cosines"].append((grad * update).sum() / grad.norm() / update.norm())
    hand["lags"].append((grad.square() / second.clamp(min=1e-16)).mean())


def fresh(watched: bool, **options: Any) -> dict[str, Any]:
    """Compile from scratch: the compiler's caches from an earlier training must not matter."""
    torch.compiler.reset()
    return train(watched, **options)


def check(name: str, is_right: bool, detail: str = "") -> bool:
    print(f"{'ok  ' if is_right else 'FAIL'} {name} {detail}", flush=True)
    return is_right


def check_identity() -> bool:
    right = True
    for optimizer, autocast, scaler, compiled in [
        ("foreach", False, False, False),
        ("fused", False, False, False),
        ("fused", True, True, False),
        ("foreach", True, False, False),
        ("foreach", False, False, True),
        ("fused", True, False, True),
    ]:
        options: Any = {"optimizer": optimizer, "autocast": autocast, "scaler": scaler, "compiled": compiled}
        bare, again, watched = fresh(False, **options), fresh(False, **options), fresh(True, **options)
        name = f"bits {optimizer} autocast={autocast} scaler={scaler} compiled={compiled}"
        if bare["bits"] != again["bits"]:
            right &= check(name, False, "training itself is not reproducible here: the check says nothing")
            continue
        right &= check(name, bare["bits"] == watched["bits"] and not watched["errors"], f"errors={watched['errors']}")
    return right


def check_numbers() -> bool:
    result = train(True, optimizer="foreach", autocast=False, scaler=False, sync_error=True)
    run = result["run"]
    got = run.stats("grad/second.up.weight/norm").column("value").to_pylist()
    logged = run.scalars("loss").column("value").to_pylist()
    ratio = run.stats("update/second.up.weight/ratio").column("value").to_pylist()
    cosine = run.stats("update/second.up.weight/grad_cosine").column("value").to_pylist()
    lag = run.stats("update/second.up.weight/second_moment_lag").column("value").to_pylist()
    right = check("updates by hand", np.allclose(ratio, result["ratios"], rtol=1e-4), f"{ratio[-1]:.6g}")
    right &= check("gradient and update", np.allclose(cosine, result["cosines"], rtol=1e-3), f"{cosine[-1]:.6g}")
    right &= check("second-moment lag", np.allclose(lag, result["lags"], rtol=1e-3), f"{lag[-1]:.6g}")
    right &= check("no synchronisation", result["errors"] == 0, f"errors={result['errors']}")
    right &= check("gradient norms", np.allclose(got, result["norms"], rtol=1e-6))
    return right & check("logged tensors", np.allclose(logged, result["losses"], rtol=1e-6))


def check_reference() -> bool:
    right = True
    torch.manual_seed(1)
    zoo = [torch.randn(n) * 10.0 ** ((i % 9) * 4 - 16) for i, n in enumerate((1, 7, 4096, 5000, 200_001, 3_000_000))]
    zoo += [torch.randn(1000).to(d) for d in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn)]
    zoo += [torch.randint(-9, 9, (5000,)), torch.tensor([float("nan"), 1.0, float("inf"), 0.0]), torch.zeros(0, 3)]
    reducer = Reducer()
    for mode in ("one by one", "all at once"):
        if mode == "one by one":
            for key, tensor in enumerate(zoo):
                reducer.add(key, tensor.cuda(), histogram=True)
        else:
            reducer.add_all("zoo", list(range(len(zoo))), [t.cuda() for t in zoo], histogram=True)
        worst, exact, seen = 0.0, True, 0
        for table in reducer.take():
            keys, rows, _ = table.resolve()
            for key, row in zip(keys, rows, strict=True):
                tensor = zoo[key]
                reference = sketch(tensor.double().numpy() if tensor.dtype.is_floating_point else tensor.numpy()).rows
                seen += 1
                for field in FIELDS[:9]:
                    a, b = row[INDEX[field]], reference[INDEX[field]]
                    if field in ("sum", "sumsq", "sumabs"):
                        size = max(abs(b), reference[INDEX["sumabs"]] if field == "sum" else 0.0)
                        worst = max(worst, abs(a - b) / size if size else abs(a))
                    else:
                        exact &= bool(a == b)
        right &= check(
            f"reference, {mode}", exact and worst < 1e-6 and seen == len(zoo), f"worst {worst:.1e}, {seen} tensors"
        )
    return right


def main() -> int:
    torch.use_deterministic_algorithms(True, warn_only=True)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, time.strftime("%Y-%m-%d"))
    return 0 if check_reference() & check_numbers() & check_identity() else 1


if __name__ == "__main__":
    sys.exit(main())
