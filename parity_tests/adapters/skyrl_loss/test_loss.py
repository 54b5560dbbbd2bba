"""Our policy losses and advantages in SkyRL's registries: sums, cuts, masks, options, and what is refused."""

import copy
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from composer_plugins.adapters.skyrl_loss.config import ComposerAlgorithmConfig
from composer_plugins.adapters.skyrl_loss.loss import AdvantageEstimator, PolicyLoss, log_once
from composer_plugins.adapters.skyrl_loss.register import register
from composer_plugins.adapters.skyrl_loss.upstream import moved, release_of
from composer_plugins.batches import steps
from composer_plugins.comparing import Step
from composer_plugins.conformance.batches import Rollouts
from composer_plugins.conformance.skyrl_claims import upstream
from composer_plugins.conformance.skyrl_claims.policy import ON_DIVIDED, VALUES
from composer_plugins.conformance.skyrl_claims.rest import CHOICES
from composer_plugins.errors import ComposerWarning, ConfigError, DataError
from composer_plugins.frameworks.contract import NamedLoss, Option
from composer_plugins.frameworks.skyrl import ALGORITHM, NODE, SKYRL, Key
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.registry import losses
from composer_plugins.objective.options import as_yaml
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.pasted import to_paste

POLICIES = upstream.ppo_utils.PolicyLossRegistry
ESTIMATORS = upstream.ppo_utils.AdvantageEstimatorRegistry
MASK = torch.arange(6) < torch.tensor([6, 4, 5, 2, 6, 1, 3, 6]).unsqueeze(-1)
REDUCTIONS = tuple(SKYRL.denominators)
RUNS = [one for one in losses() if one.kind == "policy" and SKYRL.runs(one)]


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    register()
    yield
    for registry in (POLICIES, ESTIMATORS):
        for name in [one for one in registry.list_available() if one.startswith("composer")]:
            registry.unregister(name)


