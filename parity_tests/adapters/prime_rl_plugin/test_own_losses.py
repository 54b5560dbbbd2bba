"""The table of PRIME-RL's own losses: it is right, and the messages, the doctor and the docs use it."""

import re
import tomllib
import warnings
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from composer_plugins.adapters import prime_rl_plugin
from composer_plugins.adapters.prime_rl_plugin import loss, loss_fn, own_losses
from composer_plugins.adapters.prime_rl_plugin.surface import parse
from composer_plugins.errors import ConfigError, DataError
from composer_plugins.frameworks.contract import NamedLoss, Option, parameters_of
from composer_plugins.frameworks.prime_rl import HEAD, LOSSES
from composer_plugins.frameworks.registry import called
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.prime_rl_formulas import Sequence, ipo_newest

OPTIONS = [(own, option) for own in LOSSES for option in own.own]
options = pytest.mark.parametrize(
    ("own", "option"),
    OPTIONS,
    ids=lambda one: own_losses.versions(one) if isinstance(one, NamedLoss) else one.key,
)


def another(option: Option) -> Any:
    """A value of an option that is not its default."""
    if option.key == "ratio_type":
        return "sequence"
    if isinstance(option.default, bool):
        return True
    at = {"ratio_low": 0.5, "token_mask_low": 0.5, "geo_mask_low": 0.5}
    return at.get(option.key, float(option.default) + 0.25)


def followed(error: ConfigError, before: dict[str, Any]) -> dict[str, Any]:
    """The kwargs once the user has done what the error says."""
    *tables, name = error.key.removeprefix("trainer.loss.kwargs.").split(".")
    after = {key: dict(x) if isinstance(x, dict) else x for key, x in before.items()}
    holder = after
    for table in tables:
        holder = holder[table]
    del holder[name]
    found = re.search(r"set (.+) in \[trainer\.loss\.kwargs\]", error.remedy)
    if found is None:
        assert error.remedy == "remove it", error
        return after
    for key, value in tomllib.loads(re.sub(r" and (?=\w+ = )", "\n", found.group(1))).items():
        both = isinstance(value, dict) and isinstance(after.get(key), dict)
        after[key] = after[key] | value if both else value
    return after


@options
@pytest.mark.parametrize("table", ["", "policy_params"])
@pytest.mark.parametrize("policy", ["", "gspo"])
def test_an_option_of_prime_rls_is_rejected_with_its_name_here_and_the_remedy_works(
    own: NamedLoss, option: Option, table: str, policy: str
) -> None:
    fixed = own_losses.kwargs_of(own, {})[0] if not policy else {"policy": policy, "old_policy": "rollout"}
    given = {option.key: another(option)}
    kwargs = fixed | ({table: fixed.get(table, {}) | given} if table else given)
    has_this_name = parameters_of(option.sets, own_losses.policy(own).loss).keys() == {option.key}
    if has_this_name and table and not policy:
        parse(kwargs)
        return
    with pytest.raises(ConfigError) as error:
        parse(kwargs)
    assert error.value.key.endswith(option.key)
    after = followed(error.value, kwargs)
    if policy and after.get("policy") != policy and "old_policy" not in error.value.remedy:
        after.pop("old_policy", None)
    parse(after)


@options
def test_an_option_that_sets_a_parameter_is_among_its_other_names(own: NamedLoss, option: Option) -> None:
    """So that TRL and verl answer PRIME-RL's name with ours; and where the value differs, with the rule."""
    row = own_losses.policy(own).loss
    for name, conversion in parameters_of(option.sets, row).items():
        if name != option.key:
            theirs = conversion.formula(option.key)
            assert theirs in called(row)[name]
            found = eval(theirs, {option.key: option.default})
            assert found == pytest.approx(conversion.ours(option.default), abs=1e-12)


def test_the_teachers_weight_of_0_4_and_0_5_is_a_hint_in_the_advantage() -> None:
    for own in LOSSES[:2]:
        kwargs, differences = own_losses.kwargs_of(own, {"teacher_tau": 0.5, "adv_tau": 2.0})
        assert kwargs["hint_weight"] == 0.25 and kwargs["hint_estimator"] == "advantage" and not differences
        kwargs, differences = own_losses.kwargs_of(own, {"teacher_tau": 0.5, "adv_tau": 0.0})
        config = parse(kwargs).config
        assert (config.policy_weight, config.hint_weight, config.hint_estimator) == (0.0, 0.5, None)
        assert differences == ["the trust region and kl_tau do not act on the hint"]


# --- score centering, which no checkout here has, as docs and source text describe it --------------------


