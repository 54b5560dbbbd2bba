"""The catalogue says what the kernels do; these tests hold the two together."""

import math

import pytest

from composer_plugins.catalogue import REQUIRED, Loss, Parameter, choose
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError, unknown
from composer_plugins.plugins import losses
from composer_plugins.rows import check_row
from parity_tests.support.paths import TESTS

LOSSES = losses()
NO_REFERENCE = "no reference obtainable: "


def row_id(loss: Loss) -> str:
    return f"{loss.kind}-{loss.name}"


over_rows = pytest.mark.parametrize("loss", LOSSES, ids=row_id)


@over_rows
def test_a_row_passes_the_check_that_a_plugins_row_must_pass(loss: Loss) -> None:
    check_row(loss)  # its data, its kernel's signature and defaults, its dialects: package/test_rows.py
    for dialect in loss.dialects:
        assert choose(LOSSES, loss.kind, f"{loss.name}@{dialect.upstream}").params == dialect.params


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
    with pytest.raises(ConfigError) as refused:
        ComposerConfig.parse({"replay_loss": "xyz"})
    said, where = str(refused.value).split(" and ")
    assert said.startswith("unknown replay_loss 'xyz'; known: ") and said.count(",") == 7  # the nearest eight
    assert where.endswith("more (composer-plugins list --kind preference shows all)")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Token-Mean", "unknown mode 'Token-Mean': did you mean 'token_mean'?"),
        ("REINFORCE++", "unknown mode 'REINFORCE++': did you mean 'reinforce_pp'?"),
        ("REINFORCE++-b", "unknown mode 'REINFORCE++-b': did you mean 'reinforce_pp_baseline'?"),
        ("dppo", "unknown mode 'dppo': did you mean 'dppo_kl', 'dppo_tv', 'dppo_topk_a' or 'dppo_topk_b'?"),
        ("tokn_mean", "unknown mode 'tokn_mean': did you mean 'token_mean'?"),
        (
            "",
            "mode: no name given; known: dppo_kl, dppo_topk_a, dppo_topk_b, dppo_topk_c, dppo_tv, ",
        ),
    ],
)
def test_a_name_written_otherwise_or_cut_short_is_understood(name: str, message: str) -> None:
    known = ["reinforce_pp", "token_mean", "dppo_topk_c", "dppo_topk_b", "dppo_topk_a", "dppo_tv", "dppo_kl"]
    assert str(unknown("mode", name, [*known, "reinforce_pp_baseline"])).startswith(message)


def test_a_loss_of_another_kind_is_told_from_one_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match="^hint_divergence 'dpo' is a preference loss, not a divergence$"):
        ComposerConfig.parse({"hint_divergence": "dpo"})
    with pytest.raises(ConfigError, match="^'jsd' is a divergence, not a policy loss$"):
        ComposerConfig.parse({"policy": "jsd"})


def test_an_open_bound_is_written_as_one() -> None:
    with pytest.raises(ConfigError, match=r"beta is 0; wanted a finite number in \(0, inf\)$"):
        Parameter(0.1, "", low=math.ulp(0.0)).check("beta", 0)


def test_a_value_of_the_wrong_type_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^hint_weight is 'much': input should be a valid number"):
        ComposerConfig.parse({"hint_weight": "much"})
