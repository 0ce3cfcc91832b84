"""Models of the zoo trained in another way: checkpointed, in half precision, partly frozen, in another layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

import specimens_text
import specimens_torchvision
import specimens_vision
from specimen import Specimen, own_loss
from tasks import Batch

GROUP = "variations"
KNOWN = {
    specimen.name: specimen for specimen in (*specimens_text.ALL, *specimens_vision.ALL, *specimens_torchvision.ALL)
}


def _changed(name: str, what: str, change: Callable[[nn.Module], nn.Module]) -> Specimen:
    specimen = KNOWN[name]
    return replace(
        specimen,
        name=f"{name}, {what}",
        group=GROUP,
        build=lambda: change(specimen.build()),
        is_quick=False,
    )


def checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def frozen_backbone(model: nn.Module) -> nn.Module:
    """All but the last layers, as one fine-tunes with little data."""
    for parameter in model.base_model.parameters():
        parameter.requires_grad_(False)
    return model


def frozen_embeddings(model: nn.Module) -> nn.Module:
    model.get_input_embeddings().weight.requires_grad_(False)
    return model


def autocast_loss(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return own_loss(model, batch)


def _in_autocast(name: str) -> Specimen:
    return replace(KNOWN[name], name=f"{name}, autocast to bfloat16", group=GROUP, loss=autocast_loss, is_quick=False)


ALL = [
    _changed("LlamaForCausalLM", "checkpointed", checkpointed),
    _changed("T5ForConditionalGeneration", "checkpointed", checkpointed),
    _changed("ViTForImageClassification", "checkpointed", checkpointed),
    _changed("LlamaForCausalLM", "in bfloat16", lambda model: model.to(torch.bfloat16)),
    _changed("GPT2LMHeadModel", "in float64", nn.Module.double),
    _in_autocast("BertForMaskedLM"),
    _in_autocast("MixtralForCausalLM"),
    _in_autocast("MambaForCausalLM"),
    _changed("ViTForImageClassification", "frozen backbone", frozen_backbone),
    _changed("RobertaForMaskedLM", "frozen embeddings", frozen_embeddings),
    _changed("ResNet, basic blocks", "channels last", lambda model: model.to(memory_format=torch.channels_last)),
    _changed("MobileNetV3", "channels last", lambda model: model.to(memory_format=torch.channels_last)),
]
