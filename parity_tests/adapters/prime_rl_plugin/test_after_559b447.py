"""PRIME-RL since September 2026, by a double of its contract, whose divisor is the sum of the weights."""

import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from composer_plugins.adapters import prime_rl_plugin
from composer_plugins.adapters.prime_rl_plugin import loss_fn, upstream
from composer_plugins.conformance.prime_rl_claims.packs import packed
from composer_plugins.errors import ConfigError
from composer_plugins.findings import ComposerWarning
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import prime_rl_doubles
from parity_tests.rigs.prime_rl_doubles import (
    AFTER_559B447,
    GENERATIONS,
    Sample,
    WithWeights,
    compute_loss,
    per_prompt,
    sample,
    scale,
    sequence,
    step,
    trained,
)

NEWER = "ignore:prime-rl. it is newer than the newest"
HINT = {"hint_weight": 0.3}


def halves(samples: list[Sample]) -> list[list[Sample]]:
    return [samples[:2], samples[2:]]


def drawn(reference: bool = True) -> list[Sample]:
    return trained([sample(i, n, reference=reference) for i, n in enumerate((7, 12, 4, 9))])


@pytest.mark.filterwarnings(NEWER)
@pytest.mark.parametrize("kwargs", [{}, HINT, {"policy": "ref_kl"}], ids=["policy", "hint", "ref_kl"])
def test_policy_and_hint_have_the_gradient_of_0_8_0_where_no_weights_came(kwargs: dict[str, Any]) -> None:
    loss = partial(loss_fn, **kwargs)
    ours, before = (
        step(generation, halves(drawn()), loss, padding=3)
        for generation in (AFTER_559B447, GENERATIONS["v0.8.0"])
    )
    for gradient, expected in zip(ours, before, strict=True):
        assert gradient.any()
        assert_parity(gradient, expected, terms=32)


@pytest.mark.filterwarnings(NEWER)
@pytest.mark.parametrize("kwargs", [{}, HINT], ids=["policy", "hint"])
def test_under_prompt_aggregation_each_group_is_a_mean_over_its_tokens(kwargs: dict[str, Any]) -> None:
    samples, groups = drawn(), [0, 1, 0, 1]
    per_prompt(samples, groups)
    ours = step(AFTER_559B447, halves(samples), partial(loss_fn, **kwargs))
    alone = drawn()
    losses = [loss_fn(sequence(one, AFTER_559B447), **kwargs).loss for one in alone]
    means = []
    for group in (0, 1):
        inside = [i for i, which in enumerate(groups) if which == group]
        tokens = sum(int(alone[i]["loss_mask"].sum()) for i in inside)
        means.append(torch.stack([losses[i] for i in inside]).sum() / tokens)
    expected = torch.autograd.grad(torch.stack(means).mean(), [one["trainer_logprobs"] for one in alone])
    for gradient, wanted in zip(ours, expected, strict=True):
        assert_parity(gradient, wanted, terms=32)


def test_the_weights_of_a_pair_cancel_in_its_divisor_so_replay_is_rejected() -> None:
    samples = drawn(reference=False)[:2]
    for one, coefficient in zip(samples, (0.05, -0.05), strict=True):
        one["reference"] = torch.ones_like(one["advantages"])
        one["weights"] = torch.full_like(one["advantages"], coefficient)
    pack = packed(samples)
    tokens = scale(GENERATIONS["v0.8.0"], [pack])
    weights = sum(float(w[m].sum()) for w, m in zip(pack.weights or [], pack.loss_mask, strict=True))
    assert abs(weights) < tokens / 20  # what the gradient would be multiplied by, at least
    with pytest.raises(ConfigError, match="replay_weight = 1 is set, and PRIME-RL after #3586 .* cancel"):
        compute_loss(AFTER_559B447, pack, partial(loss_fn, replay_weight=1.0), tokens)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that stands for prime_rl.trainer.rl.loss, with LossInputs of v0.7 and later in it."""
    module = ModuleType("a_double_of_prime_rl_loss")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(module)["LossInputs"] = type("LossInputs", (WithWeights,), {"__module__": module.__name__})
    return module


def test_the_contract_is_told_without_its_new_fields_and_the_first_call_warns(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The divisor became the sum of the weights at an unknown time after #3418, which deleted a function."""
    monkeypatch.setattr(prime_rl_plugin, "_losses", {})
    fields = vars(sequence(drawn()[0]))
    given = vars(module)["LossInputs"](**fields)
    with pytest.raises(ConfigError, match="PRIME-RL #3418 has no weights that carry"):
        loss_fn(given, replay_weight=1.0)
    with pytest.warns(ComposerWarning, match="newer than the newest that was tested") as caught:
        loss_fn(given, **HINT)
    loss_fn(given, **HINT)
    assert len(caught) == 1
    vars(module)["default_loss_fn"] = loss_fn
    assert loss_fn(given, replay_weight=1.0).loss.isfinite()


@pytest.mark.parametrize(
    ("names", "since"),
    [("setup_loss_fns", "0.6"), ("setup_loss_fn", "0.5"), ("setup_loss_fn LossConfigType", "0.4")],
)
def test_0_4_to_0_6_are_told_by_their_module_and_not_by_their_metadata(
    module: ModuleType, names: str, since: str
) -> None:
    vars(module).update(dict.fromkeys(["default_loss_fn", *names.split()], loss_fn))
    inputs = type("LossInputs", (prime_rl_doubles.WithTeacher,), {"__module__": module.__name__})
    tensor = torch.zeros(2)
    given = inputs(tensor, tensor, None, tensor, tensor.bool())
    for release in ("0.1.0", "0.4.0", "0.6.0", None):
        assert upstream.generation_of_inputs(given, release).since == since
