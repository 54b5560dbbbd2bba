"""Mistakes in an rl.toml of PRIME-RL, and in an environment that stamps.

The doctor reads the file with a double of an interpreter in which all is installed. The trainer is a double
too: it imports the function that the file names, and calls it with the LossInputs of that version.
"""

import math
import re
import subprocess
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, nullcontext
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
from composer_plugins.diagnosis import Examination, Target
from composer_plugins.errors import ConfigError
from composer_plugins.findings import Finding
from composer_plugins.frameworks import prime_rl
from parity_tests.cases.recorded import Row, Stage, findings_in_words, in_words, replaced, said
from parity_tests.rigs import prime_rl_doubles as double
from parity_tests.rigs.prime_rl_doubles import sample
from parity_tests.rigs.prime_rl_nodes import Branch, Trace, answer, prompt

CALLED, IMPORTED = "the first call of the loss", "setting up the loss, after the model is loaded"
STAMPED = "in the environment, where it stamps"
LATER = f"after {prime_rl_loss.PATIENCE} sequences"
SCRATCH = tempfile.TemporaryDirectory()
MODULE = "composer_plugins.adapters.prime_rl_plugin"
NEWEST = "559b447"  # the newest that was tested

# --- A file without mistakes, its lines, and the answers of an interpreter ---------------------------------

SOUND = f"""
[model]
name = "Qwen/Qwen3-0.6B"

[orchestrator]
group_size = 8

[orchestrator.algo]
type = "grpo"

[orchestrator.train]
filter_zero_advantages = false

[[orchestrator.train.source]]
name = "mine"
env.taskset.id = "my-env"

[trainer.loss]
type = "custom"
import_path = "{MODULE}.loss_fn"

[trainer.loss.kwargs]
policy = "dppo_tv@prime-rl"
hint_weight = 0.1
replay_weight = 1
"""
FUNCTION = f'import_path = "{MODULE}.loss_fn"'
LOSS = f'type = "custom"\n{FUNCTION}\n'
STAMPS = ["stamp_reference", "stamp_replay_pair"]
POLICY = 'policy = "dppo_tv@prime-rl"'
HINT, REPLAY = "hint_weight = 0.1", "replay_weight = 1"
SOURCE = '[[orchestrator.train.source]]\nname = "mine"\nenv.taskset.id = "my-env"\n'
GRPO = 'type = "grpo"'
OFF = "filter_zero_advantages = false"
STORE = 'store = "pairs.store"'
ECHO = f'type = "echo"\nfilter.import_path = "{MODULE}.stored_stamps.echo_filter"\nfilter.kwargs.{STORE}\n'
MY_ECHO = '"echo"\nfilter.import_path = "my.stamps"'
FILTERS = '[[orchestrator.post_batch_filters]]\ntype = "zero_advantage"\n'
LOGGED = f"{FILTERS}enforce = false"
ABSENT = [None] * len(prime_rl.FEATURES)  # no source was found


def facts(**others: Any) -> dict[str, Any]:
    """What an interpreter without PRIME-RL answers, where everything can be imported."""
    return {
        "prime_rl": [None, ABSENT],
        "only_here": {},
        "package": "",
        "loss": None,
        "rejected": None,
        "plugins": {"my-env": STAMPS},
    } | others


def edited(edits: str, sound: str = SOUND) -> str:
    """A sound file after edits "OLD => NEW & OLD => NEW", or "+ MORE"; "; " stands for a new line."""
    text = sound
    for one in filter(None, edits.replace("; ", "\n").split(" & ")):
        old, _, new = one.partition(" =>")
        assert old in text or old.startswith("+ "), old
        text = f"{text}\n{old[2:]}\n" if old.startswith("+ ") else text.replace(old, new.strip(" "))
    return text


def aged(text: str, version: str | None) -> str:
    """A file without the option that 0.8.0 does not have, if it is for that release."""
    return re.sub(r"(?m)^filter_zero_advantages.*$", "", text) if version == "0.8.0" else text


PLAIN = edited(f"{HINT}\n{REPLAY}\n =>")


