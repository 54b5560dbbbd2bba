"""What is read of SkyRL's configs, what the doctor says of them, and what `migrate` writes."""

import shlex
import sys
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from composer_plugins.adapters.skyrl_loss.options import Configs
from composer_plugins.adapters.skyrl_loss.upstream import CONFIG, moved, release_of
from composer_plugins.cli import app
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks import skyrl
from composer_plugins.frameworks.skyrl import ALGORITHM, NODE, SKYRL, Key
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.row import REQUIRED, Loss
from composer_plugins.objective.by_table import nested
from composer_plugins.objective.files import replaced
from composer_plugins.objective.objective import Objective
from composer_plugins.objective.resolve import migrate, resolve
from composer_plugins.testing.conventions import check_as
from parity_tests.rigs.every import rows

OURS = {Key.POLICY: "composer", Key.ENTRYPOINT: skyrl.ENTRYPOINT}
ACTOR = "actor_rollout_ref.actor"


def read(options: dict[str, Any], version: str | None = None) -> Objective:
    return resolve("skyrl", nested(options), version).required()


def doctor(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *words, "--framework", "skyrl"])
    return done.exit_code, " ".join(done.output.split())


def written(text: str) -> dict[str, Any]:
    """The options of a written command, as a table."""
    return replaced({}, [one for one in shlex.split(text.replace("\\\n", " "), comments=True) if "=" in one])


def test_the_defaults_are_grpo_with_a_kl_to_the_reference() -> None:
    found = resolve("skyrl", nested({Key.POLICY: "regular"}), "0.4.0")
    objective = found.required()
    assert (objective.policy.name, objective.mode, objective.old) == ("grpo@skyrl", "token-mean", "trainer")
    assert objective.advantage is not None and objective.advantage.name == "grpo@skyrl"
    assert objective.kl is not None and objective.kl.estimator.name == "k3@skyrl"
    assert (objective.kl.weight, objective.group_size, objective.temperature) == (0.001, 5, 1.0)
    assert objective.denominators["KL"] == "seq-mean-token-mean"
    assert not found.findings and not found.unread and found.release == "SkyRL 0.4"


@pytest.mark.parametrize(
    "options, policy, params",
    [
        ({Key.POLICY: "dual_clip"}, "grpo@skyrl", {"dual_clip": 3.0, "clip_high": 0.2}),
        ({Key.POLICY: "dual_clip", f"{ALGORITHM}.clip_ratio_c": 10.0}, "grpo@skyrl", {"dual_clip": 10.0}),
        ({f"{ALGORITHM}.eps_clip_high": 0.28}, "grpo@skyrl", {"clip_high": 0.28, "dual_clip": None}),
        ({f"{ALGORITHM}.clip_ratio_c": 10.0}, "grpo@skyrl", {"dual_clip": None}),
        ({Key.POLICY: "rollout_is", f"{ALGORITHM}.eps_clip_low": 0.5}, "masked_is@skyrl", {"token_low": 0.5}),
        (
            {Key.POLICY: "rollout_is", f"{ALGORITHM}.eps_clip_high": 4.0},
            "masked_is@skyrl",
            {"token_high": 5.0},
        ),
        ({Key.POLICY: "dppo"}, "dppo_tv@skyrl", {"tv_low": 0.2, "tv_high": 0.2}),
        ({Key.POLICY: "dppo", Key.DPPO_TYPE: "binary_kl"}, "dppo_kl@skyrl", {"kl_low": 0.2}),
        ({Key.POLICY: "gspo"}, "gspo_token@skyrl", {"log_ratio_cap": 10.0}),
        ({Key.POLICY: "cispo"}, "cispo@skyrl", {"clip_low": 1.0, "clip_high": 4.0}),
        ({Key.POLICY: "composer/cispo"}, "cispo", {"clip_low": None, "clip_high": 0.2}),
        ({Key.POLICY: "composer", NODE: {"policy": "gspo"}}, "gspo", {"clip_high": 4e-4}),
    ],
)
def test_an_option_of_skyrl_is_a_parameter_here(options: Any, policy: str, params: dict[str, Any]) -> None:
    found = read(options, "0.4.0").policy
    assert found.name == policy
    assert {name: found.value(name) for name in params} == params


