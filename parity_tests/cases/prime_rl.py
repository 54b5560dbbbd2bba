"""Mistakes in an rl.toml of PRIME-RL, and in an environment that stamps.

The doctor reads the file with a double of an interpreter in which all is installed. The trainer is a double
too: it imports the function that the file names, and calls it with the LossInputs of that version.
"""

import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from composer_plugins.adapters import prime_rl_plugin
from composer_plugins.adapters.prime_rl_plugin import doctor
from composer_plugins.adapters.prime_rl_plugin import loss as prime_rl_loss
from composer_plugins.adapters.prime_rl_plugin.stamps import check_trace, stamp_reference, stamp_replay_pair
from composer_plugins.adapters.prime_rl_plugin.store import StoreWriter
from composer_plugins.conformance.prime_rl_claims.packs import packed
from composer_plugins.diagnosis import Target
from parity_tests.adapters.prime_rl_plugin.test_contract import sample
from parity_tests.adapters.prime_rl_plugin.test_doctor import (
    ECHO,
    FILTERS,
    FUNCTION,
    HINT,
    OFF,
    POLICY,
    REPLAY,
    SIZE,
    edited,
    facts,
)
from parity_tests.cases.recorded import Row, Stage, findings_in_words, replaced, said
from parity_tests.rigs import prime_rl_doubles as double
from parity_tests.rigs.prime_rl_nodes import Branch, Trace, answer, prompt

CALLED, IMPORTED = "the first call of the loss", "setting up the loss, after the model is loaded"
STAMPED = "in the environment, where it stamps"
LATER = f"after {prime_rl_loss.PATIENCE} sequences"
SCRATCH = tempfile.TemporaryDirectory()
MODULE = "composer_plugins.adapters.prime_rl_plugin"


class Case(NamedTuple):
    """A mistake in the file, or, with `stamps`, in an environment's code."""

    name: str
    change: str
    edits: tuple[tuple[str, str], ...] = ()
    more: str = ""
    version: str = "559b447"
    answers: tuple[tuple[str, Any], ...] = ()  # what the interpreter answers, where not all is well
    stamps: Callable[[], Any] | None = None
    # What reaches the loss: sequences without references, or with them; "": it is not called with these
    # samples; "advantages by token"; "elsewhere": it runs in an interpreter that does not have the package.
    called_with: str = "no reference"
    why: str = ""  # why the trainer says nothing


REJECTED = "nothing: PRIME-RL rejects the file when it reads it"


def node(count: int = 3) -> Any:
    return answer([1, 2, 3, 4, 5][: count + 2], [-0.5] * count)


def kwargs(name: str, change: str) -> Case:
    """A mistake in one line of [trainer.loss.kwargs], in place of all others there."""
    edits = ((HINT, ""), (REPLAY, ""), (POLICY, change.replace("; ", "\n")))
    return Case(name, change, edits, answers=(("plugins", {"my-env": ["stamp_reference"]}),))


