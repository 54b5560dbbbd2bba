"""torchtitan's Python configs: read by the doctor, moved to another framework, and written."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_plugins.adapters.torchtitan_loss.migration import RL
from composer_plugins.calling_convention import Counts
from composer_plugins.frameworks.torchtitan import TORCHTITAN
from composer_plugins.losses.choosing import choose
from composer_plugins.objective.objective import of_choice
from composer_plugins.objective.resolve import migrate, resolve
from composer_plugins.testing.conventions import logits
from parity_tests.rigs.commands import invoke
from parity_tests.rigs.moved_losses import assert_trains, batch, expected, moved, runs
from parity_tests.rigs.paths import ROOT

CONFIGS = """
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from composer_plugins.adapters.torchtitan_loss.loss import ComposerLoss

class GRPOLoss:
    @dataclass(kw_only=True, slots=True)
    class Config:
        clip_eps: float = 0.2

class DAPOLoss:
    @dataclass(kw_only=True, slots=True)
    class Config:
        ratio_clip_low: float = 0.2
        ratio_clip_high: float = 0.2

def dapo():
    return SimpleNamespace(num_chunks=8, loss_fn=DAPOLoss.Config(ratio_clip_high=HIGH))

def grpo():
    return GRPOLoss.Config(clip_eps=0.1)

def ours():
    return ComposerLoss.Config(policy="cispo", policy_params={"clip_high": 4.0}, policy_weight=0.5)

def whole():
    advantage = SimpleNamespace(should_std_normalize=True)
    trainer = SimpleNamespace(loss=dapo(), optimizer=None)
    return SimpleNamespace(rollouter=SimpleNamespace(advantage=advantage), trainer=trainer, generator=0.8)

def nothing():
    return SimpleNamespace(model=1)

def fails():
    raise RuntimeError("no GPU")
"""
ALL = "all but trainer.loss and should_std_normalize"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss_module: Any) -> Iterator[Any]:
    """Write CONFIGS, changed, as a module, and return the import path of a function in it."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(name: str, old: str = "HIGH", new: str = "0.28") -> str:
        (tmp_path / "titan_configs.py").write_text(CONFIGS.replace(old, new).replace("HIGH", "0.28"))
        return f"titan_configs:{name}"

    yield written
    sys.modules.pop("titan_configs", None)


def run(*words: Any) -> tuple[int, str]:
    done = invoke(*map(str, words))
    return done.exit_code, f"{done.output}{done.exception or ''}"


@pytest.mark.parametrize("name", ["dapo", "grpo", "ours"])
def test_the_doctor_finds_nothing_in_a_sound_config(config: Any, name: str) -> None:
    status, out = run("doctor", config(name), "--framework", "torchtitan")
    assert status == 0 and "nothing found, against the options of torchtitan 0.3.0" in out


@pytest.mark.parametrize(
    ("old", "new", "name", "words"),
    [
        ("=HIGH", "=-0.5", "dapo", "error: ratio_clip_high|it is -0.5"),
        ("DAPOLoss", "CISPOLoss", "dapo", "error: loss|unknown loss 'CISPOLoss'"),
        ('"cispo"', '"cipso"', "ours", "policy: |did you mean 'cispo'"),
        ("policy_weight=0.5", "policy_wieght=0.5", "ours", "titan_configs:ours: the function fails|wieght"),
        ("HIGH", "0.28", "nothing", "titan_configs:nothing: it makes a SimpleNamespace, which has no loss"),
        ("HIGH", "0.28", "fails", "titan_configs:fails: the function fails: RuntimeError: no GPU"),
        ("HIGH", "0.28", "dappo", "titan_configs:dappo: |did you mean 'dapo'"),
    ],
)
def test_the_doctor_names_a_mistake(config: Any, old: str, new: str, name: str, words: str) -> None:
    status, out = run("doctor", config(name, old, new), "--framework", "torchtitan")
    assert all(word in out for word in words.split("|")), out
    assert status == (0 if words.startswith("warning") else 1)


def test_where_torchtitan_is_missing_the_error_says_so(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    path = config("dapo", "from types", "import torchtitan\nfrom types")
    out = run("doctor", path, "--framework", "torchtitan")[1]
    assert f"{path}: " in out and out.endswith("; run this command where torchtitan is installed")


def test_what_is_not_looked_at_is_said_first(config: Any) -> None:
    status, out = run("migrate", config("whole"), "--from", "torchtitan", "--to", "verl")
    assert status == 0 and out.split("\n")[1] == f"# Not looked at: {ALL}"
    assert "Nothing that is known here differs." in out
    assert "advantage: grpo@torchtitan" in out and "clip_high: 0.28" in out
    status, out = run("doctor", config("whole"), "--framework", "torchtitan")
    assert status == 0 and f"not looked at: {ALL}" in out


OURS = {"loss": "ComposerLoss", "policy": "dppo_tv", "policy_weight": 0.5, "should_std_normalize": True}


@pytest.mark.parametrize(
    ("source", "table"),
    [
        (None, {"loss": "DAPOLoss", "ratio_clip_high": 0.28}),
        (None, OURS),
        ("dapo@torchtitan", {"loss": "DAPOLoss"}),
        ("dapo", {"loss": "ComposerLoss", "policy": "dapo"}),  # without torchtitan's clamp of the log ratio
        ("grpo@torchtitan", {"loss": "GRPOLoss"}),
    ],
)
def test_what_is_written_is_what_was_read(source: str | None, table: dict[str, Any]) -> None:
    """torchtitan's own class is written for the same loss alone."""
    read = of_choice(choose("policy", source)) if source else resolve("torchtitan", table).required()
    back = migrate(read, "torchtitan")
    assert back.table == table and bool(back.differences) == bool(source)  # a paper has another old policy
    assert back.text.count(f"{table['loss']}.Config(") == 1


def test_the_table_has_the_keywords_of_its_classes_and_the_page_names_them() -> None:
    page = (ROOT / "docs/nemo_rl.md").read_text()
    for option in TORCHTITAN.options:
        assert f"`{option.key}`" in page
    for loss in TORCHTITAN.losses:
        assert f'policy="{loss.row}"' in page and f"`{loss.options['loss']}`" in page


def test_the_snippet_of_the_page_makes_a_config(loss_module: Any) -> None:
    (snippet,) = re.findall(
        r"```python\n(.*?)```",
        (ROOT / "docs/nemo_rl.md").read_text().partition("\n## torchtitan\n")[2],
        re.DOTALL,
    )
    exec(snippet, names := {})
    assert names["loss"].build().policy.value("clip_high") == 4.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", runs("torchtitan"))
def test_torchtitan_trains_what_was_written(loss_module: Any, name: str) -> None:
    """In float32, by the lines of Python; in the session `torchtitan` with torchtitan itself."""
    for written, objective in moved("torchtitan", name):
        of_loss = written.text.partition(f"from {RL}.rollout")[0]  # the advantage's module imports vLLM
        exec(of_loss, names := dict[str, Any]())
        one = batch(nan=True)
        logprobs = one.logprobs.clone().requires_grad_()
        tensors = {"logprobs": logprobs, "rollout_logprobs": one.rollout}
        tensors |= {"advantages": one.advantages, "mask": one.mask}
        counts = Counts(int(one.mask.sum()), len(one.mask), parts=1, ranks=1, width=one.mask.shape[1])
        value = logits.TORCHTITAN.call(names["loss"].build(), tensors, counts, {}).loss
        (gradient,) = torch.autograd.grad(value, logprobs)
        assert_trains(value, gradient, expected(objective, one), torch.float32)
