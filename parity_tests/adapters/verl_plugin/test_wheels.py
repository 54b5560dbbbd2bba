"""The adapter in verl 0.6.1, 0.7.1 and 0.8.0, each installed without dependencies, and in the installed one.

`nox -s verl` makes the folders and names them in VERL_WHEELS. `verl_probe.py` is what runs in each.
"""

from collections.abc import Callable
from functools import cache
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

from composer_plugins.conformance.reductions import kernel as row_kernel
from composer_plugins.frameworks.verl import MODES
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.verl_drawn import largest_term
from parity_tests.rigs.verl_facts import assert_rows_equal
from parity_tests.rigs.verl_probe import NODE
from parity_tests.rigs.verl_wheels import FOLDERS, TARGET, folder, probe, start

INSTALLED = installed("verl")
VERSIONS = ("0.6.1", "0.7.1", "0.8.0", INSTALLED)
NORM = "seq-mean-token-sum-norm"
Probe = Callable[[str], dict[str, Any]]


def wheel(version: str) -> Path | None:
    """The wheel's folder, None for the installed verl; skips where there is none."""
    found = folder(version)
    if found is None and version != INSTALLED:
        pytest.skip(f"no verl {version} in a folder that {FOLDERS} names (nox -s verl makes it)")
    return found


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    """What the adapter did in one version of verl; each is started once."""

    @cache
    def once(version: str) -> dict[str, Any] | AssertionError:
        try:
            return probe(wheel(version), tmp_path_factory.mktemp("wheel") / "found.pt")
        except AssertionError as error:  # kept, so that it is not started again for each test
            return error

    def found(version: str) -> dict[str, Any]:
        result = once(version)
        if isinstance(result, AssertionError):
            raise result
        return result

    return found


def of_every_version(test: Any) -> Any:
    """With the oldest and the installed version, and in the slow suite with those between them."""
    between = VERSIONS[1:-1]
    cases = [pytest.param(one, marks=pytest.mark.slow if one in between else ()) for one in VERSIONS]
    return pytest.mark.parametrize("version", cases)(test)


@of_every_version
def test_import_verl_alone_registers_the_same_names_and_says_nothing(probed: Probe, version: str) -> None:
    found = probed(version)
    assert found["version"] == version, f"not the wheel: {found['file']}"
    assert version == INSTALLED or Path(found["file"]).is_relative_to(str(folder(version)))
    assert found["loaded"] and found["warnings"] == []
    for kind, registry in (("advantage", ADV_ESTIMATOR_REGISTRY), ("policy", POLICY_LOSS_REGISTRY)):
        names = sorted(name for name in registry if name.startswith("composer"))
        assert found["names"][kind] == names and len(names) >= 10


@of_every_version
def test_ours_take_whatever_a_function_of_that_version_takes(probed: Probe, version: str) -> None:
    assert probed(version)["unbound"] == {"advantage": [], "policy": []}


@of_every_version
def test_main_ppos_config_is_valid_and_the_node_arrives_in_a_worker(probed: Probe, version: str) -> None:
    found = probed(version)  # validate_config has passed, in there
    assert found["config"] == TARGET
    assert found["node"] == NODE
    assert found["critic"] is False


@of_every_version
def test_compute_advantage_gives_that_versions_grpo(probed: Probe, version: str) -> None:
    compared = 0
    for row in probed(version)["advantages"]:
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
            assert_rows_equal(first, row["theirs"][0][rows], part, eps=1e-6)
            compared += 1
    assert compared >= 10


@of_every_version
def test_a_policy_loss_is_that_versions_vanilla_by_its_workers_keywords(probed: Probe, version: str) -> None:
    found = probed(version)
    assert all({"log_prob", "config", "response_mask"} <= set(names) for names in found["keywords"])
    modes = {mode for mode in MODES if version == INSTALLED or mode != "token-sum"}  # since 0.9.0
    assert {row["mode"] for row in found["policy"]} == modes
    assert any(row["info"] for row in found["policy"]) == (version != "0.6.1")  # before 0.7: no counts
    kernel = row_kernel("policy", "grpo@verl", **NODE["policy_params"])
    for row in found["policy"]:
        batch, (loss, gradient, logged) = row["batch"], row["ours"]
        if "rollout_is_weights" not in row["keywords"]:
            batch = batch._replace(weights=None)
        # Before 0.7.1 this mode was divided by the width alone.
        info = {"global_batch_size": 1} if (version, row["mode"]) == ("0.6.1", NORM) else row["info"]
        largest = largest_term(kernel, batch, row["mode"], info)
        theirs, their_gradient, _ = row["theirs"]
        assert_parity(loss, theirs, terms=batch.mask.numel(), magnitude=largest)
        assert_parity(gradient, their_gradient, terms=batch.mask.shape[-1])
        assert logged and all(type(value) is float for value in logged.values())


@of_every_version
def test_before_0_9_verl_gives_gspo_one_mode_and_we_the_one_that_is_set(probed: Probe, version: str) -> None:
    found = probed(version)["by_mode"]
    assert torch.equal(*found["theirs"]) == (version != INSTALLED)
    assert not torch.equal(*found["ours"])
    assert_parity(found["ours"][1], found["theirs"][1], terms=16)


@of_every_version
def test_before_0_9_verl_forgets_a_return_at_a_tools_tokens_and_we_do_not(
    probed: Probe, version: str
) -> None:
    found = probed(version)["across_a_tool"]
    same = version == INSTALLED
    assert torch.allclose(found["ours"], found["theirs"], rtol=1e-6) == same
    if same:
        assert_parity(found["ours"], found["theirs"], terms=16)


def test_what_keeps_verl_from_loading_our_plugin_is_a_warning() -> None:
    """verl 0.6.1 cannot be imported whole beside transformers 5; `import verl` hides that, ours does not."""
    done = start(["-c", "import verl"], wheel("0.6.1"))
    assert done.returncode == 0
    assert "adv_estimator=composer will be unknown: ImportError: cannot import name" in done.stderr


def fake_plugin(root: Path) -> None:
    """A distribution with a plugin of ours that breaks when it is imported."""
    info = root / "acme_losses-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-losses\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[composer_plugins]\nacme = acme_losses\n")
    (root / "acme_losses.py").write_text("raise RuntimeError('no licence')\n")


@pytest.mark.slow
def test_a_broken_plugin_of_someone_else_costs_no_name_and_is_warned_of_by_its_name(tmp_path: Path) -> None:
    fake_plugin(tmp_path)
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