CASES: tuple[Case, ...] = (
    kwargs("a misspelt option", "hint_wieght = 0.1"),
    kwargs("a misspelt loss", 'policy = "cipso"'),
    kwargs("a misspelt dialect", 'policy = "gspo@tlr"'),
    kwargs("a misspelt parameter", 'policy = "dppo_tv"; policy_params = { tv_hihg = 0.3 }'),
    kwargs("a parameter of the loss beside it", 'policy = "dppo_tv"; tv_high = 0.3'),
    kwargs("PRIME-RL's name of a parameter", "dppo_mask_high = 0.3"),
    kwargs("an option of PRIME-RL's default beside another loss", 'policy = "cispo"; kl_tau = 0.001'),
    kwargs(
        "verl's name of a parameter",
        'policy = "grpo"; old_policy = "rollout"; policy_params = { clip_ratio_c = 3.0 }',
    ),
    kwargs(
        "a clip of 28 for 28 percent",
        'policy = "dapo"; old_policy = "rollout"; policy_params = { clip_high = 28 }',
    ),
    kwargs(
        "PPO's clip beside a ratio of the sequence",
        'policy = "gspo_token@verl"; old_policy = "rollout"; policy_params = { clip_high = 0.28 }',
    ),
    kwargs("PRIME-RL's bound of 10 for no mask, misplaced", "policy_params = { dppo_mask_high = 10.0 }"),
    kwargs("a percentage", 'policy = "grpo"; old_policy = "rollout"; policy_params = { clip_low = 20 }'),
    kwargs("a number as a string", 'hint_weight = "0.1"'),
    kwargs("a negative weight", "hint_weight = -0.1"),
    kwargs("all weights 0", "policy_weight = 0"),
    kwargs("a preference loss as the policy", 'policy = "dpo"'),
    kwargs("a dotted path", 'policy = "my_package.losses.my_loss"'),
    kwargs("a loss that does not import", 'policy = "my_package.losses:my_loss"'),
    kwargs("a loss over the whole batch", 'policy = "clip_cov"'),
    kwargs("a loss that needs the top k", 'policy = "dppo_topk_tv"'),
    kwargs("PPO without an old policy", 'policy = "grpo@trl"'),
    kwargs("an old policy beside a loss that has none", 'old_policy = "rollout"'),
    kwargs("a ratio that is always 1", 'policy = "cispo"; old_policy = "current"'),
    kwargs("a correction counted twice", 'rollout_correction = "tis"'),
    kwargs("an advantage, as in verl", 'advantage = "rloo"'),
    kwargs("a teacher, as in TRL", 'hint_weight = 0.1; hint_teacher = "ema"'),
    kwargs("a divergence over the vocabulary", 'hint_weight = 0.1; hint_divergence = "jsd"'),
    kwargs("a top k, as in verl", "hint_weight = 0.1; hint_top_k = 100"),
    kwargs("a preference loss for the pairs, as in TRL", 'replay_weight = 1.0; replay_loss = "simpo"'),
    kwargs("beta at the loss, and not at the stamp", "replay_weight = 1.0; replay_params = { beta = 0.3 }"),
    kwargs("an option of the hint without its weight", 'hint_estimator = "k3"'),
    kwargs(
        "a hint in the advantages of a loss per sequence",
        'policy = "gspo"; old_policy = "rollout"; hint_weight = 0.1; hint_estimator = "advantage"',
    ),
    kwargs(
        "adv_tau beside a hint in the advantages, which it scales too",
        'policy_params = { adv_tau = 0.5 }; hint_weight = 0.1; hint_estimator = "advantage"',
    ),
    kwargs("a policy that trains nothing", "policy_params = { adv_tau = 0, kl_tau = 0 }"),
    kwargs("an option of icepop beside the default policy", "ratio_low = 0.2"),
    Case(
        "advantages by token beside a loss per sequence",
        'policy = "gspo"',
        ((HINT, ""), (REPLAY, ""), (POLICY, 'policy = "gspo"\nold_policy = "rollout"')),
        answers=(("plugins", {"my-env": []}),),
        called_with="advantages by token",
    ),
    kwargs("a loss that is reduced in another way", 'policy = "gspo"; old_policy = "rollout"'),
    kwargs("score centering in an old version", 'policy = "ipo_centered"'),
    Case(
        "a colon in the import path",
        f'import_path = "{MODULE}:loss_fn"',
        (("prime_rl_plugin.loss_fn", "prime_rl_plugin:loss_fn"),),
    ),
    Case("no module in the import path", 'import_path = "loss_fn"', ((FUNCTION, 'import_path = "loss_fn"'),)),
    Case(
        "a misspelt function",
        f'import_path = "{MODULE}.loss_fun"',
        (("prime_rl_plugin.loss_fn", "prime_rl_plugin.loss_fun"),),
        answers=(("loss", ["attribute", ["loss_fn", "dppo"]]),),
    ),
    Case(
        "a policy beside a function that has one",
        f'import_path = "{MODULE}.cispo"; policy = "dppo_tv@prime-rl"',
        (("prime_rl_plugin.loss_fn", "prime_rl_plugin.cispo"),),
    ),
    Case(
        "the package is not installed where the trainer runs",
        "doctor rl.toml --python /trainer/bin/python",
        answers=(("package", "ModuleNotFoundError: No module named 'composer_plugins'"),),
        called_with="elsewhere",
    ),
    Case(
        "the package is importable from the clone's root only",
        "cd composer-plugins && doctor rl.toml --python /trainer/bin/python",
        answers=(("only_in", "/home/me/composer-plugins"),),
        called_with="elsewhere",
    ),
    Case("a pair on v0.6", "replay_weight = 1  # PRIME-RL 0.6.0", ((HINT, ""),), version="0.6.0"),
    Case("a hint on v0.6", "hint_weight = 0.1  # PRIME-RL 0.6.0", ((REPLAY, ""),), version="0.6.0"),
    Case(
        "a pair on the newest, whose divisor cancels it",
        "replay_weight = 1  # PRIME-RL of September 2026",
        ((HINT, ""),),
        version="HEAD",
    ),
    Case(
        "equal rewards are dropped, and with them the hint",
        OFF.replace("false", "true"),
        ((OFF, OFF.replace("false", "true")),),
        called_with="",
        why="nothing: these samples never reach it",
    ),
    Case(
        "nothing stamps a hint",
        "no stamp_reference in the environment",
        ((REPLAY, ""),),
        answers=(("plugins", {"my-env": []}),),
    ),
    Case(
        "an environment stamps pairs, and no weight trains them",
        "# replay_weight = 1",
        ((REPLAY, ""),),
        called_with="references",
        why="nothing: the metric composer/replay/token_frac shows the tokens that train nothing",
    ),
    Case(
        "an algorithm with a loss of its own",
        'orchestrator.algo.type = "opsd"',
        (('"grpo"', '"opsd"'), (REPLAY, "")),
        called_with="",
        why="nothing: PRIME-RL trains these samples without calling the loss",
    ),
    Case(
        "the echo filter, and the zero-advantage filter left on",
        "enforce = true  # PRIME-RL 0.8.0",
        (('"grpo"', ECHO),),
        more=f"{FILTERS}enforce = true",
        version="0.8.0",
        called_with="",
        why="nothing: these samples never reach it",
    ),
    Case(
        "groups of one completion",
        "[orchestrator]; group_size = 1",
        ((SIZE, "group_size = 1"), (HINT, ""), (REPLAY, ""), (OFF, "")),
        called_with="",
        why="nothing: these samples never reach it",
        answers=(("plugins", {"my-env": []}),),
    ),
    Case(
        "a misspelt size of the group",
        "[orchestrator]; group_sise = 8",
        ((SIZE, "group_sise = 8"), (HINT, ""), (REPLAY, ""), (OFF, "")),
        called_with="",
        why=REJECTED,
        answers=(("plugins", {"my-env": []}),),
    ),
    Case(
        "a misspelt table",
        "[trainer.los]",
        (("[trainer.loss]", "[trainer.los]"), ("[trainer.loss.kwargs]", "[trainer.los.kwargs]")),
        why=REJECTED,
    ),
    Case(
        "a misspelt table of options",
        "[trainer.loss.kwarg]  # PRIME-RL 0.5.0",
        (("[trainer.loss.kwargs]", "[trainer.loss.kwarg]"),),
        version="0.5.0",
        why="nothing: PRIME-RL 0.5 does not pass it on; later versions reject it",
    ),
    Case(
        "a loss at the top of a file for `rl`",
        "[loss]",
        (("[trainer.loss]", "[loss]"), ("[trainer.loss.kwargs]", "[loss.kwargs]")),
        why=REJECTED,
    ),
    Case(
        "a misspelt option of the echo filter",
        "filter.kwargs.sotre  # PRIME-RL 0.8.0",
        (('"grpo"', ECHO.replace("kwargs.store", "kwargs.sotre")),),
        more=f"{FILTERS}enforce = false",
        version="0.8.0",
        called_with="",
        why="nothing: the orchestrator ends with a TypeError at the first rollout",
    ),
    Case(
        "a store that is not there",
        'filter.kwargs.store = "pair.store"  # PRIME-RL 0.8.0',
        (('"grpo"', ECHO.replace("pairs.store", "pair.store")),),
        more=f"{FILTERS}enforce = false",
        version="0.8.0",
        called_with="",
        why="nothing: the orchestrator ends with this error at the first rollout",
    ),
    Case(
        "log-probabilities of another length",
        "stamp_reference(node, scores[:-1])",
        stamps=lambda: stamp_reference(node(), [-0.5, -0.5]),
    ),
    Case(
        "probabilities in place of log-probabilities",
        "stamp_reference(node, probabilities)",
        stamps=lambda: stamp_reference(node(), [0.9, 0.5, 0.3]),
    ),
    Case(
        "a log-probability that is NaN",
        "stamp_reference(node, scores)",
        stamps=lambda: stamp_reference(node(), [float("nan"), -0.5, -0.5]),
    ),
    Case(
        "a teacher that answered 0 everywhere",
        "stamp_reference(node, [0.0] * n)",
        stamps=lambda: stamp_reference(node(), [0.0] * 3),
    ),
    Case(
        "a stamp on the prompt",
        "stamp_reference(prompt, scores)",
        stamps=lambda: stamp_reference(prompt(1, 2), [-0.5, -0.5]),
    ),
    Case(
        "a pair without references",
        "stamp_replay_pair(chosen, rejected)",
        stamps=lambda: stamp_replay_pair([node()], [node()]),
    ),
    Case(
        "a pair with a negative beta",
        "stamp_replay_pair(chosen, rejected, beta=-0.1)",
        stamps=lambda: _pair(beta=-0.1),
    ),
    Case("chosen equals rejected", "stamp_replay_pair(completion, completion)", stamps=lambda: _pair()),
    Case("half of a branch stamped", "stamp_reference(first_turn, scores)", stamps=lambda: _half()),
    Case("a store with one value too few", "writer.put(token_ids, logprobs[1:])", stamps=lambda: _store()),
)


