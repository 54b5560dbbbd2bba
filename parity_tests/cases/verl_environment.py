"""What is wrong with an environment of verl, as the doctor's probe would find it: answers, not interpreters.

`adapters/verl_plugin/test_doctor.py` asks real interpreters.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from parity_tests.cases.recorded import Row, findings_in_words
from parity_tests.cases.verl_config import SYNC, VERL, Changes, judged, tree

UNREGISTERED = {"estimators": ["gae", "grpo"], "losses": ["vanilla"], "trainers": ["sync"]}
CONFIG = SYNC | {"actor_rollout_ref.model.external_lib": "lib"}
NOT_COMPOSED: dict[str, Any] = {}
NO_YAML = "ScannerError: mapping values are not allowed here"


class Case(NamedTuple):
    """What a probe answers, where it differs from an environment in which all is well."""

    name: str
    answers: Mapping[str, Any]
    config: Changes = CONFIG


def of_verl(name: str, *, registered: bool = False, **answers: Any) -> Case:
    """Something is wrong with verl, and our names are not in its registries unless `registered`."""
    return Case(name, {"verl": VERL | answers, **({} if registered else UNREGISTERED)})


NO_VERL = of_verl("no verl", registered=True, absent=True, version=None, error="ModuleNotFoundError")
CASES = (
    NO_VERL,
    Case("a file that is no YAML", {"composition": NO_YAML}, NOT_COMPOSED),
    of_verl("verl that does not import", error="ImportError: libcudart"),
    Case(
        "no composer-plugins",
        {"package": "ModuleNotFoundError: No module named 'composer_plugins'", **UNREGISTERED},
    ),
    of_verl("a plugin that failed", failure="NameError: x"),
    Case("a plugin that says nothing", UNREGISTERED),
    Case("losses and no trainer", {"trainers": ["sync"]}),
)


def row(case: Case) -> Row:
    """Judge the answers, of a config that a broken verl cannot compose."""
    is_composed = case.config and not case.answers.get("verl", VERL)["error"]
    found = findings_in_words(judged(tree(case.config) if is_composed else None, **case.answers))
    return Row(case.name, found, "", "", may_be_silent=True)
