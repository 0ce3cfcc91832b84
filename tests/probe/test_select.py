"""Which sites to record."""

from __future__ import annotations

import re

import pytest
from torch import nn

from sonde.errors import UsageError
from sonde.probe.select import chooser

LINEAR, RELU, NORM = nn.Linear(1, 1), nn.ReLU(), nn.LayerNorm(1)
SITES = {
    "model": nn.Sequential(),
    "layers.0": nn.Sequential(),
    "layers.0.mlp": LINEAR,
    "layers.0.norm": NORM,
    "layers.1.mlp": LINEAR,
    "layers.1.act": RELU,
    "head": LINEAR,
}


def chosen(sites: object) -> list[str]:
    choose = chooser(sites)
    return [name for name, module in SITES.items() if choose(name, name, module)]


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        ("*", list(SITES)),
        ("layers.*.mlp", ["layers.0.mlp", "layers.1.mlp"]),
        ("layers.0*", ["layers.0", "layers.0.mlp", "layers.0.norm"]),
        ("head", ["head"]),
        ("nothing", []),
        (["head", "layers.1.*"], ["layers.1.mlp", "layers.1.act", "head"]),
        (("head",), ["head"]),
        ({"head"}, ["head"]),
        (["layers.*", "!layers.0*"], ["layers.1.mlp", "layers.1.act"]),
        ("!layers.*", ["model", "head"]),
        (["!layers.*", "!head"], ["model"]),
        (nn.Linear, ["layers.0.mlp", "layers.1.mlp", "head"]),
        ([nn.Linear, nn.ReLU, "!head"], ["layers.0.mlp", "layers.1.mlp", "layers.1.act"]),
        ([nn.ReLU, "head"], ["layers.1.act", "head"]),
        (nn.Module, list(SITES)),
        (lambda name, module: isinstance(module, nn.LayerNorm) or name == "head", ["layers.0.norm", "head"]),
        (lambda name, module: [], []),
        ("layers.[0].mlp", ["layers.0.mlp"]),
        ("layers.?.mlp", ["layers.0.mlp", "layers.1.mlp"]),
        (re.compile(r"\.(mlp|norm)$"), ["layers.0.mlp", "layers.0.norm", "layers.1.mlp"]),
        ([re.compile("^layers"), "!*.mlp"], ["layers.0", "layers.0.norm", "layers.1.act"]),
        ((nn.ReLU, nn.LayerNorm), ["layers.0.norm", "layers.1.act"]),
    ],
)
def test_selection(sites, expected):
    assert chosen(sites) == expected


def test_order_of_wanted_and_unwanted_does_not_matter():
    assert chosen(["!layers.0*", "layers.*"]) == chosen(["layers.*", "!layers.0*"])


def test_site_is_chosen_and_refused_by_its_alias_too():
    assert chooser("encoder.*")("decoder.block", "encoder.block", LINEAR)
    assert not chooser(["*", "!encoder.*"])("decoder.block", "encoder.block", LINEAR)


@pytest.mark.parametrize("wrong", [3, None, 2.5])
def test_what_cannot_select_is_refused(wrong):
    with pytest.raises(UsageError, match="sites= must be a glob"):
        chooser(wrong)


@pytest.mark.parametrize("wrong", [["head", 3], [None], [LINEAR]])
def test_wrong_item_of_a_list_is_shown(wrong):
    with pytest.raises(UsageError, match=r"module types such as .*; got"):
        chooser(wrong)