def _pair(**given: Any) -> None:
    nodes = [node(), node()]
    for one in nodes:
        stamp_reference(one, [-0.5] * 3)
    stamp_replay_pair(nodes[:1], nodes[1:], **given)


def _half() -> None:
    nodes = [node(), node()]
    stamp_reference(nodes[0], [-0.5] * 3)
    check_trace(Trace([Branch([prompt(1), nodes[0], prompt(2), nodes[1]])]))


def _store() -> None:
    with StoreWriter(Path(SCRATCH.name) / "pairs.store") as writer:
        writer.put([1, 2, 3], [-0.5, -0.5], "reference")


def row(case: Case) -> Row:
    """Make the mistake and write down what is said."""
    if case.stamps is not None:
        return Row(case.name, case.change, "", *said([(STAMPED, case.stamps)]))
    text = edited(*case.edits, more=case.more)
    file = Path(SCRATCH.name) / "rl.toml"
    file.write_text(text)
    StoreWriter(Path(SCRATCH.name) / "pairs.store").close()
    with chdir(SCRATCH.name), patch.object(doctor, "ask", lambda *_: facts(**dict(case.answers))):
        found = doctor.examine([file], Target("python", case.version)).findings
    newer = [one for one in found if one.key == "prime-rl"]  # which is said of every file
    told = findings_in_words(one for one in found if one not in newer)
    made = Row(case.name, case.change, told, *said(_stages(tomllib.loads(text), case)), case.why)
    return replaced(made, {sys.executable: "python", SCRATCH.name: "DIR"})


