"""On a GPU: what is kept is what was there, no bit changes, and the host never waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sonde
from sonde.testing.by_hand import digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def train(begin: Any, steps: int, **options: Any) -> tuple[Any, list[dict[str, torch.Tensor]], str]:
    torch.manual_seed(0)
    torch.cuda.manual_seed(0)
    layers = nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(2048, 512)
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    session = begin() if options else None
    if session is not None:
        plan = sonde.Snapshots(**{"store": "memory", "when": sonde.every(1), "kinds": "all", **options})
        session.watch(model, optimizer, snapshots=plan)
    x, seen = torch.randn(256, 512, device="cuda"), []
    for step in range(steps):
        # A probe is compared with what was there before, and waited for; everything else must not wait, once warm.
        torch.cuda.set_sync_debug_mode("error" if step > 1 and "probe" not in options else "default")
        for _ in range(5):  # so that the device is behind, and a copy that does not wait in order would be seen
            model(x).square().mean().backward()
        named = [(f"param/{n}", t) for n, t in model.state_dict().items()]
        named += [(f"grad/{n}", p.grad) for n, p in model.named_parameters() if p.grad is not None]
        seen.append({name: tensor.detach().clone() for name, tensor in named})
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return session, seen, digest([p.detach().cpu() for p in model.parameters()])


@pytest.mark.parametrize("options", [{"at_once": False}, {"at_once": True}, {"probe": torch.ones(4, 512)}])
def test_what_is_kept_on_a_gpu_is_what_was_there_and_nothing_waits(options: dict[str, Any], begin: Any) -> None:
    _, _, bare = train(begin, 4)
    session, seen, watched = train(begin, 4, **options)
    assert watched == bare
    assert session.flush(60)
    assert session.recording.breaker.num_errors == 0
    store = session.steps.snapshots._writer._store
    assert store.steps() == [0, 1, 2, 3]
    for step, expected in enumerate(seen):
        tensors = store.read(step).tensors
        for name, tensor in expected.items():
            assert np.array_equal(tensors[name].values(), tensor.cpu().numpy()), (step, name)
        assert {"act/0", "batch/input.0"} <= set(tensors)
        assert ("probe/model" in tensors) == ("probe" in options)