def batch(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A mini-batch of eight rows, two of each prompt, as SkyRL's trainer has it before it divides."""
    g = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(MASK.shape, generator=g, dtype=dtype) - 0.1
    noise = [0.2 * torch.randn(MASK.shape, generator=g, dtype=dtype) for _ in range(2)]
    advantages = torch.randn(len(MASK), 1, generator=g, dtype=dtype).expand(MASK.shape).clone()
    found = {"logprobs": logprobs, "old_logprobs": (logprobs + noise[0]).clamp(max=-0.01)}
    found |= {"rollout_logprobs": (logprobs + noise[1]).clamp(max=-0.01)}
    return found | {"advantages": advantages, "mask": MASK}


def divided(given: dict[str, Tensor], reduction: str) -> dict[str, Tensor]:
    advantages = upstream.divided(given["advantages"], given["mask"], reduction, 100, [2, 2, 2, 2])
    return given | {"advantages": advantages}


def config(name: str, **options: Any) -> Any:
    return upstream.algorithm({Key.POLICY: name, **options})


def gradient(function: Callable[..., Any], options: Any, parts: list[dict[str, Tensor]]) -> Tensor:
    return torch.cat([upstream.called(function, options, part)[1] for part in parts])


def cut(given: dict[str, Tensor], rows: int) -> list[dict[str, Tensor]]:
    return [{name: x[i : i + rows] for name, x in given.items()} for i in range(0, len(MASK), rows)]


def test_every_loss_and_advantage_that_runs_is_registered_once() -> None:
    register()
    names = {one.removeprefix("composer/") for one in POLICIES.list_available() if "/" in one}
    assert names == {one.name for one in RUNS} and len(names) > 20
    estimators = {one for one in ESTIMATORS.list_available() if one.startswith("composer/")}
    assert {"composer/rloo", "composer/gae", "composer/maxrl", "composer/dr_grpo"} <= estimators
    assert "composer" in POLICIES.list_available() and "composer" in ESTIMATORS.list_available()


@pytest.mark.parametrize("registry", [POLICIES, ESTIMATORS])
def test_another_packages_composer_is_refused(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (POLICIES, ESTIMATORS):
        others = {name: x for name, x in one._functions.items() if not name.startswith("composer")}
        monkeypatch.setattr(one, "_functions", others)
    registry.register("composer", right)
    with pytest.raises(ValueError, match="'composer' already registered"):
        register()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["ppo", "gspo_token", "cispo", "dppo_tv", "sapo", "vespo", "minirl"])
def test_micro_batches_and_ranks_leave_the_gradient(name: str, reduction: str) -> None:
    """1, 2, 4 and 8 rows to a micro-batch: DP ranks are the same sums, which SkyRL multiplies by dp_size."""
    given = divided(batch(), reduction)
    (row,) = [one for one in RUNS if one.name == name]
    function, options = POLICIES.get(f"composer/{name}"), config(f"composer/{name}", **required(row))
    whole = gradient(function, options, [given])
    for rows in (1, 2, 4):
        parts = cut(given, rows)
        assert_parity(gradient(function, options, parts), whole, terms=6, what=f"{rows} rows")
        ranks = [sum(upstream.called(function, options, one)[0] for one in parts[k::2]) for k in (0, 1)]
        together = upstream.called(function, options, given)[0]
        assert_parity(
            torch.stack([torch.as_tensor(x) for x in ranks]).sum(), together, terms=48, magnitude=1.0
        )


@pytest.mark.parametrize("row", RUNS, ids=lambda row: row.name)
def test_masked_nan_reaches_neither_loss_nor_gradient(row: Any) -> None:
    given = divided(batch(), "token_mean")
    options = config(f"composer/{row.name}", **required(row))
    junk = {name: torch.where(MASK, x, torch.nan) for name, x in given.items() if name != "mask"}
    wanted = upstream.called(POLICIES.get(f"composer/{row.name}"), options, given)
    found = upstream.called(POLICIES.get(f"composer/{row.name}"), options, junk | {"mask": MASK})
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert found[0].isfinite() and bool((found[1] != 0).any()) and not found[1][~MASK].any()
    assert found[2] == wanted[2] and all(isinstance(x, float) for x in found[2].values())


def required(row: Any) -> dict[str, Any]:
    """The parameters without a default."""
    params = {name: one.example for name, one in row.parameters.items() if one.example is not None}
    return {NODE: {"policy_params": params}} if params else {}


@pytest.mark.parametrize(
    "name, params", {"dro": {"beta": 0.1}, "ipo": {}, "dppo_tv": {"kl_tau": 0.01}}.items()
)
def test_a_term_without_the_advantages_is_refused(name: str, params: dict[str, float]) -> None:
    given = divided(batch(), "token_mean")
    options = config(f"composer/{name}", **{NODE: {"policy_params": params}})
    with pytest.raises(ConfigError, match="has a term without the advantages"):
        upstream.called(PolicyLoss(name), options, given)


def test_the_term_switched_off_is_not_refused() -> None:
    options = config("composer/ipo", **{NODE: {"policy_params": {"kl_tau": 0.0}}})
    assert upstream.called(PolicyLoss("ipo"), options, divided(batch(), "token_mean"))[1].any()


def test_such_a_term_would_weigh_more_by_the_number_of_tokens() -> None:
    """Why it is refused: SkyRL's own kl_cov has its penalty as often as the mini-batch has tokens."""
    given = batch()
    given["old_logprobs"] = given["logprobs"] - 0.1  # so that a penalty has a gradient
    options = config("kl_cov", **{f"{Key.POLICY.rpartition('.')[0]}.kl_cov.kl_cov_frac": 1.0})
    function = POLICIES.get("kl_cov")
    off = copy.deepcopy(options)
    off.kl_cov.ppo_kl_coef = 0.0
    parts = [
        float((upstream.called(function, one, given)[1] - upstream.called(function, off, given)[1]).sum())
        for one in (options,)
    ]
    scaled = divided(given, "token_mean")
    penalty = float(
        (upstream.called(function, options, scaled)[1] - upstream.called(function, off, scaled)[1]).sum()
    )
    assert penalty == pytest.approx(parts[0]) == pytest.approx(float(MASK.sum()))  # and not divided by 33


def test_clip_cov_of_skyrl_drops_nothing_because_the_advantages_are_divided() -> None:
    given = batch(3)
    given["logprobs"] = given["logprobs"].clone().requires_grad_(False) * 3
    given["old_logprobs"] = given["logprobs"].clone()
    options = config("clip_cov", **{f"{Key.POLICY.rpartition('.')[0]}.clip_cov.clip_ratio": 0.5})
    function = POLICIES.get("clip_cov")
    assert upstream.called(function, options, given)[2]["clip_ratio"] > 0.05
    assert upstream.called(function, options, divided(given, "token_mean"))[2]["clip_ratio"] == 0


def test_a_loss_per_sequence_refuses_advantages_that_differ_by_token() -> None:
    given = divided(batch(), "token_mean")
    given["advantages"] = given["advantages"] * torch.linspace(1, 2, 6, dtype=torch.float64)
    with pytest.raises(DataError, match="they differ within a sequence"):
        upstream.called(PolicyLoss("gspo"), config("composer/gspo"), given)


@pytest.mark.parametrize("name", ["dppo_tv", "masked_is"])
def test_without_rollout_log_probabilities_a_loss_that_needs_them_is_refused(name: str) -> None:
    given = divided(batch(), "token_mean")
    given.pop("rollout_logprobs")
    with pytest.raises(ConfigError, match=r"set generator.sampling_params.logprobs=1"):
        upstream.called(PolicyLoss(name), config(f"composer/{name}"), given)


def test_off_policy_correction_without_rollout_log_probabilities_is_refused_and_not_left_out() -> None:
    given = divided(batch(), "token_mean")
    given.pop("rollout_logprobs")
    with pytest.raises(ConfigError, match="SkyRL has no log-probabilities of the rollout policy"):
        upstream.called(PolicyLoss("ppo"), config("composer/ppo", **{Key.TIS: "token"}), given)


CORRECTIONS: dict[str, dict[str, Any]] = {
    "token": {Key.TIS: "token", Key.TOKEN_CAP: 1.1},
    "sequence": {Key.TIS: "sequence", Key.SEQUENCE_CAP: 1.3},
    "geometric": {Key.SEQUENCE_MASK: "geometric"},
    "product": {Key.TIS: "sequence", Key.SEQUENCE_MASK: "product"},
    "outliers": {Key.OUTLIERS[1]: 1.2},
    "tokens": {Key.TOKEN_MASK[0]: 0.9, Key.TOKEN_MASK[1]: 1.1},
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_off_policy_correction_acts_as_on_skyrls_own_loss(name: str) -> None:
    given, options = divided(batch(), "token_mean"), CORRECTIONS[name]
    theirs = upstream.called(POLICIES.get("regular"), config("regular", **options), given)
    junk = {key: torch.where(MASK, x, torch.nan) for key, x in given.items() if key != "mask"} | {
        "mask": MASK
    }
    node = {NODE: {"policy": "grpo@skyrl"}}
    found = upstream.called(PolicyLoss(), config("composer", **options, **node), junk)
    assert_parity(found[0], theirs[0], terms=48, magnitude=1.0, dtype=torch.float32)
    assert_parity(found[1], theirs[1], terms=6, dtype=torch.float32, what="gradient")
    plain = upstream.called(PolicyLoss(), config("composer", **node), junk)
    assert not torch.equal(found[1], plain[1])
    assert {name: found[2][name] for name in theirs[2]} == pytest.approx(theirs[2])


def weighted(reduction: str) -> dict[str, Tensor]:
    """A mini-batch whose loss_mask has weights, and SkyRL's advantages of it."""
    g = torch.Generator().manual_seed(7)
    drawn = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64)[torch.randint(4, MASK.shape, generator=g)]
    return divided(batch() | {"mask": drawn * MASK}, reduction)


@pytest.mark.parametrize("correction", ["none", "sequence", "tokens"])
@pytest.mark.parametrize("name", ["regular", "sapo", "dppo"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_multiply_the_loss_of_their_token_as_skyrls(
    reduction: str, name: str, correction: str
) -> None:
    given, options = weighted(reduction), CORRECTIONS.get(correction, {})
    row = {"regular": "grpo", "dppo": "dppo_tv"}.get(name, name)
    theirs = upstream.called(POLICIES.get(name), config(name, **options), given)
    found = upstream.called(
        PolicyLoss(), config("composer", **options, **{NODE: {"policy": f"{row}@skyrl"}}), given
    )
    assert_parity(found[0], theirs[0], terms=48, magnitude=1.0, dtype=torch.float32)
    assert_parity(found[1], theirs[1], terms=6, dtype=torch.float32, what="gradient")
    assert theirs[1].any() and bool((given["mask"] == 2).any())


def test_a_ratio_per_sequence_counts_each_weighted_token_alike() -> None:
    """And SkyRL's gspo weighs them. With one weight per sequence, of a sum above 1, they are the same."""
    node = {NODE: {"policy": "gspo_token@skyrl"}}
    uneven, even = weighted("sequence_mean"), batch() | {"mask": MASK * torch.tensor(2.0)}
    for given, is_same in ((uneven, False), (divided(even, "sequence_mean"), True)):
        theirs = upstream.called(POLICIES.get("gspo"), config("gspo"), given)[1]
        ours = upstream.called(PolicyLoss(), config("composer", **node), given)[1]
        if is_same:
            assert_parity(ours, theirs, terms=6, dtype=torch.float32)
        else:
            assert (ours - theirs).abs().max() > 0.01 * theirs.abs().max()
        all_alike = upstream.called(
            PolicyLoss(), config("composer", **node), given | {"mask": given["mask"] > 0}
        )
        where = given["mask"] > 0
        assert_parity(ours[where] / given["mask"][where], all_alike[1][where], terms=6)


@pytest.mark.parametrize("wrong", [-0.5, float("nan"), float("inf")])
def test_a_weight_below_0_or_not_finite_is_an_error(wrong: float) -> None:
    given = divided(batch(), "token_mean")
    weights = given["mask"].double()
    weights[2, 3] = wrong
    with pytest.raises(DataError, match=f"loss_mask: it holds {wrong:g}, and a weight is a finite number"):
        upstream.called(PolicyLoss("ppo"), config("composer/ppo"), given | {"mask": weights})
    with pytest.raises(DataError, match="loss_mask: it holds -"):  # advantages in its place
        upstream.called(PolicyLoss("ppo"), config("composer/ppo"), given | {"mask": given["advantages"]})


def test_weights_are_looked_at_until_there_is_one_above_0() -> None:
    """The first micro-batch may have none: one of padding, or advantages of 0 in the mask's place."""
    function, given = PolicyLoss("ppo"), divided(batch(), "token_mean")
    wrong = given | {"mask": given["advantages"]}
    upstream.called(function, config("composer/ppo"), given | {"mask": 0 * MASK})
    with pytest.raises(DataError, match="loss_mask: it holds -"):
        upstream.called(function, config("composer/ppo"), wrong)
    upstream.called(function, config("composer/ppo"), given)
    upstream.called(function, config("composer/ppo"), wrong)  # checked before: no wait for the device


@pytest.mark.parametrize(
    "name, of", [("ppo", "logprobs"), ("ppo", "old_logprobs"), ("dppo_tv", "rollout_logprobs")]
)
def test_a_log_probability_is_at_most_what_bfloat16_rounds_it_to(name: str, of: str) -> None:
    given = divided(batch(), "token_mean")
    for bound, is_sound in ((0.125, True), (0.13, False)):
        given[of] = given[of].clone()
        given[of][0, 0] = bound
        if is_sound:
            assert upstream.called(PolicyLoss(name), config(f"composer/{name}"), given)[0].isfinite()
        else:
            with pytest.raises(DataError, match=f"{of}: it holds 0.13 at an unmasked token, .* bfloat16"):
                upstream.called(PolicyLoss(name), config(f"composer/{name}"), given)


def test_an_estimators_mask_is_of_0_and_1() -> None:
    _, tokens, uids = rewards()
    options = upstream.algorithm({Key.ESTIMATOR: "composer/rloo"})
    with pytest.raises(DataError, match=r"response_mask: it holds 0\.5, and a mask holds 0 and 1"):
        AdvantageEstimator("rloo")(tokens, 0.5 * MASK, uids, None, options)


def paste(options: dict[str, Any], run: Callable[[Any], Any]) -> tuple[list[str], Any]:
    """The options that `run` says to remove, and the config without them and with the line that it says."""
    keys, line = to_paste(lambda: run(upstream.algorithm(options)))
    node = {f"{NODE}.{key}": one for key, one in options.get(NODE, {}).items()}
    words = {key: one for key, one in {**options, **node}.items() if key not in (*keys, NODE)}
    given = [*(f"{key}={as_yaml(one)}" for key, one in words.items()), *shlex.split(line)]
    read = OmegaConf.from_cli(given).trainer.algorithm  # as SkyRL's from_cli_overrides
    return keys, ComposerAlgorithmConfig.from_dict_config(read)


def moving(own: NamedLoss, option: Option) -> dict[str, Any]:
    """Options that choose SkyRL's own loss, with one of its parameters moved from its class's default."""
    values = [*VALUES.get(option.key.partition(".algorithm.")[2], ()), *CHOICES.get(option.key, ())[::-1]]
    several = ({option.key: one} for one in values)
    return {**own.options, **next(one for one in several if moved(upstream.algorithm(one)))}


OWN = [
    pytest.param(own, option, id=f"{own.row} {option.key.rpartition('.')[2]}")
    for own in SKYRL.losses
    if own.row.partition("@")[0] not in ON_DIVIDED and release_of(None) in SKYRL.releases_of(own)
    for option in own.own
    if option.acts_by_parameters
]


@pytest.mark.parametrize("own, option", [one for one in OWN if one.values[0].kind == "policy"])
def test_a_pasted_line_trains_what_skyrls_own_option_does(own: NamedLoss, option: Option) -> None:
    options, given = moving(own, option), divided(batch(), "token_mean")
    given["old_logprobs"][:, 1] -= 0.7  # a ratio of 2, for the second clip
    name = str(options[Key.POLICY])
    theirs, without = (
        upstream.policy_loss(name, upstream.algorithm(x), given) for x in (options, own.options)
    )
    params = {} if option.key.endswith("clip_ratio_c") else dict(own.params)
    node = {"policy": own.row, "policy_params": params}
    ours = {Key.POLICY: "composer", NODE: node, option.key: options[option.key]}
    keys, pasted = paste(ours, lambda config: upstream.called(PolicyLoss(), config, given))
    found = upstream.called(PolicyLoss(), pasted, given)
    assert keys == [option.key] and not torch.equal(theirs[1], without[1])
    assert_parity(found[0], theirs[0], terms=48, magnitude=1.0, dtype=torch.float32)
    assert_parity(found[1], theirs[1], terms=6, dtype=torch.float32, what="gradient")


@pytest.mark.parametrize("own, option", [one for one in OWN if one.values[0].kind == "advantage"])
def test_a_pasted_line_gives_the_advantages_of_skyrls_own_option(own: NamedLoss, option: Option) -> None:
    values, tokens, uids = rewards()
    rows = Rollouts(values, tokens, torch.arange(8).div(2, rounding_mode="floor"), MASK)
    options, critic = moving(own, option), torch.where(MASK, tokens.cumsum(-1) - 0.3, 0.0)
    theirs, without = (
        upstream.estimated(str(options[Key.ESTIMATOR]), rows, upstream.algorithm(one), critic)[0]
        for one in (options, own.options)
    )
    ours = {Key.ESTIMATOR: "composer", NODE: {"advantage": own.row}, option.key: options[option.key]}

    def estimated(config: Any) -> tuple[Tensor, Tensor]:
        return AdvantageEstimator()(tokens, MASK.long(), rows.ids.tolist(), critic, config)

    keys, pasted = paste(ours, estimated)
    assert keys == [option.key] and not torch.equal(theirs, without)
    assert_parity(estimated(pasted)[0], torch.where(MASK, theirs, 0.0), terms=48, dtype=torch.float32)


def test_all_options_of_skyrls_own_losses_are_one_error() -> None:
    own = [one for one in SKYRL.options_of("policy") if one.acts_by_parameters]
    given, options = divided(batch(), "token_mean"), {Key.POLICY: "composer/ppo"}
    options |= {one.key: one.default + 0.5 for one in own}
    keys, pasted = paste(options, lambda config: upstream.called(PolicyLoss("ppo"), config, given))
    assert keys == [one.key for one in own] and len(keys) == 14
    assert pasted.composer == {"policy_params": {"clip_low": 0.7, "clip_high": 0.7, "dual_clip": 3.5}}
    assert not moved(pasted).keys() & {*keys}


def test_the_options_of_the_class_at_its_defaults_are_no_error() -> None:
    """Those of SkyRL's main branch are 0.4's, and its version says 0.3.0."""
    assert moved(upstream.algorithm({})) == {}
    upstream.called(PolicyLoss("gspo"), config("composer/gspo"), divided(batch(), "token_mean"))


@pytest.mark.filterwarnings("ignore:.*bounds the ratio of a sequence")
def test_the_log_says_what_trains_where_a_default_is_typed(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    function = PolicyLoss("gspo")
    clips = {f"{ALGORITHM}.eps_clip_low": 0.2, f"{ALGORITHM}.eps_clip_high": 0.28}
    options = {Key.POLICY: "composer/gspo", **clips}
    function.asked(paste(options, function.asked)[1])
    unread = "; SkyRL's options for the parameters of its own policy losses are not read"
    assert caplog.messages == [f"policy gspo(clip_low=0.0003, clip_high=0.28){unread}"]
    own, names = upstream.algorithm({}).cispo, ("cispo_eps_clip_low", "cispo_eps_clip_high")
    bounds = {f"{ALGORITHM}.cispo.{name}": getattr(own, name) for name in names}
    PolicyLoss("cispo").asked(config("composer/cispo", **bounds))
    assert caplog.messages[1:] == [f"policy cispo(clip_high=0.2){unread}"]


@pytest.mark.parametrize("option", ["hint_weight", "replay_weight"])
def test_a_channel_that_skyrl_cannot_deliver_is_refused(option: str) -> None:
    options = config("composer/ppo", **{NODE: {option: 0.5}})
    with pytest.raises(
        ConfigError, match=rf"trainer.algorithm.composer.{option}: it is 0.5, and SkyRL gives"
    ):
        upstream.called(PolicyLoss("ppo"), options, divided(batch(), "token_mean"))


def test_an_option_that_changes_is_parsed_again() -> None:
    function, given, options = PolicyLoss("ppo"), divided(batch(), "token_mean"), config("composer/ppo")
    before = upstream.called(function, options, given)[1]
    options.composer = {"policy_params": {"clip_high": 0.01}}
    assert not torch.equal(upstream.called(function, options, given)[1], before)


def one_number(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """A user's loss of the wrong type."""
    return (logprobs * advantages * mask).sum()


def of_rows(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """A user's loss with one number per row."""
    return TokenLoss((logprobs * advantages * mask).sum(-1), {})


def right(logprobs: Tensor, advantages: Tensor, mask: Tensor, *, factor: float = 1.0) -> TokenLoss:
    """A user's loss."""
    return TokenLoss(torch.where(mask, -factor * logprobs * advantages, 0.0), {})


@pytest.mark.parametrize("name", ["one_number", "of_rows"])
def test_a_users_loss_of_the_wrong_type_is_refused(name: str) -> None:
    options = config("composer", **{NODE: {"policy": f"{__name__}:{name}"}})
    with pytest.raises(ConfigError, match="returned"):
        upstream.called(PolicyLoss(), options, divided(batch(), "token_mean"))


def test_a_users_loss_runs_by_import_path() -> None:
    node = {"policy": f"{__name__}:right", "policy_params": {"factor": 2.0}}
    given = divided(batch(), "token_mean")
    found = upstream.called(PolicyLoss(), config("composer", **{NODE: node}), given)[1]
    assert torch.equal(found, torch.where(MASK, -2 * given["advantages"], 0.0))


def test_what_is_registered_survives_cloudpickle_as_a_name() -> None:
    for registry in (POLICIES, ESTIMATORS):
        for name in registry.list_available():
            if name.startswith("composer"):
                pickled = cloudpickle.dumps(registry.get(name))
                again = cloudpickle.loads(pickled)
                assert len(pickled) < 200 and again.name == registry.get(name).name
    given = divided(batch(), "token_mean")
    used = PolicyLoss("cispo")
    found = upstream.called(used, config("composer/cispo"), given)
    again = upstream.called(cloudpickle.loads(cloudpickle.dumps(used)), config("composer/cispo"), given)
    assert torch.equal(found[1], again[1])


def rewards() -> tuple[Tensor, Tensor, list[str]]:
    values = torch.tensor([1.0, 0.0, 0.5, 0.5, 0.0, 2.0, 1.0, 0.0], dtype=torch.float64)
    last = MASK.sum(-1, keepdim=True) - 1
    tokens = torch.zeros(MASK.shape, dtype=torch.float64).scatter(1, last, values.unsqueeze(-1))
    return values, tokens, ["a", "a", "b", "b", "c", "c", "pad0", "pad1"]


def estimate(name: str, token_rewards: Tensor, uids: list[str], **options: Any) -> Tensor:
    """As SkyRL's trainer calls it."""
    found, returns = upstream.ppo_utils.compute_advantages_and_returns(
        token_level_rewards=token_rewards,
        response_mask=MASK.long(),
        index=uids,
        adv_estimator=name,
        config=upstream.algorithm({Key.ESTIMATOR: name, **options}),
    )
    assert torch.equal(found, returns)
    return found


def test_an_advantage_is_that_of_its_rows_and_rows_of_padding_do_not_count() -> None:
    values, tokens, uids = rewards()
    found = estimate("composer/rloo", tokens, uids)
    wanted = torch.tensor([1.0, -1.0, 0.0, 0.0, -2.0, 2.0, 0.0, 0.0], dtype=torch.float64)
    assert torch.equal(found, torch.where(MASK, wanted.unsqueeze(-1), 0.0))
    batch_scale = {NODE: {"advantage_params": {"scale": "batch", "ddof": 0, "eps": 0.0}}}
    scaled = estimate("composer/grpo", tokens, uids, **batch_scale)[:, 0]
    spread = values[:6].std(correction=0)
    assert_parity(scaled[:6], torch.tensor([0.5, -0.5, 0, 0, -1, 1]).double() / spread, terms=8)


def test_a_reward_that_is_not_finite_is_an_error_or_what_the_option_says() -> None:
    _, tokens, uids = rewards()
    tokens[0, 5] = torch.nan
    with pytest.raises(DataError, match="1 of 8 rollouts have the reward nan"):
        estimate("composer/rloo", tokens, uids)
    with pytest.warns(ComposerWarning, match="on_bad_reward is 'drop'"):
        found = estimate("composer/rloo", tokens, uids, **{NODE: {"on_bad_reward": "drop"}})
    assert not found[:2].any() and found[4:6].any()


def test_an_estimator_keeps_no_state_that_another_process_would_miss() -> None:
    again = cloudpickle.loads(cloudpickle.dumps(AdvantageEstimator("rloo")))
    _, tokens, uids = rewards()
    options = upstream.algorithm({Key.ESTIMATOR: "composer/rloo"})
    first = again(tokens, MASK.long(), uids, None, options)[0]
    assert torch.equal(first, estimate("composer/rloo", tokens, uids))


def test_maxrl_is_0_where_skyrl_divides_by_a_mean_that_is_not_above_0() -> None:
    _, tokens, uids = rewards()
    theirs = estimate("maxrl", tokens - 2 * (tokens > 0), uids)
    ours = estimate("composer/maxrl", tokens - 2 * (tokens > 0), uids)
    assert theirs[:2].abs().max() > 0.9 and not ours[:2].any()
    above = estimate("composer", tokens, uids, **{NODE: {"advantage": "maxrl@skyrl"}})
    assert_parity(above[:6], estimate("maxrl", tokens, uids)[:6], terms=8, dtype=torch.float32)


def test_the_loss_of_a_record_is_the_loss_that_skyrl_gets(tmp_path: Path) -> None:
    options = config("composer", **{NODE: {"policy": "gspo", "record_batches": str(tmp_path)}})
    parts = cut(divided(batch(), REDUCTIONS[0]), 4)
    function = PolicyLoss()
    values = [float(upstream.called(function, options, part)[0].detach()) for part in parts]
    found = [Step.read(tmp_path, step).reproduced() for step in steps(tmp_path)]
    assert all(one is not None and one["equal"] for one in found)
    assert sum(one["recomputed"] for one in found if one) == pytest.approx(sum(values), rel=1e-9)
