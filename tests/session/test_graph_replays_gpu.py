"""On a GPU: replays of a CUDA graph that holds an optimizer step are steps, and the host never waits for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from numbered import check_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("is_whole", [False, True])
def test_replays_are_counted_and_parameters_are_those_after_them(is_whole: bool, begin: Any, reopen: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    x = torch.randn(8, 16, device="cuda")
    session = begin().watch(model, optimizer)

    def backward() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in range(3):
            backward()
            optimizer.step()
            session.log({"number": step})
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if is_whole:
            backward()
        optimizer.step()
    sums: list[torch.Tensor] = []
    for step in range(3, 9):
        if not is_whole:
            backward()
        torch.cuda.set_sync_debug_mode("error")
        graph.replay()
        session.log({"number": step})
        torch.cuda.set_sync_debug_mode("default")
        sums.append(model.weight.detach().double().sum())
    run = reopen()
    check_steps(run, "number", steps=9)
    assert run.stats("param/weight/sum")["value"].to_pylist()[3:] == pytest.approx([float(s) for s in sums], rel=1e-5)
    assert len(run.warnings) == 1
