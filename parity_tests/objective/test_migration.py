"""`composer-plugins migrate` between verl and PRIME-RL, which needs neither, and what every target shares."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from composer_plugins import cli
from composer_plugins.adapters.prime_rl_plugin import own_losses
from composer_plugins.adapters.prime_rl_plugin.surface import MODULE, parse
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.prime_rl import TESTED
from composer_plugins.objective.objective import of_choice
from composer_plugins.objective.resolve import migrate, resolve

GRPO = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}


def verl(algorithm: dict[str, Any] | None = None, **actor: Any) -> dict[str, Any]:
    """A config of verl's; with advantages that PRIME-RL has, unless `algorithm` says otherwise."""
    return {
        "algorithm": GRPO | (algorithm or {}),
        "actor_rollout_ref": {"actor": actor, "rollout": {"n": 8}},
    }


def prime_rl(**loss: Any) -> dict[str, Any]:
    return {"trainer": {"loss": {"type": "default"} | loss}}


def differences(source: str, table: dict[str, Any], target: str) -> list[str]:
    return [str(one) for one in migrate(resolve(source, table).required(), target).differences]


def test_verls_options_become_parameters_under_their_names_here() -> None:
    table = verl(clip_ratio_high=0.3, clip_ratio_c=10.0)
    found = migrate(resolve("verl", table).required(), "prime-rl")
    kwargs = found.table["trainer"]["loss"]["kwargs"]
    assert kwargs["policy"] == "grpo@verl"
    assert kwargs["policy_params"] == {"clip_high": 0.3, "dual_clip": 10.0}
    assert found.table["orchestrator"] == {"group_size": 8}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (verl(), ["old_logprobs: trainer -> rollout engine"]),
        (
            verl(loss_agg_mode="seq-mean-token-mean", policy_loss={"loss_mode": "gpg"}),
            ["denominator: seq-mean-token-mean -> token-mean"],
        ),
        (
            verl(
                loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=8, policy_loss={"loss_mode": "gpg"}
            ),
            ["denominator: seq-mean-token-sum-norm (max_length 8) -> token-mean"],
        ),
        # sapo's mode is one in verl, whatever is set
        (
            verl(policy_loss={"loss_mode": "sapo"}),
            [
                "denominator: seq-mean-token-mean -> token-mean",
                "old_logprobs: trainer -> rollout engine",
            ],
        ),
        (
            verl({"norm_adv_by_std_in_grpo": True}, policy_loss={"loss_mode": "gpg"}),
            ["advantage: grpo (scale group, ddof 1, eps 1e-06) -> dr_grpo"],
        ),
        (
            verl({"adv_estimator": "gae"}, policy_loss={"loss_mode": "gpg"}),
            [
                "advantage: not one of the catalogue's -> dr_grpo",
                "not carried over: algorithm.adv_estimator = 'gae', which needs more than a group's rewards",
            ],
        ),
        (
            verl(policy_loss={"loss_mode": "gpg"}, use_kl_loss=True, kl_loss_coef=0.01),
            [
                "KL: k3 (log_ratio_clamp 20, value_clamp 10, weight 0.01, place loss, denominator token-mean)"
                " -> none"
            ],
        ),
        (
            verl({"use_kl_in_reward": True}, policy_loss={"loss_mode": "gpg"}),
            ["KL: k1 (weight 0.001, place reward) -> none"],
        ),
        (
            verl(policy_loss={"loss_mode": "gpg"}, entropy_coeff=0.1),
            ["entropy bonus: 0.1 (denominator token-mean) -> 0"],
        ),
        # PRIME-RL's weight has no clamp
        (
            verl({"rollout_correction": {"rollout_is": "token"}}, policy_loss={"loss_mode": "gpg"}),
            [],
        ),
        (
            verl({"rollout_correction": {"rollout_rs": "token_k1"}}, policy_loss={"loss_mode": "gpg"}),
            ["not carried over: algorithm.rollout_correction.rollout_rs = 'token_k1'"],
        ),
    ],
)
def test_what_prime_rl_cannot_do_is_listed(table: dict[str, Any], expected: list[str]) -> None:
    assert differences("verl", table, "prime-rl") == expected


