"""The rows of the catalogue fit their kernels, and a chosen loss is called as its row says."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from composer_plugins.cli.recorded import examples
from composer_plugins.cli.worked_example import tensors
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError, DataError
from composer_plugins.frameworks.contract import Framework
from composer_plugins.kernels.policy import cispo
from composer_plugins.losses import bundled
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import Choice, choose, of_row
from composer_plugins.losses.derived import check_row
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import REQUIRED, Loss, Parameter
from composer_plugins.testing.settings import settings
from docs.generator.tex import table, tex
from parity_tests.rigs.every import row_id
from parity_tests.rigs.paths import TESTS

LOSSES = losses()
NO_REFERENCE = "no reference obtainable: "

over_rows = pytest.mark.parametrize("loss", LOSSES, ids=row_id)


@over_rows
def test_a_row_passes_the_check_that_a_plugins_row_must_pass(loss: Loss) -> None:
    check_row(loss)  # its data, its kernel's signature and defaults, its dialects: losses/test_rows.py
    assert not loss.advantage or choose("advantage", loss.advantage)
    required = examples(loss)
    for name, example in required.items():
        loss.parameters[name].check(name, example, REQUIRED)
    for dialect in loss.dialects:
        given = {name: value for name, value in required.items() if name not in dialect.params}
        given = {name: value for name, value in given.items() if name not in dialect.denominators}
        choice = choose(loss.kind, f"{loss.name}@{dialect.upstream}", given)
        assert choice.params == {**dialect.params, **given} and choice.optional == dialect.optional


@over_rows
def test_a_row_and_its_dialects_name_a_test_that_exists_and_calls_them(loss: Loss) -> None:
    proofs = [(loss.proof, loss.path.partition(":")[2])]
    proofs += [(dialect.proof, f"@{dialect.upstream}") for dialect in loss.dialects]
    for proof, mentioned in proofs:
        if proof.startswith(NO_REFERENCE):
            assert len(proof) > len(NO_REFERENCE) + 10  # the reason
            continue
        file, _, name = proof.partition("::")
        source = (TESTS / file).read_text()
        assert f"def {name}(" in source, f"{proof} is no test"
        assert mentioned in source, f"{proof} is in a file that never mentions {mentioned}"


# Formulas


NAME = re.compile(r"\\text\{([a-z]+(?:\\_[a-z]+)+)\}")  # of a parameter or an input: it has an underscore


@over_rows
def test_a_loss_has_a_formula_of_its_own_parameters_and_inputs(loss: Loss) -> None:
    displays = tex(loss).strip()
    assert displays
    for line in displays.splitlines():
        assert line.count("{") == line.count("}") and line.count(r"\left") == line.count(r"\right"), line
        assert line.count(r"\begin") == line.count(r"\end"), line
    named = {name.replace(r"\_", "_") for name in NAME.findall(displays)}
    assert named <= {*loss.parameters, *loss.needs, *loss.optional}


def test_the_file_of_formulas_has_no_row_of_a_loss_that_is_gone() -> None:
    listed = (loss for family in bundled.FAMILIES for loss in family.LOSSES)
    rows = {(loss.kind, loss.name) for loss in listed if not loss.tex}  # others have it in their row
    assert {(kind, name) for kind, names in table().items() for name in names if name != "shared"} == rows


# Parameters


CLIP = Parameter("a clip", low=0, high=1)


@pytest.mark.parametrize(
    ("parameter", "right", "wrong", "error"),
    [
        *((CLIP, 1, wrong, f"it is {wrong!r}; set a finite number in [0, 1]")
          for wrong in ("0.2", True, math.nan, math.inf, -0.1, 1.1, None, 10**400)),
        (Parameter("", low=math.ulp(0.0)), math.ulp(0.0), 0, "it is 0; set a finite number in (0, inf)"),
        (Parameter("", low=1, integer=True), 1, 1.5, "it is 1.5; set an integer in [1, inf)"),
        (Parameter("", choices=("low", "high")), "low", "both", "unknown value 'both'; known: high, low"),
        (Parameter("", choices=(True, False)), True, 1, "unknown value '1'; known: False, True"),
    ],
)  # fmt: skip
def test_a_parameter_takes_what_its_row_says(parameter: Any, right: Any, wrong: Any, error: str) -> None:
    parameter.check("policy_params.k", right, 1.0)
    parameter.check("policy_params.k", None, None)  # None, where None is the default
    with pytest.raises(ConfigError) as refused:
        parameter.check("policy_params.k", wrong, 1.0)
    assert str(refused.value) == f"policy_params.k: {error}"


@over_rows
def test_a_kernel_refuses_an_unknown_choice_and_lists_the_known_ones(loss: Loss) -> None:
    setting = next(settings(loss, thorough=False))
    for name, parameter in loss.parameters.items():
        if choices := [one for one in parameter.choices if isinstance(one, str)]:
            with pytest.raises(ValueError, match=f"known: .*{'.*'.join(choices)}"):
                call(setting.choice, setting.draw(), **{name: "unknown"})


# Errors of a config: those of a user's config are in `cases`, and what has none there is here


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"policy": "zzz"}, "policy: unknown policy loss 'zzz'; known: "),
        ({"policy": "trl"}, "policy: 'trl' is an upstream, not a loss; a dialect is written with its "),
        ({"policy": ""}, "policy: no policy loss is given; known: "),
        ({"policy_params": {"clip": 1}}, "policy_params.clip: unknown grpo parameter 'clip'; "),
        ({"policy": "dro"}, "policy_params.beta: 'dro' has no default for it: "),
        ({"policy": "cispo@"}, "policy: no dialect is given; known: cispo@"),
        ({"policy": "jsd"}, "policy: 'jsd' is a divergence, not a policy loss; choose another (composer-"),
        ({"hint_params": {"top_k": 0}}, "hint_params.top_k: it is 0; set an integer in [1, inf)"),
        ({"hint_teacher": "bsae"}, "hint_teacher: unknown value 'bsae'; did you mean 'base'?"),
        ({"rollout_correction": "mis", "rollout_correction_params": {"low": 2.5, "high": 2.0}},
         "rollout_correction_params.low: 2.5 is above high, 2"),
        ({"policy": "ipo", "policy_params": {"adv_tau": 0.0, "kl_tau": 0.0}},
         "policy_params.adv_tau: it is 0, and so is kl_tau: 'ipo' trains nothing; set one of them, or "),
    ],
)  # fmt: skip
def test_a_wrong_option_is_an_error_with_its_key_and_a_remedy(values: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ComposerConfig.parse(values)
    assert str(refused.value).startswith(error)


@pytest.mark.parametrize(
    "values",
    [
        {"policy": "ipo", "policy_params": {"adv_tau": 0.0}},  # kl_tau trains
        {"policy": "masked_is", "policy_params": {"adv_tau": 0.0}, "policy_weight": 0.0, "hint_weight": 1.0},
        {"rollout_correction": "mis", "rollout_correction_params": {"low": 2.0, "high": 2.0}},
    ],
)
def test_an_unusual_config_is_accepted(values: dict[str, Any]) -> None:
    ComposerConfig.parse(values)


def test_options_of_a_channel_without_a_weight_are_found_unless_the_weight_is_given_as_0() -> None:
    options = {"hint_weight": 0.0, "hint_params": {}, "replay_params": {}, "replay_loss": "simpo"}
    config = ComposerConfig.parse(options)
    (found,) = config.without_effect(options)
    assert (
        str(found)
        == "replay_loss: it has no effect, because replay_weight is 0; set replay_weight, or remove it"
    )
    assert not list(config.without_effect({"replay_weight", *options}))
    options = {"hint_weight": 1.0, "hint_estimator": "advantage", "hint_divergence": "sampled_token"}
    assert not list(ComposerConfig.parse(options).without_effect(options))
    config = ComposerConfig.parse({"hint_weight": 1.0, "hint_estimator": "advantage"})
    found = config.without_effect({"hint_weight", "hint_ema_rate", "hint_divergence"})
    assert [one.key for one in found] == ["hint_ema_rate", "hint_divergence"]


def test_a_hint_as_an_advantage_needs_a_policy_that_takes_advantages() -> None:
    hint = {"hint_weight": 1.0, "hint_estimator": "advantage"}
    with pytest.raises(ConfigError) as refused:
        ComposerConfig.parse(hint | {"policy": "iw_opd"})
    assert str(refused.value).startswith(
        "hint_estimator: 'advantage' adds the hint to the advantages, and 'iw_opd' takes none"
    )
    ComposerConfig.parse(hint | {"policy": "gspo_token"})


def test_an_unknown_name_without_a_near_match_lists_eight_of_the_known_ones() -> None:
    with pytest.raises(ConfigError) as refused:
        ComposerConfig.parse({"replay_loss": "xyz"})
    names, rest = refused.value.remedy.split(" and ", 1)
    assert names.count(",") == 7
    assert rest.endswith(
        "more (composer-plugins list --kind preference shows all, and a function of yours is module:function)"
    )


# A chosen loss


def test_a_choice_calls_its_kernel_with_inputs_by_position_and_parameters_by_keyword() -> None:
    choice = choose("policy", "cispo@verl", {"clip_high": 0.4}, option="policy")
    batch = tensors(choice.loss)
    expected = cispo(*batch.values(), clip_low=0.2, clip_high=0.4, log_ratio_clamp=20.0)
    in_any_order = dict(sorted(batch.items())) | {"values": torch.zeros(2, 3)}  # one it does not take
    torch.testing.assert_close(call(choice, in_any_order).loss, expected.loss, rtol=0, atol=0)
    overridden = call(choice, batch, clip_high=0.1).loss
    assert torch.equal(overridden, cispo(*batch.values(), **{**choice.params, "clip_high": 0.1}).loss)
    assert not torch.equal(overridden, expected.loss)


def test_a_choice_passes_only_optional_inputs_that_it_takes_and_the_batch_has() -> None:
    choice = choose("policy", "dppo_tv")
    batch, region = tensors(choice.loss), {"region_logprobs": torch.full((2, 3), math.nan)}
    plain = call(choice, batch).loss
    assert torch.equal(call(choice, batch | region).loss, plain)
    taking = choice.with_optional("region_logprobs", "entropies")  # it has no optional input `entropies`
    assert taking.optional == ("region_logprobs",)
    assert torch.equal(call(taking, batch).loss, plain)
    assert call(taking, batch | region).loss.isnan().any()
    sdpo = choose("divergence", "sdpo").with_optional("old_logprobs").with_optional("student_logprobs")
    assert sdpo.optional == ("old_logprobs", "student_logprobs")


def test_a_choice_checks_its_inputs_only_when_asked() -> None:
    choice = choose("policy", "grpo")
    batch = tensors(choice.loss)
    batch["old_logprobs"] = batch["old_logprobs"].clone()
    batch["old_logprobs"][0, 0] = 0.5
    call(choice, batch)
    with pytest.raises(DataError, match="it holds 0.5 at an unmasked token"):
        call(choice, batch, check=True)


def test_a_choice_has_the_mode_and_the_scores_of_the_paper_or_of_its_dialect() -> None:
    def chosen(loss: Loss, **changes: Any) -> Choice:
        dialect = replace(loss.dialects[0], upstream="acme", **changes)
        return of_row(replace(loss, dialects=(dialect,)), dialect=dialect)

    policy, dpo = choose("policy", "cispo"), choose("preference", "dpo")
    assert (policy.mode, policy.name, dpo.average) == ("token-mean", "cispo", False)
    assert chosen(policy.loss, mode="token-sum").mode == "token-sum"
    assert chosen(policy.loss, mode="").mode == "token-mean"
    averages = [chosen(dpo.loss, average=average).average for average in (True, False, None)]
    assert averages == [True, False, False]


def test_a_choice_knows_the_value_that_each_parameter_will_have() -> None:
    choice = choose("policy", "cispo@trl")
    assert [choice.value(name) for name in ("clip_high", "clip_low", "no_such")] == [-0.8, None, None]
    assert choose("policy", "dapo").value("clip_high") == 0.28  # of a preset


def test_an_estimator_of_a_divergence_without_one_is_an_error_at_the_key_that_was_set() -> None:
    with pytest.raises(ConfigError, match="it is 'k3', and 'jsd' has no estimator") as caught:
        ComposerConfig.parse({"hint_weight": 1.0, "hint_estimator": "k3"})
    assert caught.value.key == "hint_estimator" and not caught.value.others
    beside = {"hint_divergence": "sampled_token", "hint_params": {"value_cap": 10.0}}
    ComposerConfig.parse({"hint_weight": 1.0, "hint_estimator": "k3"} | beside)


# What a framework provides

ACME = Framework(
    name="acme", title="Acme",
    partial_batch={"policy": "Acme cuts it", "correction": "Acme cuts it"},
    refuses={("policy", "dro"): "is another loss in Acme"},
    provides={
        "policy": frozenset({"logprobs", "old_logprobs", "advantages", "mask", "generator"}),
        "correction": frozenset({"old_logprobs", "rollout_logprobs", "mask"}),
    },
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "params", "problem"),
    [
        ("policy", "dppo_tv", {}, "'dppo_tv' needs rollout_logprobs, which acme does not provide (inputs"),
        ("policy", "dro", {"beta": 1.0}, "'dro' is another loss in Acme"),
        ("policy", "clip_cov", {}, "'clip_cov' is a statistic of the whole batch, and Acme cuts it"),
        ("correction", "tis", {"normalise": True}, "'tis' with normalise is a statistic of the whole batch"),
        ("divergence", "jsd", {}, "'jsd' needs student_logits, teacher_logits, mask, which acme does not "
         "provide (inputs here: none)"),
    ],
)  # fmt: skip
def test_a_framework_refuses_a_loss_that_it_cannot_run(
    kind: Any, name: str, params: dict[str, Any], problem: str
) -> None:
    choice = choose(kind, name, params, option="the_option")
    assert ACME.runs(choice.loss) == ("normalise" in params)  # tis, without normalise
    with pytest.raises(ConfigError) as refused:
        ACME.require(choice)
    listed = f"composer-plugins list --framework acme --kind {kind} shows those that run here"
    assert (refused.value.key, refused.value.remedy) == ("the_option", f"choose another: {listed}")
    assert refused.value.problem.startswith(problem)


def test_a_framework_runs_a_loss_whose_inputs_it_has() -> None:
    ACME.require(choose("policy", "grpo", option="policy"))
    ACME.require(choose("correction", "tis", {"normalise": False}, option="rollout_correction"))


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("jsd", {"rest": "tail"}, "hint_params.rest: it has no effect, *top_k is not set; set top_k, or"),
        ("reverse_kl", {"top_k_of": "student"}, "hint_params.top_k_of: *top_k is not set"),
        ("sampled_token", {"value_cap": 10.0}, "hint_params.value_cap: *because estimator is 'score'; set "
         "estimator to 'k3', or remove it"),
        ("sampled_token@verl", {"estimator": "k2", "log_ratio_clamp": 5.0}, "estimator is 'k2'"),
    ],
)  # fmt: skip
def test_a_parameter_that_acts_only_beside_another_one_is_an_error_without_it(
    name: str, params: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose("divergence", name, params, option="hint_divergence")
    assert all(part in str(caught.value) for part in words.split("*")), caught.value
    beside = {"estimator": "k3"} if "sampled" in name else {"top_k": 5}
    choose("divergence", name, params | beside)
    choose("divergence", "jsd", {"rest": "renormalised"})  # its default
