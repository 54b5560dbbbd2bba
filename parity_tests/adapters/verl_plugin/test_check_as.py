"""`check --as verl` with verl's own config."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from composer_plugins.adapters.verl_plugin.convention import REQUIRED, Table, actor_config
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.verl import MODES, OPTIONS
from composer_plugins.testing.conventions import check_as
from docs.generator.written import part
from parity_tests.rigs.verl_wheels import INSTALLED, start, wheel

CUT = "micro_batches_and_ranks_leave_the_gradient_alone"
RANDOM = {"rows_may_come_in_any_order", "two_calls_give_the_same_result"}
# The laws that verl's own losses break with ordinary inputs; docs/writing_a_loss.md has the lines of verl.
WRONG = {"clip_cov": {CUT, *RANDOM}, "kl_cov": {CUT}, "geo_mean": {CUT}}
OF_080 = ("gspo", "clip_cov", "geo_mean")  # two with other lines than 0.9.1's, and one that is wrong
OF_THE_WHEEL = """
import json, sys, warnings
warnings.simplefilter("ignore")
from composer_plugins.testing.conventions import check_as
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
own = [name for name, one in POLICY_LOSS_REGISTRY.items() if one.__module__.startswith("verl.")]
own = [name for name in own if name in sys.argv[1:] or not sys.argv[1:]]
reports = {name: check_as(name, "verl") for name in own}
print(json.dumps({n: [x.subject, *(y.check for y in x.having("failed"))] for n, x in reports.items()}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("version", "names"), [("0.8.0", OF_080), (INSTALLED, ())])
def test_verls_own_losses_have_no_false_alarm(version: str, names: tuple[str, ...]) -> None:
    done = start(["-c", OF_THE_WHEEL, *names], wheel(version))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == (len(names) or 12)
    for name, (subject, *failed) in found.items():
        assert f"as verl {version} calls it" in subject and {*failed} == WRONG.get(name, set()), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # in some modes, that another one belongs to the loss
# Not grpo: verl's adapter warns of it once in a process, and test_mistakes.py expects that warning.
@pytest.mark.parametrize("name", ["dapo", "cispo", "dppo_tv"])
def test_our_own_losses_in_verl_obey_every_law(name: str) -> None:
    report = check_as(f"composer/{name}", "verl")
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda config: getattr(config, "clip_ratio_hgih", 0.2), "clip_ratio_hgih, which verl does not"),
        (lambda config: config.get("clip_ratio_hgih", 0.2), "did you mean 'config.clip_ratio_high'?"),
        (lambda config: config.policy_loss.get("clip_ratio_high"), "did you mean 'config.clip_ratio_high'?"),
        (lambda config: getattr(config, "dro_beta", 0.1), "did you mean 'config.policy_loss.dro_beta'?"),
    ],
)
def test_an_option_that_is_read_by_a_misspelt_name_is_named(read: Callable[[Any], Any], words: str) -> None:
    def function(*given: Any, config: Any, **named: Any) -> Any:
        read(config)
        return POLICY_LOSS_REGISTRY["vanilla"](*given, config=config, **named)

    (outcome,) = check_as(function, "verl", ["every_parameter_has_an_effect"]).outcomes
    assert outcome.status == "failed" and words in outcome.detail


def test_an_option_of_verl_that_does_not_exist_is_an_error_with_the_nearest() -> None:
    (outcome, *_) = check_as(lambda *_, config, **__: config.clip_ratio_hgih, "verl").outcomes
    assert "AttributeError: verl's config has no 'clip_ratio_hgih': did you mean" in outcome.detail


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="vanilla"):
        check_as("vanila", "verl")


def test_the_table_without_verl_has_the_values_of_verls_config(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = actor_config({"dp_size": 1})
    monkeypatch.setattr("composer_plugins.adapters.verl_plugin.convention.find_spec", lambda name: None)
    ours = actor_config({"dp_size": 1})
    assert isinstance(ours, Table)
    for option in (one for one in OPTIONS if one.kind == "policy" and not one.effect):
        *tables, name = option.key.split(".")
        place, there = ours, theirs
        for one in tables:
            place, there = place[one], getattr(there, one)
        assert getattr(place, name) == place.get(name) == getattr(there, name, option.default), option.key
    assert ours.global_batch_info == {"dp_size": 1}
    assert actor_config(loss_agg_mode=MODES[1], dro_beta=0.1).policy_loss.dro_beta == 0.1
    assert set(REQUIRED) <= {function.__name__ for function in POLICY_LOSS_REGISTRY.values()}
    with pytest.raises(AttributeError, match="my_key"):
        _ = ours.my_key


@pytest.mark.slow
def test_the_page_is_what_a_new_run_finds() -> None:
    part("docs/writing_a_loss.md", "verl").check()
