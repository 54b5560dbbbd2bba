"""Mistakes in a config or a data set of verl: the real config, registries and composer_sync, on tiny files.

Most cases are those of verl_config.py. The trainer is made as far as its workers; where verl's own trainer
runs, our estimators and losses are called as verl calls them.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass

from composer_plugins.adapters.verl_plugin import doctor, estimators, surface, upstream
from composer_plugins.adapters.verl_plugin.doctor import probe
from composer_plugins.adapters.verl_plugin.doctor.options import diagnosed
from composer_plugins.adapters.verl_plugin.sync_trainer.checks import Run
from composer_plugins.diagnosis import Target
from composer_plugins.frameworks.verl import Key
from composer_plugins.objective.registered import is_ours
from composer_plugins.recipes.verl.on_a_cpu import tiny
from parity_tests.cases.recorded import Row, Stage, findings_in_words, replaced, said
from parity_tests.cases.verl_config import (
    FACTS,
    LIVE,
    MISTAKES,
    OURS,
    SAMPLED,
    SYNC,
    actor,
    algorithm,
    changed,
    correction,
    node,
)
from parity_tests.rigs.verl_trainer import checked, composed, on_tiny_files, replace_columns

CHECKED, FOUND = "main_ppo, before Ray starts", "looking up the trainer"
MADE, READ = "making the trainer, before a worker starts", "reading the data, before a worker starts"
ADVANTAGES, UPDATE = (
    "the first advantages, after the first rollout",
    "the first update, after the first rollout",
)
SCRATCH = tempfile.TemporaryDirectory()
SIMPO = SYNC | node(replay_weight=1.0, replay_loss="simpo")


class Refusal(Exception):
    """What verl's own check raises."""


class Case(NamedTuple):
    """A mistake in verl's config by dotted keys, or in the columns of the data; None removes a column."""

    name: str
    changes: Mapping[str, Any]
    columns: Mapping[str, Any] = {}
    change: str = ""  # as written, where it is not the changes
    why: str = ""  # why the trainer says nothing


def data(name: str, changes: Mapping[str, Any], **columns: Any) -> Case:
    """A mistake in the first rows of the data."""
    change = ", ".join(f"{key}: {'absent' if x is None else x[:2]}" for key, x in columns.items())
    return Case(name, changes, columns, change.replace("x" * 600, "xxx..."))


# Mistakes of which verl's own trainer says nothing, and why; our functions are not called, or see no more.
NOT_CALLED = "nothing: verl's own estimator and loss run"
OWN_OPTIONS = "nothing: our functions see their own options only"
WHY = {
    "options that nothing reads": NOT_CALLED,
    "nothing of ours": NOT_CALLED,
    "no rollout engine": "nothing: verl raises when its workers start",
    "our trainer in the legacy trainer": "nothing: verl's legacy trainer runs",
}
SAYS_NOTHING = """
a critic; a rollout correction without log-probabilities; a loss type of bypass_mode;
a rollout correction with bypass_mode; an advantage beside another estimator;
bad rewards beside another estimator; a policy beside verl's loss;
an advantage that only the workers see; a policy in the workers beside verl's loss;
an advantage that is not the paper's; verl's advantage beside a loss whose paper has another;
DPPO around the trainer's policy; DPPO without the engine's log-probabilities;
a bypass without the engine's log-probabilities; a width of micro-batches;
verl's own loss beside a correction that only another reads; a KL whose gradient has no reference;
a cut distribution beside a ratio to it; dropped groups in the legacy trainer
"""
WHY |= {" ".join(name.split()): OWN_OPTIONS for name in SAYS_NOTHING.split(";")}
CASES: tuple[Case, ...] = (
    *(Case(name, changes, why=WHY.get(name, "")) for name, changes in MISTAKES.items()),
    Case("a rejection without its threshold", SYNC | correction(rollout_rs="token_k1")),
    *(
        Case(name, OURS | changes, why="nothing: verl raises after the first rollout")
        for name, changes in {
            "a misspelt level of the rollout correction": correction(rollout_is="tokn"),
            "a negative threshold": correction(rollout_is="token", rollout_is_threshold=-1),
            "an unknown KL estimator": actor(use_kl_loss=True, kl_loss_type="k5"),
            "an unknown KL estimator in the reward": algorithm(use_kl_in_reward=True, kl_penalty="kk"),
            "an unknown control of the KL": (
                algorithm(use_kl_in_reward=True) | {"algorithm.kl_ctrl.type": "fix"}
            ),
        }.items()
    ),
    Case("a misspelt option of the actor", SYNC | actor(clip_ratio_hgh=0.28)),
    Case(
        "a misspelt option of the algorithm",
        SYNC | algorithm(norm_adv_by_std=False),
        why="nothing: verl and the trainer read the options that they have",
    ),
    data("a data set without hints", LIVE, privileged_context=None),
    data("a data set without pairs", SIMPO, chosen=None),
    data("an empty hint", LIVE, privileged_context=["ok", " "]),
    data("a hint that is a number", LIVE, privileged_context=[7.0]),
    data("a hint longer than the model takes", LIVE, privileged_context=["x" * 600]),
    data("a prompt that is not messages", LIVE, prompt=["1+1"] * 16),
    data("a prompt without a user", LIVE, prompt=[[{"role": "system", "content": "1+1"}]] * 16),
    data("a prompt longer than verl keeps", LIVE, prompt=[[{"role": "user", "content": "x" * 600}]] * 16),
    data("a completion longer than the model takes", SIMPO, chosen=[None, ["x" * 600, "b"]]),
    data("pairs of different number", SIMPO, rejected=[None, ["a"]]),
    data("an empty completion", SIMPO, chosen=[None, ["", "b"]]),
    data("a negative weight of a pair", SIMPO, n_teachers_agreeing=[None, [1.0, -1.0]]),
    Case("a data file that does not exist", SAMPLED | {"data.train_files": "/data/trian.parquet"}),
    Case("a top k larger than the vocabulary", LIVE | node(hint_divergence="jsd", hint_top_k=100000)),
)


