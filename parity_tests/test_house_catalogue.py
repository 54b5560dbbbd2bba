"""The catalogue says what the kernels do; these tests hold the two together."""

import inspect
from pathlib import Path

import pytest

from composer_plugins.catalogue import REQUIRED, Loss, Parameter, choose
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError
from composer_plugins.inputs import INPUTS
from composer_plugins.plugins import losses

LOSSES = losses()
NO_REFERENCE = "no reference obtainable: "


def row_id(loss: Loss) -> str:
    return f"{loss.kind}-{loss.name}"


over_rows = pytest.mark.parametrize("loss", LOSSES, ids=row_id)


def default(parameter: inspect.Parameter) -> object:
    return REQUIRED if parameter.default is inspect.Parameter.empty else parameter.default


@over_rows
def test_a_row_has_the_parameters_and_defaults_of_its_kernel(loss: Loss) -> None:
    signature = inspect.signature(loss.kernel()).parameters.values()
    takes = {p.name: default(p) for p in signature if p.name not in {*loss.needs, *loss.optional}}
    assert {name: p.default for name, p in loss.parameters.items()} == takes


@over_rows
def test_a_row_names_the_inputs_its_kernel_takes_in_order(loss: Loss) -> None:
    signature = inspect.signature(loss.kernel()).parameters
    assert [name for name in signature if name in loss.needs] == list(loss.needs)
    assert {*loss.needs, *loss.optional} <= set(INPUTS)
    for name in loss.optional:
        assert signature[name].default is None


@over_rows
def test_the_defaults_and_the_dialects_of_a_row_pass_its_own_check(loss: Loss) -> None:
    defaults = {name: p.default for name, p in loss.parameters.items() if p.default is not REQUIRED}
    assert loss.check(defaults) == defaults
    for dialect in loss.dialects:
        assert loss.check(dialect.params) == dialect.params
        assert choose(LOSSES, loss.kind, f"{loss.name}@{dialect.upstream}").params == dialect.params


PROOFS = Path(__file__).parent


@over_rows
def test_a_row_and_its_dialects_name_a_test_that_exists_and_calls_them(loss: Loss) -> None:
    proofs = [(loss.proof, loss.path.partition(":")[2])]
    proofs += [(dialect.proof, f"@{dialect.upstream}") for dialect in loss.dialects]
    for proof, mentioned in proofs:
        if proof.startswith(NO_REFERENCE):
            assert len(proof) > len(NO_REFERENCE) + 10  # the reason
            continue
        file, _, name = proof.partition("::")
        source = (PROOFS / file).read_text()
        assert f"def {name}(" in source, f"{proof} is no test"
        assert mentioned in source, f"{proof} is in a file that never mentions {mentioned}"


@over_rows
def test_what_has_no_default_has_an_example(loss: Loss) -> None:
    for name, parameter in loss.parameters.items():
        if parameter.default is REQUIRED:
            parameter.check(name, parameter.example)
            assert parameter.example is not None


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("0.2", "a string"),
        (True, "a bool"),
        (float("nan"), "not a number"),
        (-0.1, "below the range"),
        (1.1, "above the range"),
        (None, "None, where a number is the default"),
    ],
)
def test_a_value_the_kernel_cannot_take_is_refused(value: object, why: str) -> None:
    with pytest.raises(ConfigError, match="wanted a finite number"):
        Parameter(0.2, "a clip", low=0, high=1).check("clip_low", value)


def test_the_frameworks_own_policy_is_only_known_where_it_is_offered() -> None:
    assert ComposerConfig.parse({"policy": "trl"}, untouched="trl").policy == "trl"
    with pytest.raises(ConfigError, match="unknown policy 'trl'"):
        ComposerConfig.parse({"policy": "trl"})


def test_an_unknown_name_without_a_near_match_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match="unknown replay_loss 'xyz'; known: alpha_po, aot, .*simpo"):
        ComposerConfig.parse({"replay_loss": "xyz"})


def test_a_value_of_the_wrong_type_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^hint_weight is 'much': input should be a valid number"):
        ComposerConfig.parse({"hint_weight": "much"})