def everything_of_verl() -> dict[str, Any]:
    """A config in which every property has another value than verl's default."""
    correction = {"rollout_is": "sequence", "rollout_is_threshold": "0.5_3.0"}
    table = verl({"rollout_correction": correction | {"rollout_is_batch_normalize": True}})
    table["actor_rollout_ref"]["actor"] |= {"clip_ratio_high": 0.3, "entropy_coeff": 0.01}
    table["actor_rollout_ref"]["actor"] |= {"use_kl_loss": True, "kl_loss_coef": 0.02, "kl_loss_type": "k3+"}
    table["actor_rollout_ref"]["actor"] |= {
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "loss_scale_factor": 9,
    }
    table["actor_rollout_ref"]["rollout"]["temperature"] = 0.7
    return table


def everything_of_prime_rl() -> dict[str, Any]:
    kwargs = {"policy": "reinforce", "rollout_correction": "tis", "rollout_correction_params": {"cap": 3.0}}
    table = prime_rl(type="custom", import_path=f"{MODULE}.loss_fn", kwargs=kwargs)
    sampling = {"temperature": 0.7}
    return table | {
        "orchestrator": {"algo": {"type": "max_rl"}, "group_size": 4, "train": {"sampling": sampling}}
    }


@pytest.mark.parametrize(
    ("framework", "table"), [("verl", everything_of_verl()), ("prime-rl", everything_of_prime_rl())]
)
def test_a_config_with_everything_set_is_written_whole(framework: str, table: dict[str, Any]) -> None:
    objective = resolve(framework, table).required()
    plain = resolve(framework, verl() if framework == "verl" else prime_rl()).required()
    changed = {what for what, value in objective.facts().items() if plain.facts().get(what) != value}
    assert {"temperature", "rollout correction", "rollout correction.log_ratio_clamp"} & changed
    assert objective.temperature == 0.7 and objective.correction is not None
    found = migrate(objective, framework)
    assert found.differences == ()
    assert resolve(framework, found.table).required().group_size == objective.group_size
    if framework == "verl":
        assert objective.entropy == 0.01 and objective.length == 9
        assert objective.correction.value("normalise") is True
        assert objective.kl is not None and objective.kl.estimator.loss.name == "k3_plus"
    else:
        assert objective.advantage is not None and objective.advantage.loss.name == "maxrl"


def test_a_ratio_to_the_policy_itself_stays_one() -> None:
    kwargs = {"policy": "grpo", "old_policy": "current"}
    table = prime_rl(type="custom", import_path=f"{MODULE}.loss_fn", kwargs=kwargs)
    assert differences("prime-rl", table, "prime-rl") == []
    assert differences("prime-rl", table, "verl") == ["old_logprobs: policy itself -> trainer"]


def test_what_prime_rl_reads_beside_the_loss_is_not_lost() -> None:
    table = prime_rl() | {"orchestrator": {"algo": {"length_penalty": {"alpha": 0.1}}}}
    assert resolve("prime-rl", table).required().remarks == ("orchestrator.algo.length_penalty",)
    by_sequence = resolve("prime-rl", prime_rl(ratio_type="sequence"), "0.4.0").required().remarks
    assert "0.4 divides the loss of each sequence by its number of tokens" in by_sequence


def test_a_bypassed_correction_of_verls_is_none() -> None:
    correction = {"rollout_is": "token", "bypass_mode": True}
    objective = resolve("verl", verl({"rollout_correction": correction})).required()
    assert objective.correction is None and objective.old == "rollout engine"