def examined(*texts: str, version: str | None = None, python: str = "", **answers: Any) -> Examination:
    """What the doctor finds in files of these texts, in a folder with a store and a file that is not one.

    The interpreter is a double with these answers, unless `python` names one.
    """
    folder = Path(SCRATCH.name)
    files = [folder / f"{number or 'rl'}.toml" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    (folder / "not.store").write_text("nothing of the kind")
    StoreWriter(folder / "pairs.store").close()
    asked = nullcontext() if python else patch.object(doctor, "ask", lambda *_: facts(**answers))
    with chdir(folder), asked:
        return doctor.examine(files, Target(python or "python", version))


def find(text: str, version: str | None = None, **given: Any) -> list[Finding]:
    """The findings in a file of this text."""
    return list(examined(text, version=version, **given).findings)


# --- Kinds of cases ----------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A mistake in the file, or, with `stamps`, in an environment's code."""

    name: str
    change: str
    text: str = ""
    version: str = NEWEST
    answers: Mapping[str, Any] = {}  # what the interpreter answers, where not all is well
    stamps: Callable[[], Any] | None = None
    # What reaches the loss: sequences without references, or with them; "": it is not called with these
    # samples; "advantages by token"; "elsewhere": it runs in an interpreter that does not have the package.
    called_with: str = "no reference"
    why: str = ""  # why the trainer says nothing


# Why the trainer says nothing, by the word in a table. With the first five it does not call our loss.
WHY = {
    "rejected": "nothing: PRIME-RL rejects the file when it reads it",
    "dropped": "nothing: these samples never reach it",
    "theirs": "nothing: PRIME-RL trains these samples without calling the loss",
    "own": "nothing: PRIME-RL trains with its own loss",
    "elsewhere": "nothing: this is not a file that it reads, or not a version that it has",
    "unseen": "nothing: it does not see what the orchestrator does",
}
NOT_CALLED = list(WHY)[:5]
NO_STAMPS, HINTS = {"my-env": list[str]()}, {"my-env": ["stamp_reference"]}


def at(version: str) -> str:
    """The version of PRIME-RL as a comment on the change."""
    return "" if version == NEWEST else f"  # PRIME-RL {version}"


def kwargs(name: str, change: str) -> Case:
    """A mistake in [trainer.loss.kwargs], in place of all lines there."""
    return Case(name, change, PLAIN.replace(POLICY, change.replace("; ", "\n")), answers={"plugins": HINTS})


def edit(
    name: str,
    edits: str = "",
    why: str = "",
    version: str = "",
    *,
    change: str = "",
    called_with: str | None = None,
    sound: str = SOUND,
    **answers: Any,
) -> Case:
    """A mistake in a sound file. It is shown as its new lines, or as those that are gone if none is new."""
    text, version = edited(edits, sound), version or NEWEST
    before, after = sound.splitlines(), text.splitlines()
    new_lines = [line for line in after if line and line not in before]
    shown = change or "; ".join(new_lines or [f"# {line}" for line in before if line not in after])
    called = ("" if why in NOT_CALLED else "no reference") if called_with is None else called_with
    text = aged(text, version)
    return Case(name, shown + at(version), text, version, answers, called_with=called, why=WHY.get(why, why))


def plain(name: str, *given: Any, **named: Any) -> Case:
    """A mistake in the sound file without its hint and its pairs."""
    return edit(name, *given, sound=PLAIN, **{"plugins": NO_STAMPS} | named)


def whole(name: str, text: str, why: str = "rejected", version: str = "") -> Case:
    """A file that is nothing but its mistake."""
    return edit(name, f"+ {text}", why, version, sound="")


def own(name: str, options: str, why: str = "own", version: str = "") -> Case:
    """A loss of PRIME-RL's own with these options."""
    return whole(name, f"[trainer.loss]; {options}", why or "own", version)


def filtered(name: str, options: str, why: str = "") -> Case:
    """A mistake in an option of our echo filter."""
    lines = options.replace("; ", "\nfilter.kwargs.")
    edits = f"{GRPO} => {ECHO.replace(STORE, lines)} & + {LOGGED}"
    return edit(name, edits, why, "0.8.0", change=f"filter.kwargs.{lines}".replace("\n", "; "))


def stamping(name: str, found: str, change: str, edits: str = "", version: str = "") -> Case:
    """A file that asks for other stamps than those whose names are found in the environment's code."""
    code = {"nothing": list[str](), "no code": None}.get(found, found.split())
    return edit(name, edits, "", version, change=change, plugins={"my-env": code})


ADVANTAGE = 'hint_weight = 0.1; hint_estimator = "advantage"'
ICEPOP = 'policy = "reinforce"; rollout_correction = "icepop"'


def rows(table: str) -> Iterator[list[str]]:
    """The lines of a table, cut at " | ", with the texts that several of them have."""
    texts = {"@LOSS": LOSS, "@FILTERS": FILTERS, "@MINE": MY_ECHO, "@ECHO": ECHO}
    texts |= {"@ROLLOUT": 'old_policy = "rollout"', "@ICEPOP": ICEPOP, "@ADVANTAGE": ADVANTAGE}
    for name, text in texts.items():
        table = table.replace(name, text.strip().replace("\n", "; "))
    for line in table.strip().splitlines():
        yield [" ".join(cell.split()) for cell in re.split(r" \|(?= )", line)]


# --- The cases ---------------------------------------------------------------------------------------------

# Lines of [trainer.loss.kwargs].
OPTIONS = """
a misspelt option | hint_wieght = 0.1
a misspelt loss | policy = "cipso"
a misspelt dialect | policy = "gspo@tlr"
a misspelt parameter | policy = "dppo_tv"; policy_params = { tv_hihg = 0.3 }
a parameter of the loss beside it | policy = "dppo_tv"; tv_high = 0.3
PRIME-RL's name of a parameter | dppo_mask_high = 0.3
an option of PRIME-RL's default beside another loss | policy = "cispo"; kl_tau = 0.001
verl's name of a parameter | policy = "grpo"; @ROLLOUT; policy_params = { clip_ratio_c = 3.0 }
a clip of 28 for 28 percent | policy = "dapo"; @ROLLOUT; policy_params = { clip_high = 28 }
PPO's clip beside a ratio of the sequence | policy = "gspo_token@verl"; @ROLLOUT; \
    policy_params = { clip_high = 0.28 }
PRIME-RL's bound of 10 for no mask, misplaced | policy_params = { dppo_mask_high = 10.0 }
a percentage | policy = "grpo"; @ROLLOUT; policy_params = { clip_low = 20 }
a number as a string | hint_weight = "0.1"
a negative weight | hint_weight = -0.1
all weights 0 | policy_weight = 0
a preference loss as the policy | policy = "dpo"
a dotted path | policy = "my_package.losses.my_loss"
a loss that does not import | policy = "my_package.losses:my_loss"
a loss over the whole batch | policy = "clip_cov"
a loss that needs the top k | policy = "dppo_topk_tv"
PPO without an old policy | policy = "grpo@trl"
an old policy beside a loss that has none | old_policy = "rollout"
a ratio that is always 1 | policy = "cispo"; old_policy = "current"
a correction counted twice | rollout_correction = "tis"
an advantage, as in verl | advantage = "rloo"
a teacher, as in TRL | hint_weight = 0.1; hint_teacher = "ema"
what becomes of a NaN reward | policy = "grpo"; on_bad_reward = "zero"
a divergence over the vocabulary | hint_weight = 0.1; hint_divergence = "jsd"
a top k, as in verl | hint_weight = 0.1; hint_top_k = 100
a preference loss for the pairs, as in TRL | replay_weight = 1.0; replay_loss = "simpo"
beta at the loss, and not at the stamp | replay_weight = 1.0; replay_params = { beta = 0.3 }
an option of the hint without its weight | hint_estimator = "k3"
a hint in the advantages of a loss per sequence | policy = "gspo"; @ROLLOUT; @ADVANTAGE
adv_tau beside a hint in the advantages, which it scales too | policy_params = { adv_tau = 0.5 }; @ADVANTAGE
a policy that trains nothing | policy_params = { adv_tau = 0, kl_tau = 0 }
a loss that is reduced in another way | policy = "gspo"; @ROLLOUT
a policy that is misspelt by a letter | policy = "dpo_tv"
a dialect of another framework's name | policy = "dppo_tv@prime"
a parameter as a string | policy_params = { tv_high = "0.1" }
parameters that are no table | policy_params = 3
a weight that is true | hint_weight = true
a weight that is NaN | hint_weight = nan
PPO of the paper without an old policy | policy = "grpo"
an unknown old policy | policy = "grpo"; old_policy = "old"
a correction beside a ratio to the rollout | policy = "grpo"; @ROLLOUT; rollout_correction = "tis"
a misspelt correction | policy = "reinforce"; rollout_correction = "tsi"
a correction without its bound | policy = "reinforce"; rollout_correction = "mis"
a correction over the whole batch | @ICEPOP; rollout_correction_params = { normalise = true }
bounds in the wrong order | @ICEPOP; rollout_correction_params = { low = 6.0 }
parameters of no correction | rollout_correction_params = { cap = 2.0 }
an unknown estimator | hint_weight = 1.0; hint_estimator = "k4"
two estimators | hint_weight = 1.0; hint_estimator = "k2"; hint_params = { estimator = "k3" }
parameters of the hint without its weight | hint_params = {}
parameters of a divergence for a hint in the advantages | @ADVANTAGE; hint_params = { ratio_cap = 2.0 }
a hint in the advantages, times 0 | @ADVANTAGE; policy_params = { adv_tau = 0.0 }
a hint in the advantages of a loss that reads none | @ADVANTAGE; policy = "opd"
a hint in the advantages of no policy | @ADVANTAGE; policy_weight = 0.0
a user's loss that needs logits | policy = "parity_tests.rigs.prime_rl_users:unfed"
a hint in the advantages of gspo@trl | @ADVANTAGE; policy = "gspo@trl"; @ROLLOUT
a hint in the advantages of gmpo | @ADVANTAGE; policy = "gmpo"; @ROLLOUT
a hint in the advantages of luspo | @ADVANTAGE; policy = "luspo"; @ROLLOUT
four mistakes | policy = "cipso"; kl_tau = 0.1; hint_top_k = 4; hint_estimator = "k9"
mistakes of two channels | policy = "grpoo"; hint_params = { x = 1 }; hint_weight = 1.0; replay_loss = "dpo"
two inputs that would have no effect | policy = "dppo_tv"; @ROLLOUT; rollout_correction = "tis"
an unknown option beside inputs without effect | policy = "dppo_tv"; @ROLLOUT; hint_top_k = 3
PRIME-RL's kl_tau | kl_tau = 0.1
PRIME-RL's dppo_mask_low | dppo_mask_low = 0.1
PRIME-RL's dppo_mask_low among the parameters | policy_params = { dppo_mask_low = 0.3 }
PRIME-RL's bound of 10 for no mask | dppo_mask_high = 10.0
PRIME-RL's kl_tau beside cispo | policy = "cispo"; kl_tau = 0.1
"""

# Edits of the file without hint and pairs; why the trainer says nothing; the version.
FILES = """
no import path | import_path => # import_path | rejected
a kernel as the import path | adapters.prime_rl_plugin.loss_fn => kernels.policy.grpo
a stamp as the import path | plugin.loss_fn => plugin.stamps.stamp_reference
a parameter of another policy | loss_fn => cispo & policy = "dppo_tv@prime-rl" => policy_params.tv_low = 0.1
options that are no table | [trainer.loss.kwargs]; policy => kwargs = 3; [trainer.x]; policy | rejected
a misspelt import_path | import_path => import_pth | rejected
no type of the loss | type = "custom" => # no type | rejected
another type beside the import path | "custom" => "default" | rejected
a release before the oldest | [trainer.loss] => # --version 0.7.0; [trainer.loss] | elsewhere | 0.7.0
a version that is a word | [trainer.loss] => # --version newest; [trainer.loss] | elsewhere | newest
a misspelt trainer | [trainer. => [trianer. | rejected
supervised samples | "grpo" => "sft" | theirs
"""

# The same of the file with both.
WITH_BOTH = """
a colon in the import path | prime_rl_plugin.loss_fn => prime_rl_plugin:loss_fn
no module in the import path | composer_plugins.adapters.prime_rl_plugin.loss_fn => loss_fn
a policy beside a function that has one | prime_rl_plugin.loss_fn => prime_rl_plugin.cispo
a misspelt table | [trainer.loss => [trainer.los | rejected
a loss at the top of a file for `rl` | [trainer.loss => [loss | rejected
equal rewards are dropped, and with them the hint | advantages = false => advantages = true | dropped
the filter of equal rewards by default | hint_weight = 0.1 => & filter_zero => # filter_zero | dropped
a gate of the curriculum | env.taskset => curriculum.gates.x.type = "advantage_range"; env.taskset | dropped
an algorithm with a loss of its own | "grpo" => "opsd" & replay_weight = 1 => | theirs
a source with a loss of its own | + [[orchestrator.train.source]]; name = "other"; algo.type = "opd" | theirs
a filter, and nothing said of enforce | "grpo" => @MINE & + @FILTERS | dropped | 0.8.0
the filters as they are by default | "grpo" => @MINE | dropped | 0.8.0
a filter of the batch, in a later release | filter_zero => # filter_zero & + @FILTERS | dropped
the echo filter, and the zero-advantage filter left on | type = "grpo" => @ECHO & + @FILTERS; enforce = true \
    | dropped | 0.8.0
"""

# Options of [trainer.loss] with a loss of PRIME-RL's own.
OWN = """
a type that PRIME-RL does not have | type = "gspo" | rejected
a type that is a table | type = { a = 1 } | rejected
its default | type = "default"
a mask of 10 | type = "default"; dppo_mask_high = 10.0; kl_tau = 0.0
its default without the type | kl_tau = 0.0 | | 0.8.0
a misspelt option of its default | type = "default"; dppo_mask_hihg = 0.3 | rejected | 0.8.0
an option of an older default | type = "default"; ipo_mask_low = 0.3 | rejected | 0.8.0
a string as a bound | type = "default"; dppo_mask_high = "0.3"; kl_tau = 0.1 | rejected | 0.8.0
a misspelt threshold of its ipo | type = "ipo"; ipo_treshold = 0.2 | rejected | 0.8.0
supervised training | type = "sft" | rejected | 0.8.0
"""

# All that is in the file.
WHOLE = """
no loss | [trainer.optim]; lr = 1e-6 | own
a file of another program | [project]; name = 'x' | elsewhere
a trainer that is no table | trainer = 3
a loss that is no table | [trainer]; loss = 3
a list of orchestrators | [trainer.loss]; [[orchestrator]]
a misspelt option of a trainer's own file | [loss]; @LOSS; [loss.kwargs]; polcy = 'cispo'
a hint in a trainer's own file | [loss]; @LOSS; [loss.kwargs]; hint_weight = 0.1 | unseen
a loss at the top beside a deployment | [deployment]; num_train_gpus = 1; [loss]; @LOSS
a loss at the top beside slurm | [slurm]; [loss]; @LOSS
a loss at the top beside inference | [inference]; [loss]; @LOSS
a loss at the top beside the orchestrator | [orchestrator]; group_size = 8; [loss]; @LOSS
a misspelt orchestrator and loss | [orchestator]; group_size = 8; [los]; @LOSS
an orchestrator's own file | group_size = 8; [sampling]; temperature = 0.8; [[env]] | elsewhere
echo in an orchestrator's own file | group_size = 2; algo.type = "echo" | unseen
the file of a server | [model]; name = 'x'; [server]; port = 1; [parallel]; tp = 2 | elsewhere
the file of supervised training | [data]; type = 'sft'; name = 'd'; [model]; name = 'x' | elsewhere
"""

# Options of our echo filter.
FILTER = """
kinds without the hint that is trained | store = "pairs.store"; kinds = ["replay"]
"""


# Names that are found in the environment's code; how a reader sees it; the edits, and the version.
STAMPED_WITH = """
nothing stamps a hint | nothing | no stamp_reference in the environment | replay_weight = 1 =>
nothing stamps a pair | stamp_reference | no stamp_replay_pair in the environment | hint_weight = 0.1 =>
nothing stamps either | nothing | no stamp in the environment
an environment that is not installed | no code | no my-env in the interpreter
an algorithm that stamps nothing | nothing | no stamp in the environment | + @FILTERS; enforce = false | 0.8.0
an echo without a filter | nothing | type = "echo" | "grpo" => "echo" & + @FILTERS; enforce = false | 0.8.0
"""

# Where the interpreter's answers or what reaches the loss are not the usual ones.
OTHERS = (
    plain(
        "advantages by token beside a loss per sequence",
        f'{POLICY} => policy = "gspo"; old_policy = "rollout"',
        change='policy = "gspo"',
        called_with="advantages by token",
    ),
    edit("a misspelt function", "plugin.loss_fn => plugin.loss_fun", loss=["attribute", ["loss_fn", "dppo"]]),
    edit(
        "the package is not installed where the trainer runs",
        change="doctor rl.toml --python /trainer/bin/python",
        package="ModuleNotFoundError: No module named 'composer_plugins'",
        called_with="elsewhere",
    ),
    edit(
        "the package is importable from the clone's root only",
        change="cd composer-plugins && doctor rl.toml --python /trainer/bin/python",
        only_here={"composer_plugins": "/home/me/composer-plugins"},
        called_with="elsewhere",
    ),
)

# --- An environment's code ---------------------------------------------------------------------------------


def node() -> Any:
    """A node of three sampled tokens."""
    return answer([1, 2, 3, 4, 5], [-0.5] * 3)


def hint(*values: float, to: Any = None) -> Callable[[], Any]:
    """A stamp of these values."""
    return lambda: stamp_reference(node() if to is None else to, list(values))


def pair(**given: Any) -> Callable[[], Any]:
    """A pair of two equal completions with references."""

    def stamp() -> None:
        nodes = [node(), node()]
        for one in nodes:
            stamp_reference(one, [-0.5] * 3)
        stamp_replay_pair(nodes[:1], nodes[1:], **given)

    return stamp


def half_of_a_branch() -> None:
    """The first of two turns has a reference."""
    nodes = [node(), node()]
    stamp_reference(nodes[0], [-0.5] * 3)
    check_trace(Trace([Branch([prompt(1), nodes[0], prompt(2), nodes[1]])]))


def too_few_values() -> None:
    """Two values for three tokens."""
    with StoreWriter(Path(SCRATCH.name) / "pairs.store") as writer:
        writer.put([1, 2, 3], [-0.5, -0.5], "reference")


ENVIRONMENTS = (
    ("log-probabilities of another length", "stamp_reference(node, scores[:-1])", hint(-0.5, -0.5)),
    (
        "probabilities in place of log-probabilities",
        "stamp_reference(node, probabilities)",
        hint(0.9, 0.5, 0.3),
    ),
    ("a log-probability that is NaN", "stamp_reference(node, scores)", hint(math.nan, -0.5, -0.5)),
    ("a teacher that answered 0 everywhere", "stamp_reference(node, [0.0] * n)", hint(0.0, 0.0, 0.0)),
    ("a stamp on the prompt", "stamp_reference(prompt, scores)", hint(-0.5, -0.5, to=prompt(1, 2))),
    (
        "a pair without references",
        "stamp_replay_pair(chosen, rejected)",
        lambda: stamp_replay_pair([node()], [node()]),
    ),
    ("a pair with a negative beta", "stamp_replay_pair(chosen, rejected, beta=-0.1)", pair(beta=-0.1)),
    ("chosen equals rejected", "stamp_replay_pair(completion, completion)", pair()),
    ("half of a branch stamped", "stamp_reference(first_turn, scores)", half_of_a_branch),
    ("a store with one value too few", "writer.put(token_ids, logprobs[1:])", too_few_values),
)
TABLES = (
    (OPTIONS, kwargs),
    (FILES, plain),
    (WITH_BOTH, edit),
    (OWN, own),
    (WHOLE, whole),
    (FILTER, filtered),
    (STAMPED_WITH, stamping),
)
CASES: tuple[Case, ...] = (
    *(make(*cells) for table, make in TABLES for cells in rows(table)),
    *OTHERS,
    *(Case(name, change, stamps=stamp) for name, change, stamp in ENVIRONMENTS),
)


def row(case: Case) -> Row:
    """Make the mistake and write down what is said."""
    if case.stamps is not None:
        return Row(case.name, "", *said([(STAMPED, case.stamps)]))
    try:
        found = find(case.text, case.version, **case.answers)
        told = findings_in_words(found)
    except ConfigError as error:
        told = in_words(error)
    made = Row(case.name, told, *said(_stages(case)), case.why)
    return replaced(made, {sys.executable: "python", SCRATCH.name: "DIR"})


def _stages(case: Case) -> Iterator[Stage]:
    """What PRIME-RL does with the loss of this file."""
    if case.why in (WHY["rejected"], WHY["elsewhere"]):
        return
    loss, found = doctor.table(tomllib.loads(case.text), "trainer", "loss"), dict[str, Any]()
    if loss.get("type") != "custom":  # PRIME-RL trains with its own
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
    version = {NEWEST: "0.8.0"}.get(case.version, case.version)
    inputs = double.sequence(sample(0, 4, reference=case.called_with == "references"))
    if case.called_with == "advantages by token":
        inputs.advantages = torch.linspace(-1, 1, len(inputs.advantages))

    def call(times: int = 1) -> None:
        with warnings.catch_warnings(), patch.object(prime_rl_plugin, "_losses", {}):
            if times > 1:  # what the first call warned of
                warnings.filterwarnings("ignore", "(?!.*came with the first)")
            with patch.object(prime_rl_loss.upstream, "installed", lambda: version):
                for _ in range(times):
                    found["function"](inputs, **loss.get("kwargs", {}))

    yield CALLED, call
    yield LATER, lambda: call(prime_rl_loss.PATIENCE)
