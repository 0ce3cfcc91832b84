"""The verdicts of `sonde.flow` on healthy foreign models as they are initialised. All: `benchmarks/flow_zoo.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import specimens_initial
import specimens_other
import specimens_text
import specimens_timm
import specimens_torchvision
import specimens_vision
from sonde.flow import analyze
from specimen import Specimen, own_loss
from specimens_text import from_config
from tasks import Batch

EVERY = (
    *specimens_text.ALL,
    *specimens_vision.ALL,
    *specimens_other.ALL,
    *specimens_timm.ALL,
    *specimens_torchvision.ALL,
    *specimens_initial.ALL,
)
KNOWN = {"PoolFormerForImageClassification": {"DEAD"}}
"""At this size its last stage pools a single pixel, which leaves a norm without a gradient."""
QUICK = (
    "DeiTForImageClassification", "ElectraForMaskedLM", "BartForConditionalGeneration",
    "SegformerForSemanticSegmentation", "RwkvForCausalLM", "Wav2Vec2ForCTC", "MambaForCausalLM", "MixtralForCausalLM",
    "PoolFormerForImageClassification", "CaiT, layer scale 1e-5", "ConvNeXt, layer scale 1e-6",
    "ResNet, last gammas zero", "LoRA", "Mixture of experts", "LSTM, 12 steps", "LSTM, 48 steps",
)  # fmt: skip


class Whole(nn.Module):
    """A model together with its loss."""

    def __init__(self, net: nn.Module, specimen: Specimen) -> None:
        super().__init__()
        self.net, self.specimen = net, specimen

    def forward(self, batch: Batch) -> Tensor:
        return self.specimen.loss(self.net, batch)


@pytest.mark.parametrize(
    "specimen", [pytest.param(s, id=s.name, marks=[pytest.mark.slow] if s.name in QUICK else []) for s in EVERY]
)
def test_a_healthy_model_has_no_severe_issue(specimen: Specimen) -> None:
    torch.manual_seed(0)
    model, batch = specimen.build().train(), next(iter(specimen.batches()))
    report = analyze(model, batch) if specimen.loss is own_loss else analyze(Whole(model, specimen), (batch,))
    severe = {issue.type for issue in report.issues if issue.severity in ("HIGH", "CRITICAL")}
    assert severe == KNOWN.get(specimen.name, set())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["DeiTForImageClassification", "ElectraForMaskedLM", "BartForConditionalGeneration", "RwkvForCausalLM"],
)
def test_a_model_as_its_package_initialises_it_has_none(name: str) -> None:
    """At the widths of the zoo, weights of the default size are far too small, which makes branches small as well."""
    torch.manual_seed(0)
    specimen = next(specimen for specimen in EVERY if specimen.name == name)
    model = specimen.build()
    plain = {k: v for k, v in model.config.to_diff_dict().items() if k not in ("initializer_range", "init_std")}
    model = from_config(plain.pop("model_type"), name, **plain)().train()
    report = analyze(model, next(iter(specimen.batches())))
    assert [issue for issue in report.issues if issue.severity in ("HIGH", "CRITICAL")] == []
