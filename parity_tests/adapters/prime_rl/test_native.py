"""The table of PRIME-RL's own losses: it is right, and the messages, the doctor and the docs use it."""

import re
import tomllib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from composer_plugins.adapters.prime_rl_plugin import loss_fn, native
from composer_plugins.adapters.prime_rl_plugin.config import parse
from composer_plugins.adapters.prime_rl_plugin.native import NATIVE, Native, Option
from composer_plugins.adapters.prime_rl_plugin.upstream import AFTER_559B447
from composer_plugins.errors import ConfigError
from composer_plugins.testing.assertions import assert_parity
from parity_tests.support.paths import ROOT

natives = pytest.mark.parametrize("own", NATIVE, ids=lambda own: f"{own.kind} of {own.versions}")
OPTIONS = [(own, option) for own in NATIVE for option in own.options]
options = pytest.mark.parametrize(
    ("own", "option"), OPTIONS, ids=lambda one: one.versions if isinstance(one, Native) else one.name
)


def another(option: Option) -> Any:
    """A value of an option that is not its default."""
    if option.name == "ratio_type":
        return "sequence"
    if isinstance(option.default, bool):
        return True
    at = {"ratio_low": 0.5, "token_mask_low": 0.5, "geo_mask_low": 0.5}
    return at.get(option.name, float(option.default) + 0.25)


@natives
def test_the_kwargs_of_a_loss_are_accepted_with_defaults_and_with_every_option_set(own: Native) -> None:
    kwargs, differences = native.kwargs_of(own, {"type": own.kind})
    assert parse(kwargs).policy.name == own.policy and differences == []
    everything = {option.name: another(option) for option in own.options}
    kwargs, differences = native.kwargs_of(own, everything)
    assert parse(kwargs).policy.name == own.policy
    for option in own.options:
        for key in option.ours:
            table, _, name = key.rpartition(".")
            assert name in (kwargs[table] if table else kwargs), key
        if not option.ours:
            assert any(one.startswith(option.name) for one in differences)


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
    own: Native, option: Option, table: str, policy: str
) -> None:
    fixed = native.kwargs_of(own, {})[0] if not policy else {"policy": policy, "old_policy": "rollout"}
    value, kwargs = another(option), dict(fixed)
    if table:
        kwargs[table] = dict(kwargs.get(table, {})) | {option.name: value}
    else:
        kwargs[option.name] = value
    if not policy and table and option.ours == (f"policy_params.{option.name}",):
        parse(kwargs)  # it has this name here too
        return
    with pytest.raises(ConfigError) as error:
        parse(kwargs)
    assert error.value.key.endswith(option.name)
    after = followed(error.value, kwargs)
    if policy and after.get("policy") != policy:
        after.pop("old_policy", None) if "old_policy" not in error.value.remedy else None
    parse(after)


