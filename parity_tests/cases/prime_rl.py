"""Mistakes in `[trainer.loss]` of PRIME-RL with a loss of ours.

The doctor reads the file with a double of an interpreter in which all can be imported. The trainer is a
double too: it imports the function that the file names, and calls it with LossInputs.
"""

import re
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import chdir, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from composer_plugins.adapters import prime_rl_plugin
from composer_plugins.adapters.prime_rl_plugin import doctor
from composer_plugins.doctor import Examination, Target
from composer_plugins.errors import ConfigError
from parity_tests.cases.recorded import Row, Stage, findings_in_words, in_words, said
from parity_tests.rigs import prime_rl_doubles as double
from parity_tests.rigs.prime_rl_doubles import sample

IMPORTED, CALLED = "setting up the loss, after the model is loaded", "the first call of the loss"
MODULE = "composer_plugins.adapters.prime_rl_plugin"
NEWEST = "559b447"  # the newest that was tested
FUNCTION = f'import_path = "{MODULE}.loss_fn"'
POLICY = 'policy = "dppo_tv@prime-rl"'
SOUND = f"""
[model]
name = "Qwen/Qwen3-0.6B"

[orchestrator]
group_size = 8

[[orchestrator.train.source]]
name = "mine"
env.taskset.id = "my-env"

[trainer.loss]
type = "custom"
{FUNCTION}

[trainer.loss.kwargs]
{POLICY}
"""


def edited(edits: str, sound: str = SOUND) -> str:
    """A sound file after edits "OLD => NEW & OLD => NEW"; "; " stands for a new line."""
    text = sound
    for one in filter(None, edits.replace("; ", "\n").split(" & ")):
        old, _, new = one.partition(" => ")
        assert old in text, old
        text = text.replace(old, new)
    return text


def examined(*texts: str, version: str | None = None, python: str = "", **answers: Any) -> Examination:
    """What the doctor finds in files of these texts.

    The interpreter is a double that has no PRIME-RL and these answers, unless `python` names one.
    """
    facts = {"prime_rl": [None, False], "loss": None, "rejected": None} | answers
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        files = [Path(f"{number or 'rl'}.toml") for number in range(len(texts))]
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
        with nullcontext() if python else patch.object(doctor, "ask", lambda *_: facts):
            return doctor.examine(files, Target(python or "python", version))


class Case(NamedTuple):
    """A mistake in the file."""

    name: str
    text: str


ADVANTAGE = 'hint_weight = 0.1; hint_estimator = "advantage"'
ICEPOP = 'policy = "reinforce"; rollout_correction = "icepop"'


def rows(table: str) -> Iterator[list[str]]:
    """The lines of a table, cut at " | ", with the texts that several of them have."""
    texts = {"@ROLLOUT": 'old_policy = "rollout"', "@ICEPOP": ICEPOP, "@ADVANTAGE": ADVANTAGE}
    for name, text in texts.items():
        table = table.replace(name, text)
    for line in table.strip().splitlines():
        yield [" ".join(cell.split()) for cell in re.split(r" \|(?= )", line)]


