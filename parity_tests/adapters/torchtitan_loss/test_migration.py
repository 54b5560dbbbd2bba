"""torchtitan's Python configs: read by the doctor, moved to another framework, and written."""

import re
from pathlib import Path
from typing import Any

import pytest

from composer_plugins.frameworks.torchtitan import TORCHTITAN
from composer_plugins.losses.choosing import choose
from composer_plugins.objective.objective import of_choice
from composer_plugins.objective.resolve import migrate, resolve
from parity_tests.rigs.commands import invoke
from parity_tests.rigs.paths import ROOT

CONFIGS = """
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.experiments.rl.losses import DAPOLoss, GRPOLoss
from composer_plugins.adapters.torchtitan_loss.loss import ComposerLoss

def dapo():
    return ChunkedLossWrapper.Config(num_chunks=8, loss_fn=DAPOLoss.Config(ratio_clip_high=HIGH))

def grpo():
    return losses.GRPOLoss.Config(clip_eps=0.1)

def ours():
    return ComposerLoss.Config(policy="cispo", policy_params={"clip_high": 4.0}, policy_weight=0.5)
"""


def line(name: str, text: str = CONFIGS) -> int:
    """The line of the loss in a function of CONFIGS."""
    return text.split("\n").index(f"def {name}():") + 2


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config_registry.py"
    path.write_text(CONFIGS.replace("HIGH", "0.28"))
    return path


def run(*words: Any) -> tuple[int, str]:
    done = invoke(*map(str, words))
    return done.exit_code, done.output


@pytest.mark.parametrize("name", ["dapo", "grpo", "ours"])
def test_the_doctor_finds_nothing_in_a_sound_config(file: Path, name: str) -> None:
    status, out = run("doctor", f"{file}:{line(name)}", "--framework", "torchtitan")
    assert status == 0 and "nothing found, against the options of torchtitan 0.3.0" in out


@pytest.mark.parametrize(
    ("old", "new", "name", "words"),
    [
        ("=HIGH", "=28", "dapo", "warning: ratio_clip_high|set 0.28 if it is a percentage"),
        ("=HIGH", "=-0.5", "dapo", "error: ratio_clip_high|it is -0.5"),
        ('"cispo"', '"gspo"', "ours", "error: policy|a loss of whole sequences"),
        ('"cispo"', '"cipso"', "ours", "error: policy|did you mean 'cispo'"),
        ("policy_weight=0.5", "hint_weight=0.5", "ours", "error: hint_weight|no teacher's"),
        ("policy_weight=0.5", "policy_wieght=0.5", "ours", "policy_wieght|did you mean 'policy_weight'"),
    ],
)
def test_the_doctor_names_a_mistake(file: Path, old: str, new: str, name: str, words: str) -> None:
    file.write_text(CONFIGS.replace(old, new).replace("HIGH", "0.28"))
    out = run("doctor", f"{file}:{line(name)}", "--framework", "torchtitan")[1]
    assert all(word in out for word in words.split("|")), out


def test_a_loss_moves_to_another_framework_and_back(file: Path) -> None:
    status, out = run("migrate", f"{file}:{line('dapo')}", "--from", "torchtitan", "--to", "prime-rl")
    assert status == 0 and "Nothing differs." in out
    assert (
        'policy = "dapo@torchtitan"' in out and "clip_high = 0.28" in out and 'old_policy = "rollout"' in out
    )
    toml = file.with_suffix(".toml")
    toml.write_text(out)
    status, out = run("migrate", toml, "--from", "prime-rl", "--to", "torchtitan")
    assert "loss = DAPOLoss.Config(ratio_clip_high=0.28)" in out


@pytest.mark.parametrize(
    "table",
    [
        {"loss": "GRPOLoss", "clip_eps": 0.1, "should_std_normalize": True},
        {"loss": "DAPOLoss", "ratio_clip_high": 0.28},
        {
            "loss": "ComposerLoss",
            "policy": "cispo",
            "policy_params": {"clip_high": 4.0},
            "policy_weight": 0.5,
        },
        {"loss": "ComposerLoss", "policy": "dppo_tv", "should_std_normalize": True},
    ],
)
def test_what_is_written_is_what_was_read(table: dict[str, Any]) -> None:
    read = resolve("torchtitan", table)
    assert not read.errors
    back = migrate(read.required(), "torchtitan")
    assert back.table == table and not back.differences
    assert back.text.count(f"{table['loss']}.Config(") == 1


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("dapo@torchtitan", {"loss": "DAPOLoss"}),
        ("dapo", {"loss": "ComposerLoss", "policy": "dapo"}),  # without torchtitan's clamp of the log ratio
        ("grpo@torchtitan", {"loss": "GRPOLoss"}),
    ],
)
def test_torchtitans_own_class_is_written_for_the_same_loss_alone(name: str, table: dict[str, Any]) -> None:
    assert migrate(of_choice(choose("policy", name)), "torchtitan").table == table


def test_the_table_has_the_keywords_of_its_classes_and_the_page_names_them() -> None:
    page = (ROOT / "docs/torchtitan.md").read_text()
    for option in TORCHTITAN.options:
        assert f"`{option.key}`" in page
    for loss in TORCHTITAN.losses:
        assert f'policy="{loss.row}"' in page and f"`{loss.options['loss']}`" in page


def test_the_snippet_of_the_page_makes_a_config(loss_module: Any) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/torchtitan.md").read_text(), re.DOTALL)
    exec(snippet, names := {})
    assert names["loss"].build().policy.value("clip_high") == 4.0
