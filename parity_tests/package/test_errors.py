"""Errors and findings: a key, a problem and a remedy, the same for a doctor, a trainer and a test."""

import pickle
import warnings

import pytest

from composer_plugins.errors import ComposerWarning, ConfigError, DataError, Finding, enforce, unknown

ERROR = ConfigError("policy", "it is 3", "set a name")


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_an_error_survives_pickling_and_can_be_put_under_a_prefix(kind: type[ConfigError]) -> None:
    error = kind("row 3", "it is empty", "remove it")
    sent = pickle.loads(pickle.dumps(error))  # as Ray sends it from a worker
    assert type(sent) is kind and str(sent) == "row 3: it is empty; remove it"
    below = error.under("train_dataset", ", ")
    assert type(below) is kind and str(below) == "train_dataset, row 3: it is empty; remove it"
    assert error.under("algorithm.composer").key == "algorithm.composer.row 3"


def test_enforce_raises_every_error_at_once_and_warns_of_each_warning_before() -> None:
    first = Finding.from_error(ERROR)
    remark, warning = (first._replace(severity=severity) for severity in ("info", "warning"))
    later = first._replace(key="hint_weight")
    with pytest.warns(ComposerWarning) as warned, pytest.raises(ConfigError) as refused:
        enforce([remark, warning, first, warning, later])
    assert [str(one.message) for one in warned] == [str(ERROR)]
    assert str(refused.value).splitlines() == [str(ERROR), str(later)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enforce([remark])


KNOWN = ["reinforce_pp", "reinforce_pp_baseline", "token_mean", "dppo_kl", "dppo_tv"]
KNOWN += ["dppo_topk_a", "dppo_topk_b", "dppo_topk_c"]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("Token-Mean", "did you mean 'token_mean'?"),
        ("REINFORCE++", "did you mean 'reinforce_pp'?"),
        ("REINFORCE++-b", "did you mean 'reinforce_pp_baseline'?"),
        ("dppo", "did you mean 'dppo_kl', 'dppo_tv', 'dppo_topk_a' or 'dppo_topk_b'?"),
        ("tokn_mean", "did you mean 'token_mean'?"),
        ("xyz", f"known: {', '.join(sorted(KNOWN))} (and more there)"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_or_with_all(name: str, remedy: str) -> None:
    error = unknown("loss_agg_mode", name, KNOWN, noun="mode", more="and more there")
    assert (error.key, error.problem, error.remedy) == ("loss_agg_mode", f"unknown mode {name!r}", remedy)


def test_no_name_at_all_is_answered_with_the_known_ones() -> None:
    error = unknown("mode", " ", KNOWN)
    assert error.problem == "no mode is given" and error.remedy.startswith("known: dppo_kl, ")
