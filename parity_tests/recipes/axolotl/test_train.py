"""`axolotl train` with the recipe's YAML file, on a CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from parity_tests.rigs.paths import ROOT

TIMEOUT = 300
SHORT = {"max_steps": 2, "micro_batch_size": 16, "logging_steps": 1}
# The reward of the recipe. It prints whose functions TRL's trainer has for the log-probabilities.
REWARD = """
import trl.trainer.grpo_trainer as grpo_trainer
from composer_plugins.recipes.codebook.task import codebook_reward

def reward(completions, **columns):
    print("log_softmax of", grpo_trainer.selective_log_softmax.__module__)
    return codebook_reward(completions, **columns)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recipe has written its model and its rows."""
    path = tmp_path_factory.mktemp("axolotl")
    (path / "rewards.py").write_text(REWARD)
    status, output = run(path, sys.executable, "-m", "composer_plugins.recipes.axolotl")
    assert status == 0, output
    return path


def run(folder: Path, *command: str) -> tuple[int, str]:
    """The exit status of a command and what it printed."""
    own = {"AXOLOTL_DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=folder, env=os.environ | own, timeout=TIMEOUT, **options)
    return done.returncode, done.stdout


def options(**changes: Any) -> dict[str, Any]:
    """The recipe's YAML file for two short steps, with `changes`; None removes a key."""
    given = yaml.safe_load((ROOT / "recipes" / "axolotl" / "three_channels.yaml").read_text())
    return {name: value for name, value in (given | SHORT | changes).items() if value is not None}


def train(folder: Path, name: str, **changes: Any) -> tuple[int, str]:
    """The exit status and the output of `axolotl train`. The model goes to the folder `name`."""
    given = options(output_dir=name, **changes)
    given["trl"]["reward_funcs"] = ["rewards.reward"]
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(given))
    return run(folder, "axolotl", "train", f"{name}.yaml")


def logged(output: str, key: str) -> list[float]:
    """The values of a metric, one for each step."""
    return [float(value) for value in re.findall(rf"'{re.escape(key)}': '([^']+)'", output)]


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_the_three_channels_train(folder: Path, adapter: str | None) -> None:
    lora = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True} if adapter else {}
    status, output = train(folder, f"three_{adapter}", **lora)
    assert status == 0, output
    assert "composer loss = 1 * policy grpo(" in output, "the trainer is not ours"
    for channel in ("policy", "hint", "replay"):
        assert len(logged(output, f"composer/{channel}/loss")) == 2
    hint, replay = logged(output, "composer/hint/loss"), logged(output, "composer/replay/rewards/margins")
    assert hint[0] > 0.1 and replay[0] == 0 and replay[1] != 0, "the reference is not the initial policy"
    # Axolotl replaces TRL's functions before the model is loaded: our plugin must not import TRL earlier.
    assert "log_softmax of axolotl" in output and "log_softmax of trl" not in output
    saved = folder / f"three_{adapter}" / ("adapter_model.safetensors" if adapter else "model.safetensors")
    assert saved.is_file()


def test_without_channels_the_parameters_are_those_of_axolotls_own_run(folder: Path) -> None:
    own = {"plugins": None, "trainer_cls": None, "composer": None}
    off = {"composer": {"policy": "trl", "hint_weight": 0.0, "replay_weight": 0.0}}
    for name, changes in (("own", own), ("off", off)):
        status, output = train(folder, name, **changes)
        assert status == 0, output
        assert ("composer loss = 1 * policy TRL's own" in output) == (name == "off")
    start, theirs, ours = (
        load_file(folder / name / "model.safetensors") for name in ("axolotl_start", "own", "off")
    )
    assert theirs.keys() == ours.keys()
    assert all((ours[name] == weight).all() for name, weight in theirs.items())
    assert any((start[name] != weight).any() for name, weight in theirs.items()), "nothing was trained"


def test_a_misspelt_option_ends_the_run_with_its_name(folder: Path) -> None:
    status, output = train(folder, "misspelt", composer={"hint_wieght": 1.0})
    assert status != 0
    assert "composer.hint_wieght: unknown option 'hint_wieght'; did you mean 'hint_weight'?" in output


NO_EFFECT = {
    "rl": {"rl": "dpo"},
    "composer": {"composer": None},
    "hint_weight": {"hint_weight": 1.0},
    "composer.loss_type": {"composer": {"loss_type": "grpo"}},
    "composer.old_policy": {"composer": {"old_policy": "rollout"}},
    "trainer_cls": {"trainer_cls": "axolotl.core.trainers.grpo.trainer.AxolotlGRPOTrainer"},
    "context_parallel_size": {"context_parallel_size": 2},
}


@pytest.mark.filterwarnings("ignore")  # of Axolotl's imports
@pytest.mark.parametrize("key", [*NO_EFFECT, None])
def test_a_file_whose_options_would_have_no_effect_is_an_error(key: str | None) -> None:
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.schemas.enums import RLType

    from composer_plugins.errors import ConfigError
    from composer_plugins.recipes.axolotl.plugin import ComposerPlugin

    given = options(**NO_EFFECT.get(str(key), {}))
    plugin = ComposerPlugin()
    plugin.register(given)
    validated = DictDefault(given | {"rl": RLType(given["rl"])})
    if key is None:
        plugin.pre_model_load(validated)
        return
    with pytest.raises(ConfigError) as raised:
        plugin.pre_model_load(validated)
    assert raised.value.key == key