def _stages(config: dict[str, Any], case: Case) -> Iterator[Stage]:
    """What PRIME-RL does with the loss of this file."""
    loss, found = doctor.table(config, "trainer", "loss"), dict[str, Any]()
    if not loss:  # PRIME-RL trains with its own
        return

    def set_up() -> None:
        if case.called_with == "elsewhere":
            command = [sys.executable, "-I", "-S", "-c", f"import {MODULE}"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=SCRATCH.name)
            raise ModuleNotFoundError(done.stderr.strip().rpartition("ModuleNotFoundError: ")[2])
        module, name = loss["import_path"].rsplit(".", 1)
        found["function"] = getattr(import_module(module), name)

    yield IMPORTED, set_up
    if not case.called_with:
        return
    version = {"559b447": "0.8.0"}.get(case.version, case.version)
    generation = double.AFTER_559B447 if version == "HEAD" else double.GENERATIONS[f"v{version}"]
    samples = [sample(0, 4, reference=case.called_with == "references")]
    inputs = double.inputs_of(generation, packed(samples), 0)
    if case.called_with == "advantages by token":
        inputs.advantages = torch.linspace(-1, 1, len(inputs.advantages))

    def call(times: int = 1) -> None:
        with warnings.catch_warnings(), patch.object(prime_rl_plugin, "_losses", {}):
            warnings.filterwarnings("ignore", "prime-rl: it is newer")
            if times > 1:  # what the first call warned of
                warnings.filterwarnings("ignore", "(?!.*came with the first)")
            with patch.object(prime_rl_loss.upstream, "installed", lambda: version):
                for _ in range(times):
                    found["function"](inputs, **loss.get("kwargs", {}))

    yield CALLED, call
    yield LATER, lambda: call(prime_rl_loss.PATIENCE)