# Lines of [trainer.loss.kwargs].
OPTIONS = """
a misspelt option | hint_wieght = 0.1
a misspelt loss | policy = "cipso"
a misspelt dialect | policy = "gspo@tlr"
a misspelt parameter | policy = "dppo_tv"; policy_params = { tv_hihg = 0.3 }
a parameter of the loss beside it | policy = "dppo_tv"; tv_high = 0.3
PRIME-RL's name of a parameter | dppo_mask_high = 0.3
verl's name of a parameter | policy = "grpo"; @ROLLOUT; policy_params = { clip_ratio_c = 3.0 }
a clip of 28 for 28 percent | policy = "dapo"; @ROLLOUT; policy_params = { clip_high = 28 }
a percentage | policy = "grpo"; @ROLLOUT; policy_params = { clip_low = 20 }
a number as a string | hint_weight = "0.1"
all weights 0 | policy_weight = 0
a preference loss as the policy | policy = "dpo"
a dotted path | policy = "my_package.losses.my_loss"
a loss that does not import | policy = "my_package.losses:my_loss"
a loss over the whole batch | policy = "clip_cov"
a loss that needs the top k | policy = "dppo_topk_tv"
PPO without an old policy | policy = "grpo@trl"
an old policy beside a loss that has none | old_policy = "rollout"
a clip where every ratio is 1 | policy = "cispo"; old_policy = "current"; policy_params = { clip_high = 0.3 }
a correction counted twice | rollout_correction = "tis"
an advantage, as in verl | advantage = "rloo"
what becomes of a NaN reward | policy = "grpo"; on_bad_reward = "zero"
a divergence over the vocabulary | hint_weight = 0.1; hint_divergence = "jsd"
a preference loss for the pairs, as in TRL | replay_weight = 1.0; replay_loss = "simpo"
an option of the hint without its weight | hint_estimator = "k3"
a hint in the advantages of a loss per sequence | policy = "gspo"; @ROLLOUT; @ADVANTAGE
adv_tau beside a hint in the advantages, which it scales too | policy_params = { adv_tau = 0.5 }; @ADVANTAGE
a policy that trains nothing | policy_params = { adv_tau = 0, kl_tau = 0 }
a loss that is reduced in another way | policy = "gspo"; @ROLLOUT
a parameter as a string | policy_params = { tv_high = "0.1" }
a weight that is true | hint_weight = true
a weight that is NaN | hint_weight = nan
PPO of the paper without an old policy | policy = "grpo"
a correction beside a ratio to the rollout | policy = "grpo"; @ROLLOUT; rollout_correction = "tis"
a correction without its bound | policy = "reinforce"; rollout_correction = "mis"
a correction over the whole batch | @ICEPOP; rollout_correction_params = { normalise = true }
bounds in the wrong order | @ICEPOP; rollout_correction_params = { low = 6.0 }
parameters of no correction | rollout_correction_params = { cap = 2.0 }
an unknown estimator | hint_weight = 1.0; hint_estimator = "k4"
two estimators | hint_weight = 1.0; hint_estimator = "k2"; hint_params = { estimator = "k3" }
parameters of a divergence for a hint in the advantages | @ADVANTAGE; hint_params = { ratio_cap = 2.0 }
a hint in the advantages, times 0 | @ADVANTAGE; policy_params = { adv_tau = 0.0 }
a hint in the advantages of a loss that reads none | @ADVANTAGE; policy = "opd"
a hint in the advantages of no policy | @ADVANTAGE; policy_weight = 0.0
a user's loss that needs logits | policy = "parity_tests.rigs.prime_rl_users:unfed"
four mistakes | policy = "cipso"; kl_tau = 0.1; hint_top_k = 4; hint_estimator = "k9"
mistakes of two channels | policy = "grpoo"; hint_params = { x = 1 }; hint_weight = 1.0; replay_loss = "dpo"
two inputs that would have no effect | policy = "dppo_tv"; @ROLLOUT; rollout_correction = "tis"
an unknown option beside inputs without effect | policy = "dppo_tv"; @ROLLOUT; hint_top_k = 3
PRIME-RL's kl_tau beside cispo | policy = "cispo"; kl_tau = 0.1
"""

# Edits of the file.
FILES = """
a kernel as the import path | adapters.prime_rl_plugin.loss_fn => kernels.policy.grpo
no type of the loss | type = "custom" => # no type
PRIME-RL's own loss | "custom" => "default"
"""
CASES = (
    *(Case(name, SOUND.replace(POLICY, lines.replace("; ", "\n"))) for name, lines in rows(OPTIONS)),
    *(Case(name, edited(edits)) for name, edits in rows(FILES)),
)


def row(case: Case) -> Row:
    """Make the mistake and write down what is said."""
    try:
        told = findings_in_words(examined(case.text, version=NEWEST).findings)
    except ConfigError as error:
        told = in_words(error)
    loss = tomllib.loads(case.text)["trainer"]["loss"]
    is_ours = loss.get("type") == "custom"
    return Row(case.name, told, *said(_stages(loss) if is_ours else ()), may_be_silent=not is_ours)


def _stages(loss: dict[str, Any]) -> Iterator[Stage]:
    """What PRIME-RL does with the loss of this file."""
    found, inputs = dict[str, Any](), double.sequence(sample(0, 4))

    def set_up() -> None:
        module, name = loss["import_path"].rsplit(".", 1)
        found["function"] = getattr(import_module(module), name)

    def call() -> None:
        with patch.object(prime_rl_plugin, "_losses", {}):
            found["function"](inputs, **loss.get("kwargs", {}))

    yield IMPORTED, set_up
    yield CALLED, call
