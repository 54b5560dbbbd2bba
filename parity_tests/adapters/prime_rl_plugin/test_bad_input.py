"""What can be wrong with `[trainer.loss.kwargs]` and with LossInputs, and how it is reported."""

import re
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from composer_plugins.adapters import prime_rl_plugin
from composer_plugins.adapters.prime_rl_plugin import loss_fn, upstream
from composer_plugins.errors import ComposerWarning, ConfigError, DataError
from composer_plugins.frameworks.contract import NamedLoss
from composer_plugins.frameworks.prime_rl import PRIME_RL
from composer_plugins.health.watch import MANY_ROWS, ROWS
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import REQUIRED, of_kind

POLICIES = of_kind(losses(), "policy")


@pytest.fixture(autouse=True)
def nothing_was_called_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime_rl_plugin, "_losses", {})


def inputs(**changed: Any) -> SimpleNamespace:
    """One sequence of v0.8's; a field that is `...` is left out."""
    fields: dict[str, Any] = {
        "trainer_logprobs": torch.tensor([-1.0, -0.5, -2.0], requires_grad=True),
        "inference_logprobs": torch.tensor([-1.1, -0.4, -2.0]),
        "ref_logprobs": None,
        "advantages": torch.full((3,), 0.5),
        "loss_mask": torch.tensor([False, True, True]),
        "loss_weights": None,
    } | changed
    return SimpleNamespace(**{name: value for name, value in fields.items() if value is not ...})


