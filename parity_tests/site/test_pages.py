"""What the pages say of the code is true: examples, signatures, configs and commands."""

import re
import shlex
import tomllib
from contextlib import nullcontext
from importlib import import_module
from inspect import Signature, signature
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch
import yaml
from typer.main import get_command

from composer_plugins.adapters import tinker_loss
from composer_plugins.adapters.nemo_rl_loss import loss as nemo_rl_loss
from composer_plugins.cli import app
from composer_plugins.config import ComposerConfig
from composer_plugins.frameworks.registry import conventions
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Loss
from composer_plugins.objective.by_table import nested
from composer_plugins.objective.resolve import resolve
from composer_plugins.testing.conventions import find_convention
from composer_plugins.testing.laws import FUNCTION, laws_for
from docs.generator import laws, names, usage
from parity_tests.rigs.every import row_id
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.programs import python
from parity_tests.rigs.tinker_data import batch

PAGE = (ROOT / "docs/writing_a_loss.md").read_text()
WRITING, CHECKING = PAGE.split("\n## Check a loss\n")


def checked(source: str, function: str, folder: Path, *options: str) -> str:
    """What `composer-plugins check my_losses:function` prints, where my_losses.py is this source."""
    (folder / "my_losses.py").write_text(source)
    words = ("-W", "ignore", "-m", "composer_plugins", "check", f"my_losses:{function}", *options)
    done = python(*words, first=folder)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def block(page: str, number: int) -> str:
    return page.split("```python")[number].split("```")[0]


def test_the_broken_loss_of_the_page_prints_what_the_page_shows(tmp_path: Path) -> None:
    printed = checked(block(CHECKING, 1), "first_try", tmp_path).splitlines()
    start = CHECKING.index("my_losses:first_try (policy)")
    shown = CHECKING[start : CHECKING.index("```", start)].splitlines()
    assert len(shown) == 10 and [line for line in printed if line in shown] == shown


def test_the_function_of_another_convention_prints_what_the_page_shows(tmp_path: Path) -> None:
    printed = checked(block(CHECKING, 4), "clipped", tmp_path, "--as", "torch").splitlines()
    shown = CHECKING.split("These are two of them:\n\n```\n")[1].split("```")[0].splitlines()
    assert len(shown) == 6 and [line for line in printed if line in shown] == shown


def test_the_page_has_the_signature_of_each_convention() -> None:
    for framework in ("torch", "prime-rl", "skyrl", "tinker"):  # those that need no framework
        assert f"| `{framework}` | `{find_convention(framework).signature}` | " in CHECKING
    assert all(f"| `{one}` |" in CHECKING for one in conventions())


def test_the_losses_that_pages_show_as_right_obey_every_law(tmp_path: Path) -> None:
    printed = checked(block(CHECKING, 2), "capped", tmp_path)
    assert " 0 failed, 1 not applicable" in printed and printed in CHECKING
    assert " 0 failed," in checked(block(WRITING, block_of("half_negative")), "half_negative", tmp_path)
    for function in ("narrow", "logistic_margin", "absolute_deviation"):
        assert " 0 failed," in checked(block(WRITING, block_of(function)), function, tmp_path)


def block_of(function: str) -> int:
    """The number of the block of Python that defines a function with a docstring."""
    blocks = enumerate(WRITING.split("```python"))
    return next(i for i, text in blocks if f"def {function}(" in text and '"""' in text.split("```")[0])


def test_the_clipped_example_has_one_clip_for_each_sign_of_the_advantage() -> None:
    exec(block(WRITING, block_of("narrow")), found := {})
    logprobs = torch.tensor([0.5, 0.5, -0.5, -0.5]).log1p().requires_grad_()
    advantages, mask = torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.ones(4, dtype=torch.bool)
    loss = found["narrow"](logprobs, torch.zeros(4), advantages, mask, clip_positive=0.3, clip_negative=0.2)
    torch.testing.assert_close(loss.loss.detach(), torch.tensor([-1.3, 1.5, -0.5, 0.8]))


