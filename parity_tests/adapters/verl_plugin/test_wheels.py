"""The adapter in verl 0.8.0, installed without dependencies, and in the installed one.

`nox -s verl` makes the folder and names it in VERL_WHEELS. `verl_probe.py` is what runs in each.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

from composer_plugins.conformance.reductions import kernel as row_kernel
from composer_plugins.conformance.verl_claims.advantages import by_group
from composer_plugins.frameworks.verl import MODES
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.verl_drawn import largest_term
from parity_tests.rigs.verl_probe import NODE
from parity_tests.rigs.verl_wheels import INSTALLED, PLUGIN, TARGET, probe, start, wheel

VERSIONS = ("0.8.0", INSTALLED)


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """One of verl's versions."""
    return str(request.param)


@pytest.fixture(scope="module")
def found(version: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the adapter did in this version, which is started once."""
    return probe(wheel(version), tmp_path_factory.mktemp("wheel") / "found.pt")


def test_import_verl_alone_registers_the_same_names_and_says_nothing(
    found: dict[str, Any], version: str
) -> None:
    assert found["version"] == version, f"not the wheel: {found['file']}"
    assert version == INSTALLED or Path(found["file"]).is_relative_to(str(wheel(version)))
    assert found["loaded"] and found["warnings"] == []
    for kind, registry in (("advantage", ADV_ESTIMATOR_REGISTRY), ("policy", POLICY_LOSS_REGISTRY)):
        names = sorted(name for name in registry if name.startswith("composer"))
        assert found["names"][kind] == names and len(names) >= 10


def test_ours_take_whatever_a_function_of_that_version_takes(found: dict[str, Any]) -> None:
    assert found["unbound"] == {"advantage": [], "policy": []}


def test_main_ppos_config_is_valid_and_the_node_arrives_in_a_worker(found: dict[str, Any]) -> None:
    # validate_config has passed, in there
    assert found["config"] == TARGET
    assert found["node"] == NODE
    assert found["critic"] is False


def test_compute_advantage_gives_that_versions_grpo(found: dict[str, Any]) -> None:
    compared = 0
    for row in found["advantages"]:
        batch, (ours, returns) = row["batch"], row["ours"]
        assert ours.shape == batch.mask.shape and torch.equal(ours, returns)
        assert torch.equal(ours, row["named"][0])  # composer/grpo beside the node's dialect
        for group in batch.ids.unique():
            rows = batch.ids == group
            if not batch.mask[rows].any(-1).all():
                continue  # an empty row counts in verl's group, and in none of ours
            part = batch._replace(rewards=batch.rewards[rows], ids=batch.ids[rows], mask=batch.mask[rows])
            first = ours[rows].gather(1, batch.mask[rows].int().argmax(1, keepdim=True)).squeeze(1)
            assert torch.equal(ours[rows], first.unsqueeze(1) * batch.mask[rows])  # of a row, and masked
            for one in by_group(first, row["theirs"][0][rows], part, eps=1e-6):
                one.check()
            compared += 1
    assert compared >= 10


def test_a_policy_loss_is_that_versions_vanilla_by_its_workers_keywords(
    found: dict[str, Any], version: str
) -> None:
    assert all({"log_prob", "config", "response_mask"} <= set(names) for names in found["keywords"])
    modes = {mode for mode in MODES if version == INSTALLED or mode != "token-sum"}  # since 0.9.0
    assert {row["mode"] for row in found["policy"]} == modes
    kernel = row_kernel("policy", "grpo@verl", **NODE["policy_params"])
    for row in found["policy"]:
        batch, (loss, gradient, logged) = row["batch"], row["ours"]
        if "rollout_is_weights" not in row["keywords"]:
            batch = batch._replace(weights=None)
        largest = largest_term(kernel, batch, row["mode"], row["info"])
        theirs, their_gradient, _ = row["theirs"]
        assert_parity(loss, theirs, terms=batch.mask.numel(), magnitude=largest)
        assert_parity(gradient, their_gradient, terms=batch.mask.shape[-1])
        assert logged and all(type(value) is float for value in logged.values())


def test_before_0_9_verl_gives_gspo_one_mode_and_we_the_one_that_is_set(
    found: dict[str, Any], version: str
) -> None:
    gspo = found["by_mode"]
    assert torch.equal(*gspo["theirs"]) == (version != INSTALLED)
    assert not torch.equal(*gspo["ours"])
    assert_parity(gspo["ours"][1], gspo["theirs"][1], terms=16)


def test_before_0_9_verl_forgets_a_return_at_a_tools_tokens_and_we_do_not(
    found: dict[str, Any], version: str
) -> None:
    ours, theirs = (found["across_a_tool"][who] for who in ("ours", "theirs"))
    same = version == INSTALLED
    assert torch.allclose(ours, theirs, rtol=1e-6) == same
    if same:
        assert_parity(ours, theirs, terms=16)


def test_an_older_verl_is_one_line_that_says_what_to_install(tmp_path: Path) -> None:
    """`import verl` hides the error of a plugin, so it is a warning."""
    (tmp_path / "sitecustomize.py").write_text("import verl\nverl.__version__ = '0.7.1'")
    done = start(
        ["-c", f"import {PLUGIN}"], tmp_path, VERL_USE_EXTERNAL_MODULES="", VERL_USE_EXTERNAL_PLUGINS="none"
    )
    assert done.returncode == 0
    line = "verl: it is verl 0.7.1, and composer-plugins runs in verl 0.8 and 0.9; install it: pip install"
    assert f"not registered in verl: ConfigError: {line}" in done.stderr


@pytest.mark.slow
def test_a_broken_plugin_of_someone_else_costs_no_name_and_is_warned_of_by_its_name(tmp_path: Path) -> None:
    info = tmp_path / "acme_losses-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-losses\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[composer_plugins]\nacme = acme_losses\n")
    (tmp_path / "acme_losses.py").write_text("raise RuntimeError('no licence')\n")
    program = (
        "import verl\n"
        "from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY as A, POLICY_LOSS_REGISTRY as P\n"
        "print('names:', *sorted(name for name in [*A, *P] if name.startswith('composer')))"
    )
    done = start(["-c", program], tmp_path, VERL_USE_EXTERNAL_MODULES="")  # by the entry point alone
    (names,) = (line.split()[1:] for line in done.stdout.splitlines() if line.startswith("names:"))
    expected = [*ADV_ESTIMATOR_REGISTRY, *POLICY_LOSS_REGISTRY]
    assert names == sorted(name for name in expected if name.startswith("composer"))
    assert "PluginWarning: plugin of acme-losses 2.0: acme_losses fails on import" in done.stderr
    assert "RuntimeError: no licence" in done.stderr