@pytest.mark.parametrize("release", [None, "0.7.0"])
def test_a_release_before_0_8_is_an_error_at_the_first_call(
    release: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its LossInputs have no weights, or its metadata say so: both are enough."""
    monkeypatch.setattr(upstream, "installed", lambda: release)
    given = inputs(loss_weights=...) if release is None else inputs()
    with pytest.raises(ConfigError, match="^prime-rl: PRIME-RL .* is older than 0.8.0, .*install v0.8.0"):
        loss_fn(given)


@pytest.mark.parametrize("names", ["default_loss_fn", ""])
def test_newer_than_tested_is_warned_of_once(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its metadata say 0.8.0, but its module of losses has no default_loss_fn."""
    module = ModuleType(upstream.LOSSES)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(upstream, "installed", lambda: "0.8.0")
    kind = type("LossInputs", (SimpleNamespace,), {"__module__": module.__name__})
    vars(module).update(dict.fromkeys(names.split(), loss_fn))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loss_fn(kind(**vars(inputs())))
    newer = [one for one in caught if "newer than the newest that was tested" in str(one.message)]
    assert len(newer) == (not names)


def test_gspo_token_takes_a_hint_in_the_advantage() -> None:
    given = inputs(ref_logprobs=torch.tensor([-0.5, -0.7, -1.5]))
    kwargs = {"policy": "gspo_token@verl", "old_policy": "rollout", "hint_estimator": "advantage"}
    kwargs["policy_params"] = {"clip_low": 3e-4, "clip_high": 4e-4}
    out = loss_fn(given, **kwargs, hint_weight=0.5)
    assert torch.autograd.grad(out.loss, given.trainer_logprobs)[0][1:].all()


@pytest.mark.parametrize("wrong", [0.9, 2.3])
def test_a_reference_that_is_no_log_probability_is_an_error(wrong: float) -> None:
    """The mark of a pair, a rounding above 0 and a masked token are none."""
    loss_fn(inputs(ref_logprobs=torch.tensor([wrong, 0.01, 1.0])), hint_weight=0.1)
    with pytest.raises(
        DataError,
        match="ref_logprobs: it holds a positive number, and a log-probability is at most 0, or 0.125",
    ):
        loss_fn(inputs(ref_logprobs=torch.tensor([-0.5, wrong, -0.1])), hint_weight=0.1)
    loss_fn(inputs(ref_logprobs=torch.tensor([-0.5, wrong, -0.1])))  # no channel reads it


@pytest.mark.parametrize("name", ["trainer_logprobs", "inference_logprobs"])
def test_a_positive_log_probability_is_an_error_at_the_first_call(name: str) -> None:
    """+0.125 is a rounding of bfloat16, and the first token is masked."""
    with pytest.raises(
        DataError, match=f"^{name}: it holds 0.13 at an unmasked token, and a log-probability"
    ):
        loss_fn(inputs(**{name: torch.tensor([9.0, -1.0, 0.13], requires_grad=True)}))
    loss_fn(inputs(**{name: torch.tensor([9.0, -1.0, 0.125], requires_grad=True)}))


def test_an_upper_bound_of_ref_kl_is_warned_of_where_there_are_no_advantages() -> None:
    given = {"ref_logprobs": torch.tensor([-0.5, -0.7, -1.5]), "inference_logprobs": torch.full((3,), -0.9)}
    params = {"tv_high": 0.05}
    with pytest.warns(ComposerWarning, match="policy_params.tv_high: it has no effect.*set policy = 'ref_kl"):
        loss_fn(inputs(**given), policy="ref_kl", policy_params=params)
    ref_kl = {"policy": "ref_kl@prime-rl<0.7", "policy_params": params}
    bounded, free = (
        loss_fn(inputs(advantages=torch.full((3,), sign), **given), **ref_kl).loss for sign in (1.0, -1.0)
    )
    assert bounded != free  # there it acts, and the call does not warn


def with_required(name: str, **kwargs: Any) -> dict[str, Any]:
    """The kwargs of this policy, with a value for each parameter that it requires."""
    row = POLICIES[name]
    required = {n: row.parameters[n].example for n, default in row.defaults.items() if default is REQUIRED}
    return {"policy": name} | ({"policy_params": required} if required else {}) | kwargs


REDUCED = "published with the reduction {}"
ROLLOUT = {"old_policy": "rollout"}


@pytest.mark.parametrize(
    ("kwargs", "call", "said"),
    [
        ({"policy": "gspo"} | ROLLOUT, 1, REDUCED.format("seq-mean-token-mean")),
        ({"policy": "dr_grpo"} | ROLLOUT, 1, REDUCED.format("seq-mean-token-sum-norm")),
    ],
)
def test_a_warning_comes_at_one_call(kwargs: dict[str, Any], call: int, said: str) -> None:
    found = []
    for number in range(1, call + 3):
        given = inputs(ref_logprobs=torch.zeros(3) if number > call else None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss_fn(given, **kwargs)
        found += [number for one in caught if re.search(said, str(one.message))]
    assert found == [call]


@pytest.mark.parametrize("own", PRIME_RL.losses, ids=lambda own: own.row)
@pytest.mark.parametrize("table", ["", "policy_params"])
def test_an_option_of_prime_rls_own_loss_is_an_error_with_its_name_here(own: NamedLoss, table: str) -> None:
    for option in own.own:
        names, given = option.values(POLICIES[own.row.partition("@")[0]], 0.3), {option.key: 0.3}
        if table and names == given:
            continue
        with pytest.raises(ConfigError) as error:
            loss_fn(inputs(), policy=own.row, **({table: given} if table else given))
        assert error.value.key.endswith(option.key) and all(name in error.value.remedy for name in names)
        loss_fn(inputs(), policy=own.row, policy_params=names)


@pytest.mark.parametrize("kwargs", [{}, {"policy": "dapo"} | ROLLOUT, {"policy": "dr_grpo@trl"} | ROLLOUT])
def test_the_reduction_of_prime_rl_or_of_a_dialect_is_not_warned_of(kwargs: dict[str, Any]) -> None:
    loss_fn(inputs(), **kwargs)  # a warning is an error


@pytest.mark.parametrize(
    ("reference", "kwargs", "missed"),
    [
        (1.0, {"hint_weight": 0.1, "replay_weight": 1.0}, "hint"),
        (-1.2, {"hint_weight": 0.1, "replay_weight": 1.0}, "replay"),
        (0.0, {"hint_weight": 0.1}, "hint"),
        (None, {"policy": "ref_kl"}, "hint"),
    ],
)
def test_each_channel_misses_its_own_tokens(reference: float | None, kwargs: Any, missed: str) -> None:
    """A pair has the positive mark, which is no teacher's log-probability, and the other way round."""
    stamps = None if reference is None else torch.full((3,), reference)
    with pytest.warns(ComposerWarning, match=f"composer/health/{missed}_token_frac: .* is set, and no token"):
        for _ in range(12 * MANY_ROWS + ROWS):
            loss_fn(inputs(ref_logprobs=stamps), **kwargs)


@pytest.mark.filterwarnings("error:.*_token_frac")
def test_one_stamp_now_and_then_is_enough_and_without_a_channel_none_is_missed() -> None:
    for call in range(600):
        loss_fn(inputs(ref_logprobs=None if call % 300 else torch.full((3,), -1.2)), hint_weight=0.1)
        loss_fn(inputs())


@pytest.mark.parametrize("name", ["inference_logprobs", "advantages", "ref_logprobs", "loss_weights"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (2, 3)], ids=str)
def test_a_stream_of_another_shape_than_the_mask_is_an_error(name: str, shape: tuple[int, ...]) -> None:
    loss_fn(inputs(), hint_weight=0.1)  # the stream may come later
    with pytest.raises(
        DataError, match=rf"^{name}: its shape is {re.escape(str(shape))}, and loss_mask has the shape"
    ):
        loss_fn(inputs(**{name: torch.full(shape, -1.0)}), hint_weight=0.1)


@pytest.mark.filterwarnings("ignore:.*published with the reduction")
@pytest.mark.parametrize("where", ["trainer_logprobs", "inference_logprobs", "advantages"])
@pytest.mark.parametrize("kwargs", [{}, {"policy": "gspo", "old_policy": "rollout"}, {"policy": "ipo"}])
def test_a_nan_at_an_unmasked_token_surfaces_and_a_masked_one_does_nothing(
    where: str, kwargs: dict[str, Any]
) -> None:
    def poisoned(token: int) -> SimpleNamespace:
        given = inputs()
        values = getattr(given, where).detach().clone()
        values[token] = torch.nan
        setattr(given, where, values.requires_grad_(where == "trainer_logprobs"))
        return given

    assert loss_fn(poisoned(1), **kwargs).loss.isnan()
    masked = poisoned(0)
    out = loss_fn(masked, **kwargs)
    assert torch.equal(out.loss, loss_fn(inputs(), **kwargs).loss)
    assert all(value.isfinite() for value in out.metrics.values())
    if where == "trainer_logprobs":
        out.loss.backward()
        assert masked.trainer_logprobs.grad[0] == 0 and masked.trainer_logprobs.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:.*published with the reduction")
@pytest.mark.parametrize("later", [False, True], ids=["first call", "third call"])
@pytest.mark.parametrize("policy", [name for name, row in POLICIES.items() if row.per_sequence])
def test_advantages_by_token_are_an_error_for_a_loss_per_sequence(policy: str, later: bool) -> None:
    kwargs: dict[str, Any] = {"policy": policy, "old_policy": "rollout"}
    for _ in range(2 * later):
        loss_fn(inputs(advantages=torch.tensor([9.0, 0.3, 0.3 + 1e-7])), **kwargs)  # masked; rounding
    with pytest.raises(DataError) as refused:
        loss_fn(inputs(advantages=torch.tensor([0.0, 1.0, -1.0])), **kwargs)
    assert str(refused.value) == (
        f"policy {policy!r}, advantages: they differ within a sequence, and this loss averages them over the "
        "sequence; choose a loss with one ratio per token, or gspo_token"
    )
    # A replayed pair's tokens are not the policy's.
    pair = torch.tensor([1.0, 1.0, 0.0])
    loss_fn(inputs(advantages=torch.tensor([0.0, 1.0, -1.0]), ref_logprobs=pair), **kwargs)


def test_a_reference_that_rounds_above_0_is_a_reference() -> None:
    given = inputs(ref_logprobs=torch.tensor([0.0, 1e-6, -1.0]))
    out = loss_fn(given, hint_weight=0.1)
    assert torch.autograd.grad(out.loss, given.trainer_logprobs)[0][1] != 0
    assert out.metrics["composer/replay/token_frac"] == 0 and out.metrics["composer/hint/token_frac"] == 1


def test_a_nan_of_the_reference_surfaces() -> None:
    reference = torch.tensor([0.0, torch.nan, -1.0])
    assert loss_fn(inputs(ref_logprobs=reference), hint_weight=0.5).loss.isnan()


def test_a_ratio_beyond_overflow_stays_finite() -> None:
    far = inputs(trainer_logprobs=torch.tensor([-1.0, -0.1, -2.0], requires_grad=True))
    far.inference_logprobs = torch.tensor([-1.0, -95.1, -2.0])
    for kwargs in ({}, {"policy": "ipo@prime-rl"}):
        out = loss_fn(far, **kwargs)
        gradient = torch.autograd.grad(out.loss, far.trainer_logprobs)[0]
        assert out.loss.isfinite() and gradient.isfinite().all()
        assert all(value.isfinite() for value in out.metrics.values())


@pytest.mark.filterwarnings("ignore:.*published with the reduction")
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_loss_runs_or_says_why_not(name: str) -> None:
    row = POLICIES[name]
    kwargs = with_required(name) | (ROLLOUT if "old_logprobs" in row.needs else {})
    if not PRIME_RL.runs(row):
        with pytest.raises(ConfigError, match="does not provide|whole batch"):
            loss_fn(inputs(), **kwargs)
        return
    given = inputs(ref_logprobs=torch.tensor([0.0, -0.7, -1.5]))
    out = loss_fn(given, **kwargs)
    assert out.loss.isfinite()
    assert torch.autograd.grad(out.loss, given.trainer_logprobs)[0][0] == 0
