"""The table of PRIME-RL's own losses: it is right, and the messages, the doctor and the docs use it."""

import re
import tomllib
from typing import Any

import pytest

from composer_plugins.adapters.prime_rl_plugin import own_losses
from composer_plugins.adapters.prime_rl_plugin.surface import parse
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.contract import NamedLoss, Option, parameters_of
from composer_plugins.frameworks.prime_rl import LOSSES
from composer_plugins.frameworks.registry import called

OPTIONS = [(own, option) for own in LOSSES for option in own.own]
options = pytest.mark.parametrize(
    ("own", "option"),
    OPTIONS,
    ids=lambda one: one.row if isinstance(one, NamedLoss) else one.key,
)


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
    given = {option.key: option.default + 0.25}
    kwargs = fixed | ({table: fixed.get(table, {}) | given} if table else given)
    has_this_name = parameters_of(option.sets, own_losses.policy(own).loss).keys() == {option.key}
    if has_this_name and table and not policy:
        parse(kwargs)
        return
    with pytest.raises(ConfigError) as error:
        parse(kwargs)
    assert error.value.key.endswith(option.key)
    after = followed(error.value, kwargs)
    if after.get("policy") != (policy or None):  # IPO and DPPO take no old policy
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
