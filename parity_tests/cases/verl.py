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

from composer_plugins.adapters.verl_plugin import doctor, upstream
from composer_plugins.adapters.verl_plugin import options as verl_options
from composer_plugins.adapters.verl_plugin.sync_trainer.checks import Run, diagnosed
from composer_plugins.frameworks.verl import Key
from composer_plugins.objective.registered import is_ours
from composer_plugins.recipes.verl.on_a_cpu import tiny
from parity_tests.cases.recorded import Row, Stage, findings_in_words, said
from parity_tests.cases.verl_config import FACTS, LIVE, MISTAKES, SAMPLED, SYNC, actor, changed, node
from parity_tests.rigs.verl_trainer import checked, on_tiny_files, replace_columns

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


# Of these the trainer says nothing: our functions are not called, or they see their own options only.
SILENT = {
    "options that nothing reads",
    "nothing of ours",
    "a critic",
    "an advantage beside another estimator",
    "a policy beside verl's loss",
    "an advantage that only the workers see",
    "a policy in the workers beside verl's loss",
    "DPPO around the trainer's policy",
    "DPPO without the engine's log-probabilities",
}
CASES: tuple[Case, ...] = (
    *(Case(name, changes) for name, changes in MISTAKES.items()),
    Case("a misspelt option of the actor", SYNC | actor(clip_ratio_hgh=0.28)),
    Case("a data set without hints", LIVE, {"privileged_context": None}),
    Case("an empty hint", LIVE, {"privileged_context": ["ok", " "]}),
    Case("a hint that is a number", LIVE, {"privileged_context": [7.0]}),
    Case("a hint longer than the model takes", LIVE, {"privileged_context": ["x" * 600]}),
    Case("a prompt that is not messages", LIVE, {"prompt": ["1+1"] * 16}),
    Case("a prompt without a user", LIVE, {"prompt": [[{"role": "system", "content": "1+1"}]] * 16}),
    Case("a completion longer than the model takes", SIMPO, {"chosen": [None, ["x" * 600, "b"]]}),
    Case("pairs of different number", SIMPO, {"rejected": [None, ["a"]]}),
    Case("an empty completion", SIMPO, {"chosen": [None, ["", "b"]]}),
    Case("a negative weight of a pair", SIMPO, {"n_teachers_agreeing": [None, [1.0, -1.0]]}),
    Case("a data file that does not exist", SAMPLED | {"data.train_files": "/data/trian.parquet"}),
)


@cache
def _base() -> dict[str, Any]:
    """verl's config for tiny files, as main_ppo composes and resolves it."""
    tiny.make(Path(SCRATCH.name))
    tree: Any = OmegaConf.to_container(on_tiny_files(Path(SCRATCH.name)), resolve=True)
    return dict(tree)


def tree_of(case: Case) -> dict[str, Any]:
    """The config with the mistake in it."""
    tree = deepcopy(_base())
    changes = dict(case.changes)
    if case.columns:
        file = Path(SCRATCH.name) / "wrong.parquet"
        replace_columns(Path(SCRATCH.name), file, dict(case.columns))
        changes |= {"data.train_files": str(file), "data.val_files": str(file)}
    return changed(tree, changes)


def row(case: Case) -> Row:
    """Make the mistake and write down what is said."""
    tree = tree_of(case)
    refused = upstream.validation_error(tree)
    with patch.object(upstream, "validation_error", return_value=refused):  # it takes a while
        facts = {**FACTS, **diagnosed(tree), "config": tree}
    found = doctor.judge(facts, "python")
    may_be_silent = case.name in SILENT
    return Row(case.name, findings_in_words(found), *said(_stages(tree, refused)), may_be_silent)


def _stages(tree: dict[str, Any], refused: str) -> Iterator[Stage]:
    def check() -> None:
        if refused:
            raise Refusal(refused)

    yield CHECKED, check
    run, made = Run(tree), dict[str, Any]()
    delivers = run.trainer == verl_options.TRAINER

    if run.trainer:
        yield FOUND, lambda: get_trainer_cls(run.trainer)
    if delivers:
        yield MADE, lambda: made.update(trainer=get_trainer_cls(run.trainer)(OmegaConf.create(tree)))
        yield READ, lambda: checked(made["trainer"])
    numbers, mask = torch.full((4, 3), -1.0), torch.ones(4, 3)
    groups = [str(i // run.at(Key.GROUP_SIZE)) for i in range(4)]

    def advantages() -> None:
        estimator = get_adv_estimator_fn(run.estimator)
        if is_ours(run.estimator):
            given = {"token_level_rewards": numbers, "response_mask": mask, "index": groups}
            keys = [f"{uid}_{i}_0" for i, uid in enumerate(groups)]
            with verl_options.under_composer_sync(keys) if delivers else nullcontext():
                estimator(**given, config=OmegaConf.create(tree).algorithm)

    def update() -> None:
        actor = omega_conf_to_dataclass(OmegaConf.create(tree["actor_rollout_ref"]["actor"]))
        loss = get_policy_loss_fn(run.loss)
        if is_ours(run.loss):
            given = {"old_log_prob": numbers, "log_prob": numbers.clone().requires_grad_()}
            given |= {"advantages": mask, "response_mask": mask}
            with verl_options.under_composer_sync() if delivers else nullcontext():
                loss(**given, loss_agg_mode=actor.loss_agg_mode, config=actor)

    yield ADVANTAGES, advantages
    yield UPDATE, update
