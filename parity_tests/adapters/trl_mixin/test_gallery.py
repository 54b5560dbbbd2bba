"""The gallery: its loop, its numbers and its table."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from benchmarks import gallery, gallery_pages
from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig
from composer_plugins.adapters.trl_mixin.mixin import ComposerGRPOTrainer
from composer_plugins.recipes.codebook import task
from composer_plugins.recipes.tiny import ON_A_CPU

UPDATES = 6


@pytest.fixture(scope="module")
def start() -> gallery.Start:
    return gallery.make_start(0, warm_up=40)


class Recorded(ComposerGRPOTrainer):
    """Keeps the inputs of each update."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        vars(self).setdefault("batches", []).append(inputs)
        return super()._compute_loss(model, inputs, *args, **kwargs)


LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "dppo_tv", "rloo", "importance_sampling")


@pytest.mark.parametrize(("name", "iterations"), [("grpo", 1), *((name, 4) for name in LOSSES)])
def test_on_trls_batches_the_weights_become_trls(
    name: str, iterations: int, start: gallery.Start, tmp_path: Path
) -> None:
    model, choice = copy.deepcopy(start.model), gallery.shown(name)
    config = ComposerGRPOConfig(
        policy=name,
        num_iterations=iterations,
        max_steps=UPDATES,
        learning_rate=gallery.LEARNING_RATE,
        num_generations=gallery.GROUP,
        per_device_train_batch_size=gallery.GROUP * gallery.LETTERS,
        max_completion_length=gallery.LENGTH,
        output_dir=str(tmp_path),
        **ON_A_CPU,
    )
    rows = Dataset.from_list(task.codebook_rows(0)[: gallery.LETTERS])
    tokenizer, rewards = task.make_tokenizer(), task.codebook_reward
    trainer = Recorded(
        model=model, args=config, train_dataset=rows, processing_class=tokenizer, reward_funcs=rewards
    )
    trainer.train()
    batches = vars(trainer)["batches"]
    assert len(batches) == UPDATES

    policies = gallery.Policies([start.model])
    for shuffled in batches:
        order = shuffled["prompt_ids"][:, 0].argsort()
        batch = {name: x[order] for name, x in shuffled.items() if x.dim()}
        prompts = batch["prompt_ids"][:: gallery.GROUP][None]
        assert torch.equal(batch["prompt_ids"], prompts[0].repeat_interleave(gallery.GROUP, 0))
        completions = batch["completion_ids"].unflatten(0, (-1, gallery.GROUP))[None]
        own = policies.logprobs(prompts, completions[..., :-1]).detach()
        own = own.gather(-1, batch["completion_ids"][None, ..., None])[..., 0]
        old = own if iterations == 1 else batch["old_per_token_logps"][None]
        given = {"prompts": prompts, "completions": completions}
        given |= {"old_logprobs": old, "rollout_logprobs": old}
        given["mask"] = batch["completion_mask"].bool()[None]
        gallery.update(policies, choice, given | {"advantages": batch["advantages"][None, :, None]})
    moved = 0.0
    for key, weight in model.state_dict(keep_vars=True).items():
        if key in policies.weights:
            torch.testing.assert_close(policies.weights[key][0], weight, atol=1e-4, rtol=0)
            moved = max(moved, float((weight.detach() - start.model.state_dict()[key]).abs().max()))
    assert moved > 2e-3


def test_rewards_and_advantages_are_those_of_the_task(start: gallery.Start) -> None:
    stacked = gallery.Start(start.model, start.prompts[None], start.answers[None])
    policies, drawn = gallery.Policies([start.model]), torch.Generator().manual_seed(0)
    advantage = gallery.choose("advantage", "grpo@trl")
    batch = gallery.rollouts(policies, stacked, torch.zeros(1, 1, 1), drawn, advantage)
    tokenizer = task.make_tokenizer()
    ids = [
        row[: row.index(task.EOS_ID) + 1] if task.EOS_ID in row else row
        for row in batch["completions"][0].flatten(0, 1).tolist()
    ]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    answers = tokenizer.batch_decode(start.answers.repeat_interleave(gallery.GROUP, 0))
    expected = torch.tensor(task.codebook_reward(texts, ids, answers))
    rewards = gallery.rewards_of(batch["completions"], stacked.answers).flatten()
    assert torch.equal(rewards, expected) and 0 < rewards.mean() < 1
    groups = expected.view(-1, gallery.GROUP)
    wanted = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(batch["advantages"].flatten(), wanted.flatten())
    assert batch["mask"].sum(-1)[0].tolist() == [len(row) for row in ids]
    torch.testing.assert_close(batch["old_logprobs"], batch["rollout_logprobs"])


@pytest.mark.parametrize("name", ["clip_cov", "dppo_topk_tv"])
def test_runs_depend_on_nothing_but_the_seed(name: str, start: gallery.Start) -> None:
    first, second = (gallery.train(gallery.shown(name), 4, [start], updates=8) for _ in range(2))
    assert first == second
    quiet, noisy = first
    assert len(quiet[0]) == 2 and quiet != noisy


def test_the_table_has_the_numbers_of_the_results(tmp_path: Path) -> None:
    results, page = gallery_pages.load(), gallery_pages.PAGE.read_text()
    assert gallery_pages.filled(page, results) == page
    assert len(results["losses"]) >= 48 and set(results["losses"]).isdisjoint(results["not shown"])
    one = {**results, "losses": {"grpo": results["losses"]["grpo"]}}
    gallery_pages.picture(one, tmp_path / "one.png")
    assert gallery_pages.PICTURE.stat().st_size < 300_000
