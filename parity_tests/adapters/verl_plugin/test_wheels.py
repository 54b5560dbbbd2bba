"""The adapter in verl 0.8.0, installed without dependencies. In the installed verl: the other files.

`nox -s verl` makes the folder and names it in VERL_WHEELS. `verl_probe.py` is what runs there.
"""

from pathlib import Path
from typing import Any

import pytest
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

from parity_tests.rigs.verl_probe import NODE
from parity_tests.rigs.verl_wheels import PLUGIN, TARGET, probe, start, wheel

OLDEST = "0.8.0"
# Before 0.9 verl gives gspo one mode, whatever is set, and forgets a return at a tool's tokens.
DIFFER = [("gspo_token@verl", "gspo", "differs"), ("reinforce_pp@verl", "reinforce_plus_plus", "differs")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the adapter did in the oldest version, which is started once."""
    return probe(wheel(OLDEST), tmp_path_factory.mktemp("wheel") / "found.json")


def test_import_verl_alone_registers_the_same_names_and_says_nothing(found: dict[str, Any]) -> None:
    assert found["version"] == OLDEST and Path(found["file"]).is_relative_to(str(wheel(OLDEST)))
    assert found["loaded"] and found["warnings"] == []
    for kind, registry in (("advantage", ADV_ESTIMATOR_REGISTRY), ("policy", POLICY_LOSS_REGISTRY)):
        names = sorted(name for name in registry if name.startswith("composer"))
        assert found[kind] == names and len(names) >= 10


def test_main_ppos_config_is_valid_and_the_node_arrives_in_a_worker(found: dict[str, Any]) -> None:
    assert (found["config"], found["node"]) == (TARGET, NODE)


def test_a_registered_loss_is_that_versions(found: dict[str, Any]) -> None:
    assert len(found["compared"]) > 20
    assert [tuple(row) for row in found["compared"] if row[-1] != "equal"] == DIFFER


def test_an_older_verl_is_one_line_that_says_what_to_install(tmp_path: Path) -> None:
    """`import verl` hides the error of a plugin, so it is a warning."""
    (tmp_path / "sitecustomize.py").write_text("import verl\nverl.__version__ = '0.7.1'")
    done = start(
        ["-c", f"import {PLUGIN}"], tmp_path, VERL_USE_EXTERNAL_MODULES="", VERL_USE_EXTERNAL_PLUGINS="none"
    )
    assert done.returncode == 0
    line = "verl: it is verl 0.7.1, and composer-plugins runs in verl 0.8 and 0.9; install it: pip install"
    assert f"not registered in verl: ConfigError: {line}" in done.stderr