def test_geo_mean_is_a_mean_over_rows_whatever_is_set() -> None:
    objective = resolve("verl", verl(policy_loss={"loss_mode": "geo_mean"})).required()
    assert objective.mode == "seq-mean-token-mean"
    written = migrate(objective, "verl").table
    assert written["actor_rollout_ref"]["actor"]["loss_agg_mode"] == "seq-mean-token-mean"
    corrected = verl({"rollout_correction": {"rollout_is": "token"}}, policy_loss={"loss_mode": "geo_mean"})
    assert [one for one in resolve("verl", corrected).required().remarks if "geometric mean" in one]


def test_gmpo_of_verl_is_a_mean_over_rows_in_composer_too() -> None:
    table = verl({"composer": {"policy": "gmpo@verl"}}, policy_loss={"loss_mode": "composer"})
    assert resolve("verl", table).required().mode == "seq-mean-token-mean"


def test_sapos_forced_mode_is_not_the_denominator_of_verls_kl() -> None:
    table = verl(policy_loss={"loss_mode": "sapo"}, use_kl_loss=True)
    assert resolve("verl", table).required().facts()["KL.denominator"] == "token-mean"
    assert differences("verl", table, "verl") == []


@pytest.mark.parametrize(
    ("table", "key"),
    [
        (verl() | {"distillation": {"enabled": True}}, "distillation.enabled"),
        (verl({"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive"}}), "algorithm.kl_ctrl.type"),
        (verl({"filter_groups": {"enable": True}}), "algorithm.filter_groups.enable"),
        (verl({"rollout_is": True}), "algorithm.rollout_is"),
        (verl(tis_imp_ratio_cap=2.0), "actor_rollout_ref.actor.tis_imp_ratio_cap"),
        (verl() | {"defaults": ["my_base", "_self_"]}, "defaults: 'my_base'"),
    ],
)
def test_what_verl_reads_beside_the_loss_is_not_lost(table: dict[str, Any], key: str) -> None:
    assert any(one.startswith(f"not carried over: {key}") for one in differences("verl", table, "verl"))


