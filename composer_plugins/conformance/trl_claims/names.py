"""Every trainer of the installed TRL and every loss it lets one choose, read from its source.

What no claim covers is a row too: with the reason, if one is known here, or as a loss that we lack.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from composer_plugins.conformance.claims import Absent, Claim, Compared, Place
from composer_plugins.losses.row import Kind
from composer_plugins.testing.draws import Draw

OPTIONS = (
    "loss_type",
    "distillation_mode",
    "f_divergence_type",
    "importance_sampling_level",
    "multi_objective_aggregation",
    "scale_rewards",
    "vllm_importance_sampling_mode",
)

NO_KERNEL = "no kernel: "
UNKNOWN = "this version of composer-plugins does not know it"
UNION = NO_KERNEL + "the union of two supports"
NOT_PUBLISHED = NO_KERNEL + "this combination is not published"
SAME_AS_SDPO = "calls SDPO's loss_utils, a file equal to this trainer's"
ONLINE = "computed inside training_step, after generation; the formula is DPOTrainer's"

# The file of each trainer with a loss of its own.
FILES = {
    **{
        f"{name.upper()}Trainer": f"trainer/{name}_trainer.py"
        for name in ("grpo", "rloo", "dpo", "kto", "sft")
    },
    "DistillationTrainer": "trainer/distillation_trainer.py",
    **{
        f"{name.upper()}Trainer": f"experimental/{name}/{name}_trainer.py"
        for name in ("gmpo", "cpo", "orpo", "tpo", "gkd", "gold", "sdpo", "a2po")
    },
    "IWOPDTrainer": "experimental/iw_opd/iw_opd_trainer.py",
    "ServerDistillationTrainer": "experimental/server_distillation/server_distillation_trainer.py",
}

# Of a trainer: an option and its value, or (an empty name) a loss that no option of these chooses.
NOT_COMPARED: dict[str, dict[tuple[str, str], str]] = {
    FILES["GRPOTrainer"]: {
        ("", "loss_type=cispo, importance_sampling_level=sequence"): NOT_PUBLISHED + "; TRL warns of it",
        ("", "loss_type=sapo, importance_sampling_level=sequence"): NOT_PUBLISHED,
    },
    FILES["CPOTrainer"]: {("loss_type", "kto_pair"): "named in a warning, not a loss of CPOTrainer"},
    FILES["GOLDTrainer"]: {
        ("", "use_extended_uld"): NO_KERNEL + "tokens of two tokenizers merged where their bytes end",
        ("", "uld_use_hybrid_loss"): NO_KERNEL + "ULD and a JSD of the tokens that two vocabularies share",
    },
    FILES["IWOPDTrainer"]: {("", "top_k with 0 < beta < 1"): UNION},
    FILES["ServerDistillationTrainer"]: {("", "0 < beta < 1"): UNION},
    FILES["SDPOTrainer"]: {
        ("scale_rewards", "batch"): "GRPOTrainer's advantages again",
        ("scale_rewards", "none"): "GRPOTrainer's advantages again",
    },
    FILES["SFTTrainer"]: {
        ("loss_type", "dft"): NO_KERNEL + "supervised fine-tuning weighted by probability",
        ("loss_type", "nll"): "the model's own cross-entropy; DPOTrainer's sft, the same mean, is compared",
    },
    "experimental/async_distillation/async_distillation_trainer.py": {
        ("", ""): "ServerDistillationTrainer's sparse losses again, from packed rows"
    },
    "experimental/async_grpo/async_grpo_trainer.py": {
        ("", ""): "GRPOTrainer's clip again, from packed rows, over a global count of tokens"
    },
    "experimental/sdft/sdft_trainer.py": {
        ("distillation_mode", mode): SAME_AS_SDPO for mode in ("full_logits", "sampled_token", "topk_logits")
    },
    "experimental/online_dpo/online_dpo_trainer.py": {
        ("loss_type", name): ONLINE for name in ("ipo", "sigmoid")
    },
    FILES["A2POTrainer"]: {
        ("", "loss"): NO_KERNEL + "a regression of whole completions on the advantage that is compared"
    },
    "trainer/reward_trainer.py": {("", ""): NO_KERNEL + "it trains a reward model"},
}


# Trainers without a loss of their own.
NO_LOSS = ("trainer/base_trainer.py", "experimental/bema_for_ref_model/dpo_trainer.py")


def claim(
    kind: Kind,
    ours: str,
    trainer: str,
    loss: str,
    compare: Callable[[Draw], Iterable[Compared]],
    note: str = "",
    /,
    **options: str,
) -> Claim:
    """The claim about a loss of a trainer; `options` are the trainer's own that choose it."""
    return Claim(kind, ours, f"{trainer} {loss}".strip(), Place(FILES[trainer], options), compare, note)


def root() -> Path:
    """The folder of the installed TRL."""
    return Path(str(getattr(find_spec("trl"), "origin", ""))).parent


def compared_with(source: str) -> dict[str, set[str]]:
    """The strings that some source compares each option, a variable or an attribute, with."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        names = {getattr(x, "attr", getattr(x, "id", "")) for x in ast.walk(node.left)}
        for option in names.intersection(OPTIONS):
            constants = [c for x in node.comparators for c in ast.walk(x) if isinstance(c, ast.Constant)]
            if values := {c.value for c in constants if isinstance(c.value, str)}:
                found.setdefault(option, set()).update(values)
    return found


@cache
def found() -> dict[str, dict[str, set[str]]]:
    """By trainer file of the installed TRL: the values that it compares each option with."""
    files = root().glob("**/*_trainer.py")
    return {path.relative_to(root()).as_posix(): compared_with(path.read_text()) for path in files}


def is_there(place: Place) -> bool:
    """Whether the installed TRL has this trainer, with these values of its options."""
    options = found().get(place.where)
    return options is not None and all(
        value in options.get(option, ()) for option, value in place.options.items()
    )


def absent(claims: Iterable[Claim]) -> Iterator[Absent]:
    """What the installed TRL has and no claim compares."""
    places = [claim.place for claim in claims]
    for file, options in sorted(found().items()):
        if file in NO_LOSS:
            continue
        reasons, trainer = NOT_COMPARED.get(file, {}), Path(file).stem
        covered = {item for place in places if place.where == file for item in place.options.items()}
        values = {(option, value) for option in options for value in options[option]} - covered
        values |= {key for key in reasons if key[0] == ""}
        if not values and not any(place.where == file for place in places):
            values = {("", "")}
        for option, value in sorted(values):
            reason = reasons.get((option, value), NO_KERNEL + UNKNOWN)
            named = f"{option}={value}" if option else value
            missing = reason.startswith(NO_KERNEL)
            yield Absent(f"{trainer} {named}".strip(), reason.removeprefix(NO_KERNEL), missing)
