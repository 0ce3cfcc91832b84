"""Names: what is parsed is formatted back, what wrappers add is gone, and no two names become one."""

from __future__ import annotations

import copy
import fnmatch
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.errors import UnknownNameError, UsageError
from sonde.schema.names import (
    KINDS,
    Series,
    matches,
    matches_any,
    parse_series,
    site_name,
    split_pattern,
    strip_wrappers,
    unique_sites,
)

# Any text Python can hold, lone surrogates included: module names are whatever somebody passed to `add_module`.
ANY_TEXT = st.text(st.characters(codec=None), max_size=40)
WORDS = st.sampled_from(
    [
        "module",
        "base_model",
        "model",
        "_orig_mod",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "layers",
        "0",
        "w",
        "",
    ]
)
DOTTED = st.lists(WORDS, max_size=7).map(".".join)
HOSTILE = [
    "", ".", "..", "../../etc/passwd", "/abs/path", "a/b", "a%2Fb", "a%b", "nul\x00byte", "new\nline", "\x1b[31mred",
    "\x9b31m", "<script>alert(1)</script>", "'; drop table sites; --", '"quoted"', "\u202egnirts", "\u200bzero",
    "\ufefffeff", "\u2028line", "\ud800lone", "ünïcödé", "日本語", "🙂", "[red]markup[/red]", "*", "a[0]", "{x}",
    "C:\\x", "x" * 10_000, "con", "-rf", "~",
]  # fmt: skip


@given(st.sampled_from(KINDS), ANY_TEXT.map(site_name).filter(bool), st.sampled_from(["rms", "norm"]))
def test_series_is_parsed_as_it_was_formatted(kind: str, site: str, stat: str) -> None:
    series = Series(kind, site, stat)
    assert parse_series(str(series)) == series


@pytest.mark.parametrize("text", ["", "grad", "grad/x", "grad//rms", "/x/rms", "grad/x/", "grad/a/b/rms"])
def test_text_that_is_not_a_series_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="kind/site/stat"):
        parse_series(text)


@given(ANY_TEXT, ANY_TEXT)
def test_different_names_give_different_sites(a: str, b: str) -> None:
    assert (site_name(a) == site_name(b)) == (a == b)


@given(ANY_TEXT)
def test_site_name_can_be_stored_split_and_decoded_again(name: str) -> None:
    site = site_name(name)
    assert "/" not in site
    assert site.isprintable() or not any(c < " " or c == "\x7f" for c in site)
    assert unquote_to_bytes(site.encode("utf-8")).decode("utf-8", "surrogatepass") == name


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_name_is_harmless_and_stays_distinct(name: str) -> None:
    site = site_name(name)
    site.encode("utf-8")  # a lone surrogate would raise here, as it would in SQLite and Parquet
    assert not any(c in site for c in "/\x00\n\x1b\x9b\u202e\u200b\ufeff\u2028")
    assert len({site_name(other) for other in HOSTILE}) == len(HOSTILE)


@given(DOTTED)
def test_stripping_wrappers_twice_is_stripping_once(name: str) -> None:
    assert strip_wrappers(strip_wrappers(name)) == strip_wrappers(name)


@given(st.lists(st.sampled_from(["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]), max_size=4))
def test_inner_wrappers_vanish_wherever_they_stand(wrappers: list[str]) -> None:
    assert strip_wrappers(".".join(["layers", *wrappers, "0", *wrappers, "weight"])) == "layers.0.weight"


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("module.layers.0.weight", "layers.0.weight"),
        ("module._orig_mod.layers.0.weight", "layers.0.weight"),
        ("_orig_mod.module.layers.0.weight", "layers.0.weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight", "layers.0.weight"),
        ("layers.0._checkpoint_wrapped_module.weight", "layers.0.weight"),
        ("base_model.model.layers.0.weight", "layers.0.weight"),
        ("my_module.weight", "my_module.weight"),
        ("layers.module.weight", "layers.module.weight"),
        ("module", ""),
        ("_orig_mod", ""),
    ],
)
def test_name_is_the_one_the_user_wrote(wrapped: str, plain: str) -> None:
    assert strip_wrappers(wrapped) == plain


def test_real_wrappers_leave_the_names_of_the_plain_model() -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.optim.swa_utils import AveragedModel

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    plain = [name for name, _ in model.named_parameters()]
    modules = [name for name, _ in model.named_modules()]
    inner = copy.deepcopy(model)
    inner[0] = checkpoint_wrapper(inner[0])
    wrapped = [
        torch.nn.DataParallel(model),
        torch.compile(model, backend="eager"),
        AveragedModel(model),
        checkpoint_wrapper(model),
        torch.compile(torch.nn.DataParallel(model), backend="eager"),
        torch.nn.DataParallel(torch.compile(inner, backend="eager")),
    ]
    for wrapper in wrapped:
        names = [name for name, _ in wrapper.named_modules()]
        assert names != modules
        assert list(dict.fromkeys(strip_wrappers(name) for name in names)) == modules
        assert [strip_wrappers(name) for name, _ in wrapper.named_parameters()] == plain


@given(st.lists(DOTTED, unique=True, max_size=8))
def test_unique_sites_never_joins_two_names(names: list[str]) -> None:
    assert len(set(unique_sites(names))) == len(names)


def test_a_name_is_left_whole_only_where_stripping_would_join_two() -> None:
    assert unique_sites(["module.a", "b", "a"]) == ["module.a", "b", "a"]
    assert unique_sites(["module.a", "module.b"]) == ["a", "b"]


@given(ANY_TEXT)
def test_every_name_matches_itself_and_the_star(name: str) -> None:
    assert matches(name, name)
    assert matches("*", name)
    assert matches_any([name], name)
    assert not matches_any([], name)


@given(st.text("ab.*?[]!-", max_size=8), st.text("ab.", max_size=8))
def test_glob_means_what_fnmatch_means(pattern: str, name: str) -> None:
    assert matches(pattern, name) == (pattern == name or fnmatch.fnmatchcase(name, pattern))


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.*.mlp", "layers.3.mlp", True),
        ("layers.*.mlp", "layers.3.attn", False),
        ("layers.?", "layers.12", False),
        ("Layers.*", "layers.1", False),
        ("heads.a[0]", "heads.a[0]", True),
        ("layers.[0-3].*", "layers.2.weight", True),
    ],
)
def test_glob_examples(pattern: str, name: str, *, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_pattern_parts_left_out_match_everything() -> None:
    assert split_pattern("grad") == ("grad", "*", "*")
    assert split_pattern("grad/0.weight") == ("grad", "0.weight", "*")
    assert split_pattern("*/*/norm") == ("*", "*", "norm")


def test_misspelt_kind_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match='Did you mean "grad"'):
        split_pattern("gard/*/norm")
    with pytest.raises(UsageError, match="kind/site/stat"):
        split_pattern("grad/a/b/c")
