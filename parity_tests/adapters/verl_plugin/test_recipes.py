"""The recipes for verl: composed as its main_ppo composes them, and judged by verl's own checks and ours."""

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from composer_plugins.adapters.verl_plugin.config import ComposerPolicyLossConfig
from composer_plugins.adapters.verl_plugin.options import asked, channels_of_node, node_of
from composer_plugins.adapters.verl_plugin.sync_trainer.checks import Run, findings
from composer_plugins.adapters.verl_plugin.sync_trainer.dataset import wanted_columns
from composer_plugins.adapters.verl_plugin.upstream import needs_reference, registries, validation_error
from composer_plugins.columns import hint_of, pairs_of
from composer_plugins.conformance import reductions
from composer_plugins.errors import Finding
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.verl_source import options
from parity_tests.rigs.verl_trained import Trained, composers, finished

FOLDER = ROOT / "recipes" / "verl"
README = (FOLDER / "README.md").read_text()
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
GIVEN = {"MODEL": "/models/tiny", "TRAIN": "/data/train.parquet", "VAL": "/data/val.parquet"}


@cache
def tree(name: str, *overrides: str) -> DictConfig:
    """A recipe over verl's config."""
    with initialize_config_dir(str(FOLDER), version_base=None):
        return compose(name, list(overrides))


@cache
def verls_own(*overrides: str) -> DictConfig:
    """verl's config."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", list(overrides))


def judged(config: DictConfig) -> list[Finding]:
    """What the doctor and composer_sync find in a config."""
    plain: Any = OmegaConf.to_container(config, resolve=True)
    return findings(Run(plain), registries())


def test_there_are_four_recipes_and_the_readme_has_a_line_of_each() -> None:
    assert RECIPES == ["dppo", "grpo_composer", "hint_sdpo", "replay_dpo"]
    assert [name for name in RECIPES if f"[{name}.yaml]({name}.yaml)" not in README] == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_sets_only_keys_that_verl_has_and_leaves_none_open(name: str) -> None:
    """Composing does not check it: a YAML over verl's may add whatever key it likes."""
    own = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
    assert isinstance(own, dict)
    set_here = set(options({key: own[key] for key in own.keys() - {"defaults", "hydra"}}))
    known = set(options(OmegaConf.to_container(verls_own())))  # type: ignore[arg-type]
    ours = {key for key in set_here if key.startswith("algorithm.composer.")}
    assert ours and set_here - known == ours | {f"{STRUCTURED}.composer"}
    open_ = {"reward.reward_model.rollout.name"}  # a reward model's, and no recipe has one
    assert OmegaConf.missing_keys(tree(name)) == open_ < OmegaConf.missing_keys(verls_own())


@pytest.mark.parametrize("name", RECIPES)
def test_our_rules_and_verls_have_nothing_against_a_recipe(name: str) -> None:
    config = tree(name)
    found = channels_of_node(node_of(config.algorithm))
    assert judged(config) == []
    assert need_reference_policy(config) == found.uses_reference
    assert bool(found.hint or found.replay) == (config.trainer.v1.trainer_mode == "composer_sync")
    validate_config(config, need_reference_policy(config), need_critic(config))


@pytest.mark.parametrize("name", RECIPES)
def test_the_workers_get_the_same_losses_as_the_driver(name: str) -> None:
    config = tree(name)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor.policy_loss, ComposerPolicyLossConfig)
    assert actor.strategy == "fsdp2" and actor.policy_loss.loss_mode == "composer"
    assert node_of(actor.policy_loss) == node_of(config.algorithm)
    policy, advantage = (
        found.choice
        for found, _ in (
            asked(node_of(actor.policy_loss), "policy", None),
            asked(node_of(config.algorithm), "advantage", None),
        )
        if found is not None
    )
    assert (policy.loss.name, advantage.loss.name) == ("dppo_tv" if name == "dppo" else "grpo", "grpo")


def test_each_recipe_has_a_folder_of_its_own_for_checkpoints() -> None:
    """verl resumes from what it finds there."""
    assert len({tree(name).trainer.default_local_dir for name in RECIPES}) == len(RECIPES)


def test_the_numbers_are_those_of_the_dialects_that_they_write_out() -> None:
    def node(name: str) -> dict[str, Any]:
        return node_of(tree(name).algorithm)

    for name in ("dppo", "grpo_composer"):
        kernel = reductions.kernel("policy", node(name)["policy"])
        assert node(name)["policy_params"].items() <= kernel.keywords.items()
    sdpo = reductions.kernel("divergence", "sdpo@sdpo").keywords
    assert node("hint_sdpo")["hint_params"].items() <= sdpo.items()
    assert node("hint_sdpo")["hint_top_k"] == sdpo["top_k"]
    assert tree("dppo").algorithm.rollout_correction.bypass_mode