def test_the_table_of_parts_has_the_signatures_of_the_code() -> None:
    rows = re.findall(r"^\| `(kernels\.[\w.]+)\.(\w+)(\(.*?\))` \|", WRITING, re.MULTILINE)
    assert len(rows) >= 12
    for module, name, shown in rows:
        function = getattr(import_module(f"composer_plugins.{module}"), name)
        bare = [one.replace(annotation=one.empty) for one in signature(function).parameters.values()]
        assert shown == str(Signature(bare)), name


@pytest.mark.parametrize("loss", losses(), ids=row_id)
def test_the_configs_on_the_page_of_a_loss_are_accepted(loss: Loss) -> None:
    named = usage.options(loss)
    ComposerConfig.parse(named)
    tabs = usage.section(loss).split('=== "')[1:]
    for name, _, text in (tab.partition('"') for tab in tabs):
        source = dedent(text.split("```")[1].partition("\n")[2]).strip()
        if name == "Function":
            exec(source, {})
        elif name == "verl":
            own = {"advantage": loss.advantage} if loss.advantage else {}
            assert yaml.safe_load(source)["algorithm"]["composer"] == own | named
        elif name == "PRIME-RL":
            assert named.items() <= tomllib.loads(source)["trainer"]["loss"]["kwargs"].items()
        elif name == "SkyRL":
            words = (word.split("=", 1) for word in source.replace("\\\n", "").split())
            options = nested({key: yaml.safe_load(value) for key, value in words})
            assert getattr(resolve("skyrl", options).required(), loss.kind).loss == loss
        elif name == "Tinker":
            rollouts = {"data": batch()[0], "rewards": [1.0, 2.0, 3.0, 5.0], "groups": [0, 0, 1, 1]}
            made = eval(source, {**vars(tinker_loss), **rollouts})
            assert f" {loss.name}" in str(made) or f" advantage={loss.name!r}" in source
        elif name == "NeMo-RL":
            names = {**vars(nemo_rl_loss), "master_config": SimpleNamespace(loss_fn={})}
            with (
                nullcontext() if loss.mode != "token-sum" else pytest.warns(match="does not have 'token-sum'")
            ):
                made = eval(source, names)
            assert loss == (made.terms.objective.policy if loss.kind == "policy" else made.divergence).loss
        elif name == "slime":
            tree = yaml.safe_load(source)
            assert resolve("slime", tree).required().policy.loss == loss
        elif name == "torchtitan":
            assert eval(source, {"ComposerLoss": SimpleNamespace(Config=dict)}) == named
        else:
            own = {"scale_rewards": "none"} if loss.advantage else {}
            assert eval(source, {"ComposerGRPOConfig": dict}) == named | own


def test_the_page_of_the_commands_has_each_with_an_example_that_parses() -> None:
    page = (ROOT / "docs/get_started.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` \|.*\| `composer-plugins (.*)` \|$", page, re.MULTILINE)
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert sorted(name for name, _ in rows) == sorted(commands)
    for name, example in rows:
        first, *rest = shlex.split(example)
        assert first == name
        commands[name].make_context(name, rest)  # raises for an option that the command does not have


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ziamath, when it is imported
def test_a_page_of_a_loss_names_the_options_of_trl_that_it_takes() -> None:
    from docs.generator import losses as generated

    text = "Options of TRL that set a parameter of this loss: {} ("
    said = {loss.name: generated.names_of_trl(loss) for loss in losses()}
    assert text.format("none") in said["gmpo"]  # TRL's epsilon is refused with it
    assert text.format("`epsilon`, `epsilon_high`, `delta`") in said["ppo"]
    assert "Options of TRL" not in said["dpo"]


def test_the_index_of_names_has_what_chooses_a_loss_of_trl() -> None:
    page = names.pages()["losses/names.md"]
    assert "- `GMPOTrainer` (trl.experimental.gmpo) → [`gmpo@trl`]" in page
    assert "- `loss_type: grpo`, `importance_sampling_level: sequence` → [`gspo@trl`]" in page
    assert "- `adv_estimator: grpo` → [`grpo@verl`](advantage/grpo.md" in page  # two kinds share the name


def test_the_page_of_the_laws_has_those_of_every_way_to_check() -> None:
    _, of_one_number = laws.pages()["losses/laws.md"].split("\n## ")
    assert all(f"\n| `{name}` | " in of_one_number for name in laws_for(FUNCTION))