def drawn(seed: int, n: int) -> SimpleNamespace:
    """LossInputs after 559b447, in float64. One token has a ratio beyond every cap."""
    g = torch.Generator().manual_seed(seed)
    logprobs = (-0.05 - 2 * torch.rand(n, generator=g, dtype=torch.float64)).requires_grad_()
    noise = torch.randn(n, generator=g, dtype=torch.float64)
    rollout = (logprobs.detach() + 0.6 * noise).clamp(max=-1e-3)
    rollout[0] = -12.0
    return SimpleNamespace(
        trainer_logprobs=logprobs,
        inference_logprobs=rollout,
        ref_logprobs=None,
        advantages=torch.randn(n, generator=g, dtype=torch.float64),
        loss_mask=torch.rand(n, generator=g) > 0.2,
        loss_weights=0.5 + torch.rand(n, generator=g, dtype=torch.float64),
        trainer_mask_logprobs=None,
        inference_mask_logprobs=None,
    )


@pytest.mark.filterwarnings("ignore:prime-rl. it is newer than the newest")
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**20), narrow=st.booleans(), weighs=st.booleans())
def test_score_centering_has_the_gradient_of_ours(seed: int, narrow: bool, weighs: bool) -> None:
    """Three entries and a padded one. The second half of the tokens has none: they are not centred."""
    own = own_losses.find("ipo", HEAD)
    assert own is not None
    bounds = {"eps": 0.05, "max_importance_ratio": 1.1} if narrow else {}
    table = {option.key: option.default for option in own.own} | {"adv_tau": 0.5} | bounds
    kwargs, differences = own_losses.kwargs_of(own, table | {"score_centering": True})
    assert kwargs["policy"] == "ipo_centered" and not differences
    g, n = torch.Generator().manual_seed(seed), 8
    logits = torch.randn(n, 3, generator=g, dtype=torch.float64, requires_grad=True)
    policy = torch.nn.functional.pad(logits.log_softmax(-1), (0, 1))
    sampler = (logits.detach() + 0.5 * torch.randn(n, 3, generator=g, dtype=torch.float64)).log_softmax(-1)
    sampler = torch.nn.functional.pad(sampler, (0, 1), value=-torch.inf)
    policy, sampler = policy.clone(), sampler.clone()
    policy[n // 2 :], sampler[n // 2 :] = 0.0, -torch.inf
    inputs = drawn(seed, n)
    inputs.trainer_mask_logprobs, inputs.inference_mask_logprobs = policy, sampler
    inputs.loss_weights = inputs.loss_weights if weighs else None
    options = SimpleNamespace(**table)
    token = ipo_newest(Sequence(inputs), options.eps, options.max_importance_ratio, 0.5)
    token = token + 0.5 * inputs.advantages * centred(policy, sampler, options)
    weights = torch.ones_like(token) if inputs.loss_weights is None else inputs.loss_weights
    leaves = inputs.trainer_logprobs, logits
    theirs = torch.autograd.grad((token * weights)[inputs.loss_mask].sum(), leaves, retain_graph=True)
    ours = torch.autograd.grad(loss_fn(inputs, **kwargs).loss, leaves)
    for a, b in zip(ours, theirs, strict=True):  # without a cap the sum over the entries is 0
        assert_parity(a, b, terms=8, magnitude=max(1.0, float(b.abs().max())))


def centred(policy: Tensor, sampler: Tensor, o: Any) -> Tensor:
    """sum_v sg(q_v min(r_v, cap) 1(|p_v - q_v| <= eps)) log p_v over the entries that are no padding."""
    log_p, q = policy.detach(), sampler.exp()
    ratio = (log_p - sampler).exp().clamp(max=o.max_importance_ratio)
    inside = sampler.isfinite() & ((log_p.exp() - q).abs() <= o.eps)
    return (torch.where(inside, q * ratio, 0.0) * policy).sum(-1)


@pytest.mark.filterwarnings("ignore:prime-rl. it is newer than the newest")
def test_score_centering_is_missed_where_the_samplers_mask_never_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss, "PATIENCE", 3)
    for comes in (False, True):
        monkeypatch.setattr(prime_rl_plugin, "_losses", {})
        inputs = drawn(0, 4)
        if comes:
            inputs.trainer_mask_logprobs = torch.full((4, 2), 0.5, dtype=torch.float64).log()
            inputs.inference_mask_logprobs = inputs.trainer_mask_logprobs
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(5):
                loss_fn(inputs, policy="ipo_centered")
        missed = [str(one.message) for one in said if "sampler's mask came" in str(one.message)]
        assert len(missed) == (0 if comes else 1)
    inputs.inference_mask_logprobs = torch.zeros(3, 2)
    monkeypatch.setattr(prime_rl_plugin, "_losses", {})
    with pytest.raises(DataError, match="inference_mask_logprobs: its shape"):
        loss_fn(inputs, policy="ipo_centered")