def test_cispo_has_other_defaults_before_0_4() -> None:
    options = {Key.POLICY: "cispo"}
    before, now = read(options, "0.3.0").policy, read(options, "0.4.0").policy
    assert (before.value("clip_low"), before.value("clip_high")) == (0.0, 5.0)
    assert (now.value("clip_low"), now.value("clip_high")) == (1.0, 4.0)
    given = options | {f"{ALGORITHM}.cispo.cispo_eps_clip_high": 4.0}
    assert read(given, "0.3.0").policy.value("clip_high") == 4.0
    not_read = nested({**OURS, NODE: {"policy": "ppo"}, f"{ALGORITHM}.cispo.cispo_eps_clip_high": 5.0})
    assert [len(resolve("skyrl", not_read, one).errors) for one in ("0.3.0", "0.4.0")] == [0, 1]


@pytest.mark.parametrize("version, release", [("0.3.1", "0.3"), ("0.4.0", "0.4"), ("0.4", "0.4")])
def test_the_release_of_a_version(version: str, release: str) -> None:
    assert release_of(version) == release


def test_the_class_of_the_config_says_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyRL's main branch has the version 0.3.0, and the options of 0.4."""
    for release, fields in (("0.3", ()), ("0.4", ("cispo_anchor",))):
        config = SimpleNamespace(CISPOConfig=type("CISPOConfig", (), dict.fromkeys(fields, "old")))
        monkeypatch.setitem(sys.modules, CONFIG, config)
        assert release_of(None) == release


@pytest.mark.parametrize("version", ["0.2.0", "0.10.1", "0.5", "4"])
def test_a_version_that_is_not_known_is_an_error(version: str) -> None:
    with pytest.raises(ConfigError, match=f"--version: SkyRL {version} is not known here; set one of 0.3, "):
        resolve("skyrl", {}, version)


def test_the_anchor_of_cispo_is_no_option_before_0_4() -> None:
    anchored = nested({Key.POLICY: "cispo", Key.ANCHOR: "rollout"})
    before, now = (resolve("skyrl", anchored, one) for one in ("0.3", "0.4"))
    assert (before.unread, before.required().old) == ((Key.ANCHOR,), "trainer")
    assert (now.unread, now.required().old) == ((), "rollout engine")


MOVED = {f"{ALGORITHM}.eps_clip_low": 3e-4, f"{ALGORITHM}.clip_ratio_c": 10.0, f"{ALGORITHM}.gamma": 0.9}


def test_moved_options_of_skyrls_own_losses_are_an_error_of_each_kind() -> None:
    options = {**OURS, Key.ESTIMATOR: "composer/dr_grpo", NODE: {"policy": "grpo"}, **MOVED}
    policy, advantage = resolve("skyrl", nested(options)).errors
    assert policy.key == f"{ALGORITHM}.eps_clip_low, {ALGORITHM}.clip_ratio_c"
    assert (
        policy.remedy == f"remove them, and set '{NODE}.policy_params={{clip_low: 0.0003, dual_clip: 10.0}}'"
    )
    assert (advantage.key, advantage.remedy) == (f"{ALGORITHM}.gamma", "remove it")
    read({Key.POLICY: "regular", **MOVED})  # of SkyRL's own losses some are read, and none is an error
    status, said = doctor(*(f"{key}={x}" for key, x in {Key.POLICY: "composer/grpo", **MOVED}.items()))
    assert status == 1 and "policy_params={clip_low: 0.0003, dual_clip: 10.0}'" in said


@dataclass
class Cispo:
    """Options of a release with defaults of its own."""

    cispo_eps_clip_low: float = 0.7
    cispo_eps_clip_high: float = 7.0


@dataclass
class Algorithm:
    """An AlgorithmConfig of that release."""

    eps_clip_low: float = 0.3
    cispo: Cispo = field(default_factory=Cispo)


def test_an_option_is_moved_from_the_default_of_its_class() -> None:
    low, high = f"{ALGORITHM}.eps_clip_low", f"{ALGORITHM}.cispo.cispo_eps_clip_high"
    assert moved(Algorithm()) == {}
    assert moved(Algorithm(0.2, Cispo(cispo_eps_clip_high=4.0))) == {low: 0.2, high: 4.0}
    without_class = SimpleNamespace(eps_clip_low=0.2, cispo=SimpleNamespace(cispo_eps_clip_high=5.0))
    assert moved(without_class) == {high: 5.0}
    table = {"trainer": {"algorithm": {**asdict(Algorithm()), "policy_loss_type": "composer/ppo"}}}
    assert Configs(moved=moved(Algorithm())).asked(table, "policy")[1] == []
    (error,) = Configs().asked(table, "policy")[1]
    assert "SkyRL reads them for its own losses, and 'ppo', which has nothing like" in error.problem


