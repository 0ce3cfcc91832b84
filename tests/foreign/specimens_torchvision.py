"""Models of torchvision with few channels: classification, segmentation and detection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import packages
import tasks
from specimen import Specimen
from tasks import Batch, Batches

GROUP = "torchvision"
COUNT = tasks.CLASSES


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def segmentation_loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["pixel_values"])["out"], batch["labels"])


def detection_loss(model: nn.Module, batch: Batch) -> Tensor:
    """torchvision's detectors return their losses."""
    losses: dict[str, Tensor] = model(list(batch["pixel_values"]), batch["labels"])
    return torch.stack(list(losses.values())).sum()


def corner_boxes(rows: int = 4, size: int = 32) -> Batches:
    """Boxes as torchvision takes them."""
    for batch in tasks.boxes(rows, size):
        labels = []
        for target in batch["labels"]:
            centre, side = size * target["boxes"][:, :2], size * target["boxes"][:, 2:]
            corners = torch.cat([centre - side / 2, centre + side / 2], 1)
            labels.append({"boxes": corners, "labels": target["class_labels"]})
        yield {"pixel_values": batch["pixel_values"], "labels": labels}


def _resnet(models: Any, block: str, **options: Any) -> nn.Module:
    """The first two stages; the others are as wide as their number of channels is fixed."""
    net = models.ResNet(getattr(models.resnet, block), [1, 1, 1, 1], num_classes=COUNT, **options)
    net.layer3 = net.layer4 = nn.Identity()
    net.fc = nn.Linear(128 * getattr(models.resnet, block).expansion, COUNT)
    return net


def _vgg(models: Any, *, batch_norm: bool) -> nn.Module:
    features = models.vgg.make_layers([16, "M", 32, 32, "M"], batch_norm=batch_norm)
    head = nn.Sequential(
        nn.Flatten(), nn.Linear(32 * 8 * 8, 64), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(64, COUNT)
    )
    return nn.Sequential(features, head)


def _mobilenet_v3(models: Any) -> nn.Module:
    from torchvision.models.mobilenetv3 import InvertedResidualConfig

    block = partial(InvertedResidualConfig, width_mult=1.0)
    settings = [
        block(16, 3, 16, 16, True, "RE", 2, 1),
        block(16, 3, 32, 24, False, "RE", 2, 1),
        block(24, 5, 48, 24, True, "HS", 1, 1),
    ]
    return models.MobileNetV3(settings, last_channel=64, num_classes=COUNT)


def _efficientnet(models: Any, kind: str) -> nn.Module:
    from torchvision.models import efficientnet

    config = getattr(efficientnet, kind)
    rows = [(1, 3, 1, 16, 16, 1), (2, 3, 2, 16, 24, 1), (2, 3, 2, 24, 32, 2)]
    settings = [
        config(*row, **({} if kind == "FusedMBConvConfig" else {"width_mult": 1.0, "depth_mult": 1.0})) for row in rows
    ]
    return models.EfficientNet(settings, dropout=0.1, stochastic_depth_prob=0.1, num_classes=COUNT, last_channel=64)


def _regnet(models: Any) -> nn.Module:
    params = models.regnet.BlockParams.from_init_params(
        depth=4, w_0=16, w_a=16.0, w_m=2.0, group_width=8, se_ratio=0.25
    )
    return models.RegNet(params, num_classes=COUNT, stem_width=16)


def _convnext(models: Any) -> nn.Module:
    block = models.convnext.CNBlockConfig
    return models.ConvNeXt([block(16, 32, 1), block(32, None, 2)], layer_scale=0.1, num_classes=COUNT)


def _swin(models: Any, version: int) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    parts = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2} if version == 2 else {}
    return models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=COUNT, **parts)


def _maxvit(models: Any) -> nn.Module:
    return models.MaxVit((32, 32), 16, 4, [16, 32], [1, 1], 8, stochastic_depth_prob=0.1, num_classes=COUNT)


def _stem(stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, stride=stride, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
    )  # fmt: skip


def _segmentation(models: Any) -> nn.Module:
    from torchvision.models import segmentation

    backbone = models._utils.IntermediateLayerGetter(_stem(1), return_layers={"5": "out"})
    return segmentation.FCN(backbone, segmentation.fcn.FCNHead(32, COUNT))


def _detection(models: Any, kind: str) -> nn.Module:
    from torchvision.models import detection
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    backbone: Any = _stem(2)
    backbone.out_channels = 32
    sizes = ((8,),) if kind == "FCOS" else ((8, 12, 16),)
    anchors = AnchorGenerator(sizes=sizes, aspect_ratios=((1.0,),))
    detector = getattr(detection, kind)
    return detector(backbone, num_classes=2, anchor_generator=anchors, min_size=32, max_size=32)


def _vision(
    name: str,
    build: Callable[..., nn.Module],
    *args: Any,
    size: int = 32,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> Specimen:
    def built() -> nn.Module:
        packages.use("torchvision")
        from torchvision import models

        return build(models, *args, **(options or {}))

    more.setdefault("batches", partial(tasks.image_classification, size=size))
    more.setdefault("loss", classification_loss)
    return Specimen(name, GROUP, built, **more)


ALL = [
    _vision("ResNet, basic blocks", _resnet, "BasicBlock"),
    _vision("ResNet, bottlenecks", _resnet, "Bottleneck"),
    _vision("ResNeXt", _resnet, "Bottleneck", options={"groups": 8, "width_per_group": 4}),
    _vision("VGG", _vgg, options={"batch_norm": False}, lr=1e-3),
    _vision("VGG with batch norm", _vgg, options={"batch_norm": True}),
    _vision("DenseNet", lambda m: m.DenseNet(8, (2, 2, 2, 2), 16, num_classes=COUNT), size=64),
    _vision(
        "DenseNet, checkpointed",
        lambda m: m.DenseNet(8, (2, 2, 2, 2), 16, num_classes=COUNT, memory_efficient=True),
        size=64,
    ),
    _vision("MobileNetV2", lambda m: m.MobileNetV2(COUNT, 0.35, [[1, 16, 1, 1], [4, 24, 2, 2], [4, 32, 2, 2]])),
    _vision("MobileNetV3", _mobilenet_v3, is_quick=True),
    _vision("ShuffleNetV2", lambda m: m.ShuffleNetV2([2, 2, 2], [16, 32, 48, 64, 96], num_classes=COUNT), size=64),
    _vision("EfficientNet", _efficientnet, "MBConvConfig"),
    _vision("EfficientNetV2", _efficientnet, "FusedMBConvConfig"),
    _vision("RegNet", _regnet),
    _vision("ConvNeXt", _convnext),
    _vision("SwinTransformer", _swin, 1),
    _vision("SwinTransformerV2", _swin, 2),
    _vision("VisionTransformer", lambda m: m.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=COUNT)),
    _vision("MaxVit", _maxvit),
    _vision("FCN", _segmentation, batches=tasks.segmentation, loss=segmentation_loss),
    _vision("RetinaNet", _detection, "RetinaNet", batches=corner_boxes, loss=detection_loss, lr=1e-3),
    _vision("FCOS", _detection, "FCOS", batches=corner_boxes, loss=detection_loss, lr=1e-3),
]
