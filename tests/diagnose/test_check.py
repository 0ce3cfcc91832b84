"""All rules over a window: causes come first, what they explain is folded under them, a broken rule is skipped."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from sonde.diagnose.check import all_rules, check, ranked, required_series
from sonde.diagnose.finding import Finding, Severity
from sonde.diagnose.rule import RULES, Rule
from sonde.schema.joined import JOINED
from sonde.schema.names import split_pattern
from sonde.schema.stats import STATS
from sonde.schema.window import Window

# DIAGNOSE: the names of our rules, which may not change.
FIXED_NAMES = [
    "adam_epsilon_dominates",
    "adam_second_moment_underestimate",
    "attention_entropy_collapse",
    "attention_logit_growth",
    "attention_mask_leak",
    "bad_batches",
    "bottleneck_layer",
    "class_imbalance",
    "clip_too_tight",
    "data_duplication",
    "data_not_shuffled",
    "dead_relu",
    "degenerate_inputs",
    "detached_graph",
    "eval_mode_training",
    "excessive_dropout",
    "exploding_gradients",
    "flipped_gradient",
    "frozen_layers",
    "init_scale",
    "label_shuffling",
    "lora_rank_too_low",
    "lora_scale_too_large",
    "lora_zero_init",
    "loss_oscillation",
    "loss_reduction_sum",
    "loss_shape_broadcast",
    "loss_spikes",
    "lr_decay_too_fast",
    "lr_too_high",
    "lr_too_low",
    "memory_leak",
    "missing_nonlinearity",
    "missing_warmup",
    "missing_zero_grad",
    "nan_inf",
    "optimizer_missing_params",
    "output_logit_growth",
    "over_regularisation",
    "overfitting",
    "qkv_imbalance",
    "rank_collapse",
    "residual_decay",
    "rnn_exploding_temporal",
    "rnn_vanishing_temporal",
    "saturated_activations",
    "symmetric_init",
    "underfitting",
    "unnormalised_inputs",
    "unnormalised_targets",
    "vanishing_gradients",
    "wrong_loss_activation_pair",
]


def a_finding(rule: str, severity: str = "warning", confidence: float = 0.8, step: int = 0) -> Finding:
    return Finding(
        rule=rule,
        severity=Severity(severity),
        confidence=confidence,
        step=step,
        last_step=9,
        message=f"{rule} is there",
    )


def test_every_fixed_name_is_a_rule() -> None:
    assert set(FIXED_NAMES) <= set(all_rules())


def test_every_rule_says_what_it_is_and_refers_to_rules_and_series_that_exist() -> None:
    for rule in all_rules().values():
        assert rule.meaning, rule.name
        assert set(rule.causes) <= set(all_rules()), f"{rule.name} causes {set(rule.causes) - set(all_rules())}"
        assert rule.name not in rule.causes
        for pattern in rule.needs:
            stat = split_pattern(pattern).stat
            assert stat in STATS or stat in JOINED, f"{rule.name} needs {pattern}"


def test_an_empty_window_has_no_findings() -> None:
    assert check(Window()) == []


def test_a_window_of_a_loss_alone_raises_nothing() -> None:
    steps = np.arange(60)
    for values in (np.ones(60), np.full(60, np.nan), np.zeros(60), np.exp(-steps / 10), -np.ones(60)):
        check(Window(scalars={"loss": (steps, values)}))


def test_needs_name_each_pattern_once() -> None:
    assert len(set(required_series())) == len(required_series())


def test_a_rule_that_raises_is_reported_and_the_others_run() -> None:
    def broken(window: Window) -> Iterator[Finding]:
        raise ZeroDivisionError("on purpose")

    def works(window: Window) -> Iterator[Finding]:
        yield a_finding("works")

    rules = [
        Rule(name, Severity.WARNING, (), (), (), function) for name, function in (("broken", broken), ("works", works))
    ]
    errors: list[str] = []
    found = check(Window(), rules, on_error=lambda name, error: errors.append(f"{name}: {error}"))
    assert [f.rule for f in found] == ["works"]
    assert errors == ["broken: on purpose"]


@pytest.fixture
def some_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """cause -> measured, inferred; one and another explain each other; a ring of three."""

    def nothing(window: Window) -> Iterator[Finding]:
        yield from ()

    known = {
        "cause": Rule("cause", Severity.WARNING, (), ("measured", "inferred"), (), nothing),
        "measured": Rule("measured", Severity.WARNING, (), (), (), nothing, is_measured=True),
        "inferred": Rule("inferred", Severity.WARNING, (), (), (), nothing),
        "one": Rule("one", Severity.WARNING, (), ("another",), (), nothing),
        "another": Rule("another", Severity.WARNING, (), ("one",), (), nothing),
        "alike": Rule("alike", Severity.WARNING, (), (), (), nothing, like="inferred"),
        **{f"ring{i}": Rule(f"ring{i}", Severity.WARNING, (), (f"ring{(i + 1) % 3}",), (), nothing) for i in range(3)},
    }
    for name, rule in known.items():
        monkeypatch.setitem(RULES, name, rule)


@pytest.mark.usefixtures("some_rules")
def test_the_cause_comes_first_and_holds_what_it_explains() -> None:
    found = ranked([a_finding("inferred", confidence=0.99), a_finding("measured"), a_finding("cause", confidence=0.5)])
    assert [f.rule for f in found] == ["cause", "measured", "inferred"]
    assert {f.rule for f in found[0].cause_of} == {"measured", "inferred"}


@pytest.mark.usefixtures("some_rules")
def test_what_is_measured_stays_a_warning_and_what_is_inferred_becomes_a_remark() -> None:
    found = {f.rule: f for f in ranked([a_finding("cause"), a_finding("measured"), a_finding("inferred")])}
    assert found["measured"].severity == "warning"
    assert found["inferred"].severity == "info"


@pytest.mark.usefixtures("some_rules")
def test_what_explains_a_finding_explains_one_that_is_like_it() -> None:
    assert [f.rule for f in ranked([a_finding("alike"), a_finding("cause")])[0].cause_of] == ["alike"]


@pytest.mark.usefixtures("some_rules")
def test_a_mere_remark_explains_nothing() -> None:
    found = ranked([a_finding("cause", severity="info"), a_finding("inferred")])
    assert [(f.rule, str(f.severity)) for f in found] == [("inferred", "warning"), ("cause", "info")]


@pytest.mark.usefixtures("some_rules")
def test_of_two_that_explain_each_other_the_surer_is_the_cause() -> None:
    for order in itertools.permutations([a_finding("one", confidence=0.6), a_finding("another", confidence=0.9)]):
        found = ranked(list(order))
        assert [f.rule for f in found] == ["another", "one"]
        assert [f.rule for f in found[0].cause_of] == ["one"]


@pytest.mark.usefixtures("some_rules")
def test_a_ring_of_causes_has_a_root_all_the_same() -> None:
    found = ranked([a_finding(f"ring{i}", confidence=0.5 + 0.1 * i) for i in range(3)])
    assert found[0].rule == "ring2"
    assert found[0].severity == "warning"
    assert len(found) == 3


@pytest.mark.parametrize(
    "cause",
    ["adam_epsilon_dominates", "optimizer_missing_params", "clip_too_tight", "lr_decay_too_fast", "lr_too_low"],
)
def test_the_short_memory_of_a_recurrent_layer_that_never_trained_is_a_symptom(cause: str) -> None:
    assert cause in all_rules()
    found = ranked([a_finding("rnn_vanishing_temporal"), a_finding(cause, confidence=0.9)])
    assert [(f.rule, str(f.severity)) for f in found] == [(cause, "warning"), ("rnn_vanishing_temporal", "info")]


def test_weights_after_dead_units_get_no_gradient_and_are_not_frozen_by_mistake() -> None:
    assert "dead_relu" in all_rules()
    found = ranked([a_finding("frozen_layers", confidence=0.95), a_finding("dead_relu")])
    assert [(f.rule, str(f.severity)) for f in found] == [("dead_relu", "warning"), ("frozen_layers", "info")]


def test_severities_are_ordered_like_words_of_rank() -> None:
    assert Severity.CRITICAL > "warning"
    assert Severity.WARNING > "info"
    assert Severity.WARNING >= "warning"
    assert not Severity.INFO >= "warning"
    assert max(Severity.INFO, Severity.CRITICAL, Severity.WARNING) == "critical"