def test_whose_log_probabilities_a_loss_is_given() -> None:
    anchored = {Key.POLICY: "cispo", Key.ANCHOR: "rollout"}
    assert read(anchored, "0.4").old == "rollout engine"
    assert read({Key.POLICY: "cispo"}).old == "trainer"
    assert read({Key.POLICY: "importance_sampling"}).rollout == "trainer"
    assert read({Key.POLICY: "dppo"}).rollout == "rollout engine"


CORRECTIONS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "token": ({Key.TIS: "token"}, "tis", {"cap": 2.0, "level": "token", "log_ratio_clamp": 20.0}),
    "sequence": ({Key.TIS: "sequence"}, "tis", {"cap": 5.0, "level": "sequence"}),
    "of use_tis": ({Key.USE_TIS: True, Key.FORMER_CAP: 2.5}, "tis", {"cap": 2.5, "level": "token"}),
    "a band of tokens": (
        {Key.TIS: "token", Key.TOKEN_CAP: 5.0, Key.TOKEN_MASK[0]: 0.5, Key.TOKEN_MASK[1]: 5.0},
        "mis", {"low": 0.5, "high": 5.0, "level": "token"}),
    "a band of sequences": (
        {Key.TIS: "sequence", Key.SEQUENCE_MASK: "product"},
        "mis", {"low": 0.5, "high": 2.0, "level": "sequence"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_is_read_and_written(name: str) -> None:
    options, correction, params = CORRECTIONS[name]
    objective = read(options)
    assert objective.correction is not None and objective.correction.loss.name == correction
    assert {key: objective.correction.value(key) for key in params} == params
    assert not objective.remarks
    again = resolve("skyrl", migrate(objective, "skyrl").table).required()
    assert again.facts() == objective.facts()


@pytest.mark.parametrize(
    "options",
    [
        {Key.SEQUENCE_MASK: "geometric"},
        {Key.SEQUENCE_MASK: "product"},  # without weights it drops, and weighs nothing
        {Key.OUTLIERS[1]: 100.0},
        {Key.TIS: "token", Key.TOKEN_MASK[0]: 0.5, Key.TOKEN_MASK[1]: 5.0},  # a cap within the band
        {f"{ALGORITHM}.zero_variance_filter": True},
        {f"{ALGORITHM}.advantage_batch_normalize": True},
        {f"{ALGORITHM}.dynamic_sampling.type": "filter"},
        {f"{ALGORITHM}.overlong_buffer_len": 512},
        {Key.REDUCTION: skyrl.LEGACY},
        {Key.POLICY: "kl_cov"},
        {Key.KL_IN_REWARD: True, Key.USE_KL: False, Key.KL_CONTROL: "adaptive"},
        {"generator.sampling_params.top_p": 0.9},
        {Key.ESTIMATOR: "simple_baseline"},
    ],
)
def test_what_has_no_field_is_a_remark_and_never_nothing(options: dict[str, Any]) -> None:
    assert read(options).remarks


def test_a_key_that_no_table_names_is_not_looked_at() -> None:
    options = {f"{ALGORITHM}.my_own": 1, "trainer.new_table.x": 2, "trainer.policy.model.path": "x"}
    found = resolve("skyrl", nested({Key.POLICY: "regular", **options}))
    assert {*found.unread} == {*options}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({Key.POLICY: "regualr"}, "unknown loss 'regualr'; did you mean 'regular'?"),
    ({Key.ESTIMATOR: "grop"}, "unknown estimator 'grop'; did you mean 'grpo'?"),
    ({Key.POLICY: "dppo", Key.DPPO_TYPE: "tv"}, "unknown type 'tv'"),
    ({Key.REDUCTION: "mean"}, "unknown value 'mean'"),
    ({Key.TIS: "both"}, "unknown level 'both'"),
    ({Key.POLICY: "composer/ppoo"}, "unknown policy loss 'ppoo'"),
    ({Key.POLICY: "composer/clip_cov"}, "a statistic of the whole batch"),
    ({Key.POLICY: "composer/cispo@skyrl"}, f"set {Key.POLICY}=composer, and {NODE}.policy=cispo@skyrl"),
    ({Key.POLICY: "composer/opd"}, "needs teacher_logprobs, which skyrl does not provide"),
    ({Key.POLICY: "composer/ipo"}, "has a term without the advantages"),
    ({Key.POLICY: "composer/cispo", NODE: {"policy": "ppo"}}, "contradicts the name composer/cispo"),
    ({Key.POLICY: "composer", NODE: {"hint_weight": 0.1}}, "it is 0.1, and SkyRL gives"),
    ({Key.POLICY: "composer", NODE: {"replay_weight": 0.1}}, "it is 0.1, and SkyRL gives"),
    ({Key.POLICY: "composer", NODE: {"rollout_correction": "tis"}}, "it is 'tis', and SkyRL corrects"),
    ({Key.ESTIMATOR: "composer/remax"}, "needs baselines, which skyrl does not provide"),
    ({Key.USE_KL: "false"}, "it is 'false'; set true or false"),
    ({Key.SAMPLED_AT: 0}, "set a finite number in (0, inf)"),
    ({Key.USE_TIS: True}, "SkyRL multiplies the loss by at most that number"),
]


@pytest.mark.parametrize("options, error", WRONG)
def test_a_wrong_option_is_an_error(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read({Key.POLICY: "regular"} | options)
    assert error in str(refused.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", [one for one in rows() if one.kind == "policy"], ids=lambda row: row.name)
def test_a_config_takes_the_losses_that_the_table_runs_and_no_other(row: Loss) -> None:
    params = {name: row.parameters[name].example for name, x in row.defaults.items() if x is REQUIRED}
    options = {**OURS, Key.POLICY: f"composer/{row.name}", NODE: {"policy_params": params}}
    errors = resolve("skyrl", nested(options)).errors
    assert (errors == []) == SKYRL.runs(row), errors


def with_a_bonus(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """A user's loss with a term that has no advantages."""
    return TokenLoss(torch.where(mask, -logprobs * advantages - 0.1 * logprobs, 0.0), {})


def of_likelihood(logprobs: Tensor, mask: Tensor) -> TokenLoss:
    """A user's loss that takes no advantages at all."""
    return TokenLoss(torch.where(mask, -logprobs, 0.0), {})


@pytest.mark.parametrize("loss", [with_a_bonus, of_likelihood])
def test_a_users_loss_with_a_term_without_the_advantages_is_an_error(loss: Any) -> None:
    options = {**OURS, NODE: {"policy": f"{__name__}:{loss.__name__}"}}
    (error,) = resolve("skyrl", nested(options)).errors
    assert error.key == f"{NODE}.policy" and "has a term without the advantages" in error.problem


FOUND: list[tuple[dict[str, Any], str, str]] = [
    ({**OURS, Key.POLICY: "composer/ppo", Key.ASYNC: True}, "error", "which is not kept then"),
    ({NODE: {"policy": "cispo"}}, "warning", "it has no effect, because"),
    ({**OURS, NODE: {"policy": "gspo", "advantage": "rloo"}}, "warning", f"set {Key.ESTIMATOR}=composer, or"),
    ({**OURS, NODE: {"policy": "gspo", "on_bad_reward": "zero"}}, "warning", "which is not ours"),
    ({**OURS, Key.POLICY: "composer/dppo_tv", Key.LOGPROBS: None}, "error", "compares with the rollout"),
    ({**OURS, Key.ESTIMATOR: "composer/reinforce_pp", Key.STEP_WISE: True}, "error", "an advantage for each"),
    ({Key.POLICY: "composer/cispo"}, "warning", "which SkyRL does not know by itself"),
    ({Key.POLICY: "my_loss"}, "warning", "unless your entry point registers it"),
    ({**OURS, NODE: {"policy": "sapo"}}, "warning", "is reduced by 'seq-mean-token-mean'"),
]  # fmt: skip


@pytest.mark.parametrize("options, severity, text", FOUND)
def test_the_doctor_finds(options: dict[str, Any], severity: str, text: str) -> None:
    found = resolve("skyrl", nested({Key.POLICY: "regular"} | options), "0.4").findings
    assert [one for one in found if one.severity == severity and text in f"{one.problem}; {one.remedy}"], (
        found
    )


@pytest.mark.parametrize(
    "options",
    [
        {Key.POLICY: "regular"},
        {Key.POLICY: "dual_clip", f"{ALGORITHM}.clip_ratio_c": 10.0},
        {Key.POLICY: "sapo", Key.REDUCTION: "sequence_mean"},
        {Key.POLICY: "rollout_is", Key.ASYNC: True},
        {Key.POLICY: "cispo", Key.ANCHOR: "rollout", Key.ASYNC: True},
        {Key.ESTIMATOR: "composer", Key.ENTRYPOINT: skyrl.ENTRYPOINT, NODE: {"advantage": "rloo"}},
        {Key.ESTIMATOR: "gae"},
        {**OURS, NODE: {"policy": "cispo"}},
        {Key.REDUCTION: "prompt_mean"},
        {Key.USE_ENTROPY: True},
    ],
)
def test_the_doctor_finds_nothing_in_what_is_right(options: dict[str, Any]) -> None:
    assert resolve("skyrl", nested({Key.POLICY: "regular"} | options), "0.4").findings == []


def test_the_doctor_reads_the_words_of_a_launch_script() -> None:
    options = [f"{Key.POLICY}=composer/cispo", "trainer.seed=3", f"{NODE}.hint_weight=0.1"]
    done = CliRunner().invoke(app, ["doctor", "--framework", "skyrl", "--", *options])
    said = " ".join(done.output.split())
    assert done.exit_code == 1 and f"error: {NODE}.hint_weight" in said
    assert "against the options of SkyRL 0.4; not looked at: trainer.seed" in said


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_a_loss_on_divided_advantages_goes_nowhere_else(loss: str) -> None:
    objective = read({Key.POLICY: loss})
    for target in ("verl", "prime-rl"):
        with pytest.raises(ConfigError, match="a statistic of the whole batch"):
            migrate(objective, target)


def verl(**options: Any) -> Objective:
    start = {f"{ACTOR}.policy_loss.loss_mode": "vanilla", "algorithm.adv_estimator": "grpo"}
    return resolve("verl", nested(start | {"actor_rollout_ref.rollout.n": 8} | options)).required()


@pytest.mark.parametrize(
    "mode, theirs",
    [("vanilla", "dual_clip"), ("gspo", "gspo"), ("sapo", "sapo"), ("cispo", "cispo"), ("gpg", "composer"),
     ("geo_mean", "composer")],
)  # fmt: skip
def test_verls_loss_is_skyrls_own_where_that_is_the_same(mode: str, theirs: str) -> None:
    found = migrate(verl(**{f"{ACTOR}.policy_loss.loss_mode": mode}), "skyrl", "0.4")
    assert not found.differences
    assert found.table["trainer"]["algorithm"]["policy_loss_type"] == theirs


def test_what_skyrl_cannot_do_is_named_or_refused() -> None:
    named = {
        f"{ACTOR}.use_kl_loss": "KL.denominator: token-mean -> seq-mean-token-mean",
        f"{ACTOR}.entropy_coeff": "entropy bonus.denominator: token-mean -> the tokens of a micro-batch",
        f"{ACTOR}.loss_agg_mode": "denominator: token-sum -> token-mean",
    }
    values: dict[str, Any] = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.entropy_coeff": 0.01}
    for key, text in named.items():
        found = migrate(verl(**{key: values.get(key, "token-sum")}), "skyrl")
        assert [str(one) for one in found.differences if text in str(one)], key
    dro = verl(**{f"{ACTOR}.policy_loss.loss_mode": "dro", f"{ACTOR}.policy_loss.dro_beta": 0.1})
    with pytest.raises(ConfigError, match="has a term without the advantages"):
        migrate(dro, "skyrl")
    prime_rl = resolve("prime-rl", {"trainer": {"loss": {"type": "default"}}}).required()
    with pytest.raises(ConfigError, match="has a term without the advantages"):
        migrate(prime_rl, "skyrl")


def test_a_sum_over_sequences_is_a_norm_of_one_token() -> None:
    found = migrate(verl(**{f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"}), "skyrl")
    assert found.table["trainer"]["algorithm"]["max_seq_len"] == 1 and not found.differences


def test_what_is_written_is_a_command_that_is_read_again() -> None:
    node = {"policy": "cispo@trl", "policy_params": {"clip_low": None, "clip_high": 4.0}, "advantage": "opo"}
    options = {**OURS, Key.ESTIMATOR: "composer", NODE: node, Key.USE_KL: False, Key.GROUP_SIZE: 8}
    found = migrate(read(options), "skyrl")
    assert found.text.startswith("python -m skyrl.train.entrypoints.main_base ")
    again = resolve("skyrl", written(found.text)).required()
    assert again.facts() == read(options).facts()
    assert f"{Key.ENTRYPOINT}={skyrl.ENTRYPOINT}" in found.text


def test_every_option_of_the_table_is_known_to_the_reader() -> None:
    table = nested({one.key: one.default if one.default is not None else "x" for one in SKYRL.options})
    assert resolve("skyrl", table).unread == ()


def test_a_name_of_skyrls_registry_needs_skyrl() -> None:
    with pytest.raises(ConfigError, match="'regular' is looked up in SkyRL's registry, and SkyRL is not"):
        check_as("regular", "skyrl")