def test_a_kl_in_the_loss_with_weight_0_is_none() -> None:
    table = verl({"use_kl_in_reward": True}, use_kl_loss=True, kl_loss_coef=0.0)
    assert differences("verl", table, "verl") == []


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (verl(use_kl_loss="${x}"), "actor.use_kl_loss: .*interpolation"),
        (verl(use_kl_loss="False"), "actor.use_kl_loss: it is 'False'; set true or false"),
        (verl(entropy_coeff="${x}"), "actor.entropy_coeff: .*interpolation"),
        (verl(loss_agg_mode="foo"), "actor.loss_agg_mode: unknown mode 'foo'"),
        (verl(loss_scale_factor="abc", loss_agg_mode="seq-mean-token-sum-norm"), "loss_scale_factor: it is"),
        (verl(policy_loss="gspo"), "actor.policy_loss: it is 'gspo'; write a table"),
        ({"algorithm": "foo"}, "algorithm: it is 'foo'"),
        ({"algorithm.adv_estimator": "grpo"}, "algorithm.adv_estimator: a file has no dotted keys"),
        (
            verl({"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": "abc"}}),
            "algorithm.rollout_correction.rollout_is_threshold: it is 'abc'; set a number, or a band",
        ),
    ],
)
def test_a_value_that_verl_would_not_take_is_one_error(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("verl", table).required()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (prime_rl(dppo_mask_hihg=0.5), "trainer.loss.dppo_mask_hihg: 'default' has no such option"),
        (prime_rl(token_mask_low=0.5), "trainer.loss.token_mask_low: .* --version"),
        (prime_rl() | {"orchestrator": {"group_size": "8"}}, "orchestrator.group_size: it is '8'"),
        (
            prime_rl(type="custom", import_path="my.loss"),
            "trainer.loss.import_path: 'my.loss' is not a function",
        ),
        (prime_rl(type="cispoo"), "trainer.loss.type: 'cispoo' is not a loss"),
        ({"trainer": 5}, "trainer: it is 5; write a table"),
    ],
)
def test_a_value_that_prime_rl_would_not_take_is_one_error(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("prime-rl", table).required()


@pytest.mark.parametrize(
    ("loss", "policy", "params"),
    [
        ({}, "dppo_tv@prime-rl", {}),
        ({"dppo_mask_high": 0.3, "kl_tau": 0.0}, "dppo_tv@prime-rl", {"tv_high": 0.3, "kl_tau": 0.0}),
        ({"type": "ipo", "ipo_threshold": 0.2}, "ipo@prime-rl", {"tv_low": 0.2, "tv_high": 0.2}),
    ],
)
def test_the_deleted_default_of_prime_rl_runs_here(
    loss: dict[str, Any], policy: str, params: dict[str, float]
) -> None:
    found = migrate(resolve("prime-rl", prime_rl(**loss)).required(), "prime-rl")
    written = tomllib.loads(found.text)["trainer"]["loss"]
    assert found.differences == ()
    assert written["type"] == "custom" and written["import_path"].endswith("prime_rl_plugin.loss_fn")
    assert written["kwargs"].get("policy_params", {}) == params
    assert parse(written["kwargs"]).policy.name == policy


@pytest.mark.parametrize("kind", ["default", "ipo"])
def test_every_option_of_prime_rls_losses_changes_the_objective(kind: str) -> None:
    own = own_losses.find(kind, TESTED)
    assert own is not None
    before = resolve("prime-rl", prime_rl(type=kind)).required().facts()
    for option in own.own:
        value = 0.05 if option.default != 0.05 else 0.1
        after = resolve("prime-rl", prime_rl(type=kind, **{option.key: value})).required().facts()
        assert after != before, option.key


def test_an_older_prime_rl_divides_by_something_else() -> None:
    objective = resolve("prime-rl", prime_rl(), "0.5.0").required()
    assert [one for one in objective.remarks if one.startswith("PRIME-RL 0.5 divides by")]


def test_the_hint_and_the_replay_are_carried_as_far_as_the_target_has_them() -> None:
    node = {"policy": "grpo@verl", "hint_weight": 0.5, "hint_divergence": "jsd", "hint_top_k": 16}
    node |= {"replay_weight": 0.1, "replay_loss": "simpo"}
    table = verl({"adv_estimator": "composer", "composer": node}, policy_loss={"loss_mode": "composer"})
    table["algorithm"].pop("norm_adv_by_std_in_grpo")
    assert differences("verl", table, "verl") == []
    with pytest.raises(ConfigError, match=r"'jsd' needs student_logits.* which prime-rl does not provide"):
        migrate(resolve("verl", table).required(), "prime-rl")
    node |= {"hint_divergence": "sampled_token"}
    del node["hint_top_k"]
    found = differences("verl", table, "prime-rl")
    assert "replay_loss: simpo -> none" in found or "replay_loss: simpo -> dpo" in found
    assert any(one.startswith("not carried over: the hint's teacher") for one in found)


def test_a_channel_with_a_reference_gets_one_in_verl() -> None:
    kwargs = {"policy": "reinforce", "hint_weight": 0.1}
    table = prime_rl(type="custom", import_path=f"{MODULE}.loss_fn", kwargs=kwargs)
    found = migrate(resolve("prime-rl", table).required(), "verl")
    actor = found.table["actor_rollout_ref"]["actor"]
    assert actor["use_kl_loss"] is True and actor["kl_loss_coef"] == 0.0
    assert found.table["trainer"] == {"v1": {"trainer_mode": "composer_sync"}}
    assert not any("KL" in one.what for one in found.differences)


def test_a_bare_loss_is_compared_only_in_what_it_says() -> None:
    from composer_plugins.losses.choosing import choose

    objective = of_choice(choose("policy", "gpg@verl"))
    assert migrate(objective, "prime-rl").differences == ()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The command in this process: its status, stdout and stderr."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["composer-plugins", "migrate", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (int(stop.value.code or 0), *capsys.readouterr())

    return command


def test_the_command_prints_a_config_that_its_reader_reads(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[trainer.loss]\ntype = "ipo"\n[orchestrator]\ngroup_size = 4\n')
    status, out, err = run("--from", "prime-rl", "--to", "verl", str(file))
    assert (status, err) == (0, "")
    assert out.startswith(f"# The loss of {file} of prime-rl, for verl.") and "# Nothing differs." in out
    again = tmp_path / "b.yaml"
    again.write_text(out)
    assert yaml.safe_load(out)["actor_rollout_ref"]["rollout"]["n"] == 4
    status, out, _ = run("--from", "verl", "--to", "prime-rl", str(again))
    assert status == 0 and tomllib.loads(out)["trainer"]["loss"]["kwargs"] == {"policy": "ipo@prime-rl"}


def test_the_status_says_whether_something_differs(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    # YAML 1.1 reads 1e-3 as a string, and verl's own parser as a number.
    actor = "{use_kl_loss: true, kl_loss_coef: 1e-3}"
    file.write_text(f"algorithm: {{adv_estimator: grpo}}\nactor_rollout_ref: {{actor: {actor}}}\n")
    status, out, _ = run("--from", "verl", "--to", "prime-rl", str(file))
    assert status == 1
    assert "#   KL: k3 (log_ratio_clamp 20, value_clamp 10, weight 0.001, place loss, denominator " in out


@pytest.mark.parametrize(
    ("framework", "table", "key"),
    [
        ("verl", verl(clip_ratio_hihg=0.28), "actor_rollout_ref.actor.clip_ratio_hihg"),
        ("verl", verl({"norm_adv_by_sdt": False}), "algorithm.norm_adv_by_sdt"),
        ("verl", verl(policy_loss={"los_mode": "gspo"}), "actor_rollout_ref.actor.policy_loss.los_mode"),
        ("prime-rl", prime_rl() | {"orchestrator": {"groupsize": 4}}, "orchestrator.groupsize"),
        ("verl", verl() | {"algoritm": {"adv_estimator": "rloo"}, "algorithm": None}, "algoritm"),
        ("verl", {"actor_rollout_ref": {"rolout": {"n": 8}}}, "actor_rollout_ref.rolout"),
        ("prime-rl", {"trainer": {"los": {"type": "ipo"}}}, "trainer.los"),
    ],
)
def test_a_key_that_was_not_read_is_named(framework: str, table: dict[str, Any], key: str) -> None:
    assert resolve(framework, table).unread == (key,)
    assert resolve(framework, verl() if framework == "verl" else prime_rl()).unread == ()


def test_a_bare_loss_by_the_command(run: Any) -> None:
    status, out, _ = run("--loss", "grpo@verl", "--to", "prime-rl")
    assert status == 1 and "# 1 of its properties differs:" in out
    assert 'policy = "grpo@verl"' in out and 'old_policy = "rollout"' in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["FILE, --loss", "neither is given"]),
        (("--loss", "grpo", "x.yaml", "--to", "verl"), ["both are given"]),
        (("--loss", "grpoo", "--to", "verl"), ["--loss", "did you mean 'grpo'"]),
        (("--loss", "grpo", "--to", "verll"), ["--to", "did you mean 'verl'"]),
        (("--loss", "kimi", "--to", "verl"), ["--loss", "no default", "give a config file"]),
        (("--loss", "clip_cov", "--to", "verl"), ["clip_cov", "micro-batches"]),
        (("no.yaml", "--from", "verl", "--to", "trl"), ["no.yaml", "No such file"]),
        (("no.yaml", "--to", "trl"), ["--from", "no framework is given"]),
    ],
)
def test_what_cannot_be_migrated_is_one_error(run: Any, arguments: tuple[str, ...], words: list[str]) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and all(word in err for word in words)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "a: [1"),
        ("a.toml", "a = "),
        ("a.yaml", "just words"),
        ("a.yaml", "algorithm: {composer: 3}"),
    ],
)
def test_a_file_that_is_no_config_is_one_error(run: Any, tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    status, out, err = run("--from", "verl" if "yaml" in name else "prime-rl", "--to", "verl", str(file))
    assert (status, out) == (2, "") and err.startswith("error: ")