@cache
def _base() -> tuple[dict[str, Any], dict[str, Any]]:
    """verl's config for tiny files, as main_ppo composes and resolves it, and verl's own."""
    tiny.make(Path(SCRATCH.name))
    tree: Any = OmegaConf.to_container(on_tiny_files(Path(SCRATCH.name)), resolve=True)
    own: Any = OmegaConf.to_container(composed(*probe.OURS))
    return dict(tree), dict(own)


def tree_of(case: Case) -> dict[str, Any]:
    """The config with the mistake in it."""
    tree = deepcopy(_base()[0])
    changes = dict(case.changes)
    if case.columns:
        file = Path(SCRATCH.name) / "wrong.parquet"
        replace_columns(Path(SCRATCH.name), file, dict(case.columns))
        changes |= {"data.train_files": str(file), "data.val_files": str(file)}
    return changed(tree, changes)


def row(case: Case) -> Row:
    """Make the mistake and write down what is said."""
    tree, release = tree_of(case), FACTS["verl"]["version"]
    refused = upstream.validation_error(tree)
    with patch.object(upstream, "validation_error", return_value=refused):  # it takes a while
        facts = {**FACTS, **diagnosed(tree, release, _base()[1]), "config": tree}
    found = doctor.judge(facts, Target("python", None), upstream.release_of(release))
    stages = _stages(tree, refused[1] if refused else "")
    made = Row(case.name, findings_in_words(found), *said(stages), case.why)
    of_any_order = {"{'sequence', 'token'}": "{'token', 'sequence'}"}  # verl prints a set
    return replaced(made, {SCRATCH.name: "DIR", str(Path.cwd()): "FOLDER"} | of_any_order)


def _stages(tree: dict[str, Any], refused: str) -> Iterator[Stage]:
    def check() -> None:
        if refused:
            raise Refusal(refused)

    yield CHECKED, check
    run, made = Run(tree, upstream.release_of(FACTS["verl"]["version"])), dict[str, Any]()
    delivers = run.trainer == surface.TRAINER

    if run.trainer:
        yield FOUND, lambda: get_trainer_cls(run.trainer)
    if delivers:
        yield MADE, lambda: made.update(trainer=get_trainer_cls(run.trainer)(OmegaConf.create(tree)))
        yield READ, lambda: checked(made["trainer"])
    numbers, mask = torch.full((4, 3), -1.0), torch.ones(4, 3)
    groups = [str(i // run.at(Key.GROUP_SIZE)) for i in range(4)]

    def advantages() -> None:
        estimators.WARNED.clear()
        estimator = get_adv_estimator_fn(run.estimator)
        if is_ours(run.estimator):
            given = {"token_level_rewards": numbers, "response_mask": mask, "index": groups}
            with surface.channels_delivered() if delivers else nullcontext():
                estimator(**given, config=OmegaConf.create(tree).algorithm)

    def update() -> None:
        actor = omega_conf_to_dataclass(OmegaConf.create(tree["actor_rollout_ref"]["actor"]))
        loss = get_policy_loss_fn(run.loss)
        if is_ours(run.loss):
            given = {"old_log_prob": numbers, "log_prob": numbers.clone().requires_grad_()}
            given |= {"advantages": mask, "response_mask": mask}
            with surface.channels_delivered() if delivers else nullcontext():
                loss(**given, loss_agg_mode=actor.loss_agg_mode, config=actor)

    yield ADVANTAGES, advantages
    yield UPDATE, update