def test_kl_tau_and_the_masks_of_dppo_are_named_where_they_are_now() -> None:
    for kwargs, words in (
        ({"kl_tau": 0.1}, "policy_params = { kl_tau = 0.1 }"),
        ({"dppo_mask_high": 0.3}, "policy_params = { tv_high = 0.3 }"),
        ({"policy_params": {"dppo_mask_low": 0.3}}, "policy_params = { tv_low = 0.3 }"),
        ({"dppo_mask_high": 10.0}, "{ tv_high = 10.0 } in [trainer.loss.kwargs]: a value of 1 or more masks"),
        ({"policy": "cispo", "kl_tau": 0.1}, "policy 'cispo' has none like it; remove it, or set policy"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            parse(kwargs)


def test_the_teachers_weight_of_0_4_and_0_5_is_a_hint_in_the_advantage() -> None:
    for own in NATIVE[:2]:
        kwargs, differences = native.kwargs_of(own, {"teacher_tau": 0.5, "adv_tau": 2.0})
        assert kwargs["hint_weight"] == 0.25 and kwargs["hint_estimator"] == "advantage" and not differences
        assert native.kwargs_of(own, {"teacher_tau": 0.5, "adv_tau": 0.0})[1]


# --- the losses after 559b447, which cannot be run here, as docs and source text describe them ------------

Terms = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def ipo(log_ratio: Tensor, shift: Tensor, advantages: Tensor, o: Any) -> Tensor:
    return torch.where(shift.abs() <= o.eps, -o.adv_tau * advantages * log_ratio.exp(), 0.0)


def icepop(log_ratio: Tensor, shift: Tensor, advantages: Tensor, o: Any) -> Tensor:
    ratio = log_ratio.exp()
    kept = (ratio >= o.ratio_low) & (ratio <= o.ratio_high)
    return torch.where(kept, -o.adv_tau * advantages * ratio, 0.0)


def ppo(log_ratio: Tensor, shift: Tensor, advantages: Tensor, o: Any) -> Tensor:
    ratio, scaled = log_ratio.exp(), o.adv_tau * advantages
    return -torch.minimum(scaled * ratio, scaled * ratio.clamp(o.ratio_low, o.ratio_high))


def cispo(log_ratio: Tensor, shift: Tensor, advantages: Tensor, o: Any) -> Tensor:
    weight = log_ratio.detach().exp().clamp(o.ratio_low, o.ratio_high)
    return -weight * o.adv_tau * advantages * log_ratio  # log pi, less a constant


LATER: dict[str, Terms] = {"ipo": ipo, "icepop": icepop, "ppo": ppo, "cispo": cispo}


@pytest.mark.filterwarnings("ignore:prime-rl. it is newer than the newest")
@pytest.mark.parametrize("kind", LATER)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**20), narrow=st.booleans(), scale=st.sampled_from([1.0, 0.5]))
def test_the_losses_after_559b447_have_the_gradient_of_ours(
    kind: str, seed: int, narrow: bool, scale: float
) -> None:
    own = native.find(kind, AFTER_559B447)
    assert own is not None and own.generations == (AFTER_559B447,)
    table: dict[str, Any] = {option.name: option.default for option in own.options}
    table["adv_tau"] = scale
    if narrow:
        bounds = {"eps": 0.05, "ratio_low": 0.9, "ratio_high": 1.05}
        table |= {name: value for name, value in bounds.items() if name in table}
    g = torch.Generator().manual_seed(seed)
    n = 40
    logprobs = (-0.05 - 2 * torch.rand(n, generator=g, dtype=torch.float64)).requires_grad_()
    noise = torch.randn(n, generator=g, dtype=torch.float64)
    rollout = (logprobs.detach() + 0.6 * noise).clamp(max=-1e-3)
    advantages = torch.randn(n, generator=g, dtype=torch.float64)
    weights = 0.5 + torch.rand(n, generator=g, dtype=torch.float64)
    mask = torch.rand(n, generator=g) > 0.2
    shift = logprobs.detach().exp() - rollout.exp()
    token = LATER[kind](logprobs - rollout, shift, advantages, SimpleNamespace(**table))
    (theirs,) = torch.autograd.grad((token * weights)[mask].sum(), logprobs)
    given = SimpleNamespace(
        trainer_logprobs=logprobs,
        inference_logprobs=rollout,
        ref_logprobs=None,
        advantages=advantages,
        loss_mask=mask,
        loss_weights=weights,
        trainer_mask_logprobs=None,
        inference_mask_logprobs=None,
    )
    kwargs, differences = native.kwargs_of(own, table)
    (ours,) = torch.autograd.grad(loss_fn(given, **kwargs).loss, logprobs)
    assert not differences
    assert_parity(ours, theirs, terms=8, what=kind)


@pytest.mark.filterwarnings("ignore:prime-rl. it is newer than the newest")
def test_a_ratio_beyond_the_cap_is_capped_there_and_not_here() -> None:
    """`max_importance_ratio` = 1e4: with A < 0 the clip leaves that side open."""
    own = native.find("ppo", AFTER_559B447)
    assert own is not None
    logprobs = torch.tensor([-0.1], dtype=torch.float64, requires_grad=True)
    given = SimpleNamespace(
        trainer_logprobs=logprobs,
        inference_logprobs=logprobs.detach() - 12.0,
        ref_logprobs=None,
        advantages=-torch.ones(1, dtype=torch.float64),
        loss_mask=torch.ones(1, dtype=torch.bool),
        loss_weights=None,
        trainer_mask_logprobs=None,
        inference_mask_logprobs=None,
    )
    (ours,) = torch.autograd.grad(loss_fn(given, **native.kwargs_of(own, {})[0]).loss, logprobs)
    assert_parity(ours, torch.full_like(ours, 12.0).exp(), terms=8)
    assert float(ours) > 1e4  # PRIME-RL's
    _, differences = native.kwargs_of(own, {"max_importance_ratio": 100.0})
    assert differences == ["max_importance_ratio = 100.0: not available: our ratio is not capped there"]


def test_the_docs_have_the_table() -> None:
    assert "\n".join(native.rows()) in (ROOT / "docs" / "prime_rl.md").read_text()