@pytest.mark.parametrize("name", RECIPES)
def test_run_sh_starts_a_recipe_on_the_model_and_the_data(name: str, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")  # it prints its arguments
    python.chmod(0o755)
    environment = {**os.environ, **GIVEN, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(FOLDER / "run.sh"), name, "trainer.nnodes=2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    module, main, path, folder, flag, config_name, *overrides = done.stdout.splitlines()
    assert (module, main) == ("-m", "verl.trainer.main_ppo") and done.returncode == 0
    assert (path, Path(folder), flag, config_name) == ("--config-path", FOLDER, "--config-name", name)
    config = tree(name, *overrides)
    assert config.actor_rollout_ref.model.path == GIVEN["MODEL"] and config.trainer.nnodes == 2
    assert (config.data.train_files, config.data.val_files) == (GIVEN["TRAIN"], GIVEN["VAL"])


def test_the_readmes_rows_are_rows_that_the_channels_take() -> None:
    rows = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", README, re.DOTALL)]
    assert len(rows) == 2 and all(row["prompt"] and row["reward_model"] for row in rows)
    hinted, paired = rows
    assert hint_of(hinted) and len(pairs_of(paired)) == 1
    for name, row in (("hint_sdpo", hinted), ("replay_dpo", paired)):
        assert wanted_columns(channels_of_node(node_of(tree(name).algorithm))).keys() <= row.keys()


@pytest.mark.slow
def test_hint_sdpo_trains_in_the_real_main_ppo_and_logs_what_the_readme_says(trained: Trained) -> None:
    """With the file itself and the tests' overrides: tiny model, float32; dynamic batches as in the file."""
    first, second = composers(finished(trained("--config-path", str(FOLDER), "--config-name", "hint_sdpo")))
    named = set(re.findall(r"`actor/composer/(?!replay)([\w/]+)`", README))
    assert named == {key.removeprefix("actor/composer/") for key in first}
    assert first["actor/composer/hint/row_frac"] == 0.75
    assert first["actor/composer/hint/loss"] != second["actor/composer/hint/loss"] > 0


def yaml_of(page: str) -> str:
    """The first YAML of a page."""
    return (ROOT / page).read_text().partition("```yaml\n")[2].partition("```")[0]


def composed(text: str, folder: Path) -> DictConfig:
    (folder / "my.yaml").write_text(text)
    with initialize_config_dir(str(folder), version_base=None):
        return compose("my")


def test_the_registries_alone_as_the_page_says_pass_verls_own_check(tmp_path: Path) -> None:
    """The whole file without the lines that the page says to remove."""
    page = "docs/verl.md"
    said = "remove the lines of hint and replay, `use_kl_loss`, `kl_loss_coef` and `trainer`"
    assert said in (ROOT / page).read_text().replace("\n", " ")
    removed = ("hint_", "replay_", "use_kl_loss", "kl_loss_coef", "trainer")
    lines = [line for line in yaml_of(page).splitlines() if not line.strip().startswith(removed)]
    config = composed("\n".join(lines), tmp_path)
    assert "composer_sync" not in config.trainer.v1.trainer_mode and judged(config) == []
    plain: Any = OmegaConf.to_container(config, resolve=True)
    assert validation_error(plain) == ""
    validate_config(config, need_reference_policy(config), use_critic=False)


ACTOR = "actor_rollout_ref.actor"
DYNAMIC, STRUCTURED = f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.policy_loss"
MICRO = (
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "if use_dynamic_bsz is not enabled"),
        ([*MICRO, "algorithm.use_kl_in_reward=true"], "at least one of"),
        ([DYNAMIC, f"+{STRUCTURED}.composer={{}}"], "unexpected keyword argument 'composer'"),
        ([DYNAMIC], ""),
        (MICRO, ""),
    ],
)  # fmt: skip
def test_what_verls_own_check_raises_is_returned(overrides: list[str], words: str) -> None:
    config = verls_own(*overrides)
    plain: Any = OmegaConf.to_container(config, resolve=True)
    assert needs_reference(plain) == need_reference_policy(config)
    found = validation_error(plain)
    assert words in found and bool(found) == bool(words)


def test_the_yaml_of_the_docs_composes_and_lacks_nothing(tmp_path: Path) -> None:
    config = composed(yaml_of("docs/verl.md"), tmp_path)
    channels = channels_of_node(node_of(config.algorithm))
    assert channels.hint and channels.replay and judged(config) == []
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.policy_loss.composer == node_of(config.algorithm)
