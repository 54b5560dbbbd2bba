"""The gallery: learning curves of every policy loss of the catalogue on the codebook task.

    nice python -m benchmarks.gallery                   (.nox/trl: 10 minutes of CPU time)
    python -m benchmarks.gallery --only grpo cispo      these again; the others keep their numbers
    python -m benchmarks.gallery --draw                 the picture and the table again, from gallery.json

The task and the model are those of recipes/codebook, in a plain loop: the runs of three seeds, with noise and
without, are one model with stacked weights, which takes a quarter of the time of `trl.GRPOTrainer`. On TRL's
batches its weights become TRL's (parity_tests/adapters/trl_mixin/test_gallery.py).
"""

import argparse
import multiprocessing
import os
import platform
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap
from transformers import Qwen3ForCausalLM

from benchmarks import gallery_pages
from composer_plugins.cli.worked_example import examples
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import Choice, choose
from composer_plugins.losses.registry import registry
from composer_plugins.losses.row import of_kind
from composer_plugins.recipes import tiny_model
from composer_plugins.recipes.codebook import task

SEEDS, SIGMAS, UPDATES = (0, 1, 2), (0.0, 1.0), 120
ITERATIONS = {"on-policy": 1, "4 steps off": 4}  # how many updates a batch of completions is used for
LEARNING_RATE, MAX_NORM = 1e-3, 1.0  # the rate was chosen on grpo alone, and 1.0 is TRL's default
GROUP, SCORED, EVERY = 4, 8, 6  # completions of each letter: to train on, and to score every 6 updates
KNOWN, WARM_UP = 0.3, 300  # the share of digits that the warm-up shows right, and its steps
TOP_K = 20  # of the losses over the k likeliest tokens

LETTERS, LENGTH, PROMPT = len(task.KEYS), task.COMPLETION_LENGTH, 2  # "b?"
PROCESSES = 2

Batch = dict[str, Tensor]


class Start(NamedTuple):
    """What all runs of a seed start from: a warmed-up model, and the tokens of its codebook."""

    model: Qwen3ForCausalLM
    prompts: Tensor  # [letters, 2]
    answers: Tensor  # [letters, 2]


def make_start(seed: int, warm_up: int = WARM_UP) -> Start:
    """Draw a codebook, and teach a model the format and a part of the codebook.

    Each digit of the warm-up is right with probability `KNOWN` and drawn at random otherwise. Without this
    part, RL settles on one answer for all letters before it can tell them apart.
    """
    torch.manual_seed(seed)
    tokenizer = task.make_tokenizer()
    model = tiny_model.make_model(tokenizer, positions=64, attn_implementation="eager")
    codebook = {row["prompt"]: row["answer"] for row in task.codebook_rows(seed)}
    texts = [*codebook], [*codebook.values()]
    prompts, answers = (torch.tensor(tokenizer(one)["input_ids"]) for one in texts)
    zero = task.VOCABULARY.index("0")
    ends = torch.full((GROUP * LETTERS, 1), task.EOS_ID)

    def batches() -> Iterator[Batch]:
        for _ in range(warm_up):
            is_right = torch.rand(GROUP, *answers.shape) < KNOWN
            drawn = torch.randint(zero, zero + len(task.DIGITS), is_right.shape)
            shown = torch.where(is_right, answers, drawn).flatten(0, 1)
            ids = torch.cat([prompts.repeat(GROUP, 1), shown, ends], 1)
            yield {"input_ids": ids, "labels": torch.where(torch.arange(ids.shape[1]) < PROMPT, -100, ids)}

    tiny_model.warm_up(model, batches(), warm_up, learning_rate=3e-3)
    return Start(model, prompts, answers)


class Policies:
    """The models of several runs as one, with their weights stacked, and the optimizer of them all."""

    def __init__(self, models: Sequence[Qwen3ForCausalLM], learning_rate: float = LEARNING_RATE) -> None:
        self._model = models[0]
        weights, self._buffers = stack_module_state(list(models))
        self.weights = {name: x.detach().clone().requires_grad_() for name, x in weights.items()}
        self._optimizer = torch.optim.AdamW(self.weights.values(), lr=learning_rate, weight_decay=0.0)

    def logprobs(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """The log-probabilities [runs, rows, n + 1, vocab] of what follows a prompt and each of n tokens.

        `prompts` are [runs, letters, 2], and `completions` [runs, letters, copies, n] become rows. The copies
        of a prompt are branches of one sequence, so the model sees the prompt once.
        """
        _, letters, copies, length = completions.shape
        branch = torch.tensor([-1] * PROMPT + [copy for copy in range(copies) for _ in range(length)])
        place = torch.cat([torch.arange(PROMPT), PROMPT + torch.arange(length).repeat(copies)])
        is_seen = (branch == -1) | (branch == branch[:, None])
        is_seen &= place <= place[:, None]
        attention = torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        options = {"attention_mask": attention, "position_ids": place[None], "use_cache": False}

        def logits(*given: Any) -> Tensor:
            state, ids = given[:2], {"input_ids": given[2]}
            return functional_call(self._model, state, kwargs=ids | options).logits  # type: ignore[no-any-return]

        ids = torch.cat([prompts, completions.flatten(2)], -1)
        found = vmap(logits)(self.weights, self._buffers, ids).log_softmax(-1)
        first = found[:, :, None, PROMPT - 1 : PROMPT].expand(-1, -1, copies, -1, -1)
        later = found[:, :, PROMPT:].unflatten(2, (copies, length))
        return torch.cat([first, later], 3).flatten(1, 2)

    def step(self, loss: Tensor) -> None:
        """An update of each run by its part of the loss, with the gradient of each clipped by its norm."""
        self._optimizer.zero_grad()
        loss.backward()
        grads = [weight.grad for weight in self.weights.values() if weight.grad is not None]
        norm = sum(grad.flatten(1).square().sum(1) for grad in grads)
        factor = (MAX_NORM / (torch.as_tensor(norm).sqrt() + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor.view(-1, *[1] * (grad.dim() - 1)))
        self._optimizer.step()


@torch.no_grad()
def sample(
    policies: Policies, prompts: Tensor, copies: int, sigma: Tensor | float, drawn: torch.Generator
) -> Batch:
    """Sample completions of each prompt from logits with Gaussian noise of this size, a new one per token."""
    completions, found = prompts.new_empty(*prompts.shape[:2], copies, 0), list[Batch]()
    for _ in range(LENGTH):
        logprobs = policies.logprobs(prompts, completions)[:, :, -1]
        noise = torch.randn(logprobs.shape, generator=drawn)
        sampler = (logprobs + sigma * noise).log_softmax(-1)
        gumbel = -torch.empty_like(sampler).exponential_(generator=drawn).log()
        token = (sampler + gumbel).argmax(-1, keepdim=True)
        completions = torch.cat([completions, token.unflatten(1, (-1, copies))], -1)
        chosen = {"old_logprobs": logprobs.gather(-1, token)[..., 0]}
        chosen["rollout_logprobs"] = sampler.gather(-1, token)[..., 0]
        found.append({**chosen, "rollout_support_logprobs": sampler})
    stacked = {name: torch.stack([one[name] for one in found], 2) for name in found[0]}
    return {"prompts": prompts, "completions": completions, **stacked}


def rewards_of(completions: Tensor, answers: Tensor) -> Tensor:
    """`task.codebook_reward` [runs, letters, copies] of tokens: 0 unless the third is the end."""
    right = (completions[..., :-1] == answers.unsqueeze(2)).float().mean(-1)
    ends = completions == task.EOS_ID
    return right * (ends[..., -1] & ~ends[..., :-1].any(-1))


def rollouts(
    policies: Policies, start: Start, sigma: Tensor, drawn: torch.Generator, advantage: Choice
) -> Batch:
    """A batch of completions with their advantages, as TRL makes it with `num_generations=GROUP`."""
    batch = sample(policies, start.prompts, GROUP, sigma, drawn)
    rewards = rewards_of(batch["completions"], start.answers)
    groups = torch.arange(rewards.numel() // GROUP).repeat_interleave(GROUP)
    found = call(advantage, {"rewards": rewards.flatten(), "group_ids": groups})
    ends = (batch["completions"] == task.EOS_ID).flatten(1, 2)
    return batch | {
        "advantages": found.view(len(rewards), -1, 1),
        "mask": ends.cumsum(-1) - ends.long() == 0,
    }


def update(
    policies: Policies, choice: Choice, batch: Batch, generator: torch.Generator | None = None
) -> None:
    """An optimizer step with the loss, reduced by its own denominator, of each run.

    `generator` is for a loss that draws random numbers, clip_cov.
    """
    completions = batch["completions"]
    every = policies.logprobs(batch["prompts"], completions[..., :-1])
    ids = completions.flatten(1, 2)
    inputs = {**batch, "logprobs": every.gather(-1, ids.unsqueeze(-1))[..., 0]}
    if "support_logprobs" in choice.loss.needs:
        inputs["support_logprobs"] = every
    if "topk_logprobs" in choice.loss.needs:
        inputs["rollout_topk_logprobs"], where = batch["rollout_support_logprobs"].topk(TOP_K, -1)
        inputs["topk_logprobs"] = every.gather(-1, where)
    losses = list[Tensor]()
    for run in range(len(ids)):
        given: dict[str, Any] = {name: inputs[name][run] for name in choice.loss.needs}
        given["generator"] = generator
        counts = {"num_sequences": ids.shape[1], "max_length": LENGTH}
        mode: Any = choice.mode
        losses.append(aggregate(call(choice, given).loss, given["mask"], mode, **counts))
    policies.step(torch.stack(losses).sum())


def train(
    choice: Choice, iterations: int, starts: Sequence[Start], updates: int = UPDATES
) -> list[list[list[float]]]:
    """Train with each seed and noise; return by noise and seed the rewards before and every few updates.

    They are those of completions that the trainer's model samples without noise.
    """
    drawn, scoring = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    models = [start.model for _ in SIGMAS for start in starts]
    sigma = torch.tensor(SIGMAS).repeat_interleave(len(starts)).view(-1, 1, 1)
    prompts, answers = (torch.stack([start[part] for _ in SIGMAS for start in starts]) for part in (1, 2))
    start, policies = Start(starts[0].model, prompts, answers), Policies(models)
    advantage, curves, batch = choose("advantage", "grpo@trl"), list[Tensor](), Batch()
    for done in range(updates + 1):
        if done % EVERY == 0:
            found = sample(policies, prompts, SCORED, 0.0, scoring)["completions"]
            curves.append(rewards_of(found, answers).mean((1, 2)))
        if done == updates:
            break
        if done % iterations == 0:
            batch = rollouts(policies, start, sigma, drawn, advantage)
        update(policies, choice, batch, drawn)
    whole = torch.stack(curves, 1).view(len(SIGMAS), len(starts), -1)
    return [[[round(x, 3) for x in seed] for seed in noise] for noise in whole.tolist()]


def shown(name: str) -> Choice:
    """The loss with its defaults; a parameter that has none gets the value that `explain` shows."""
    loss = of_kind(registry().losses, "policy")[name]
    return choose("policy", name, examples(loss)).with_optional("generator")


def missing(name: str) -> str:
    """The input of a loss that the task does not have, or ""."""
    has = {"logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask", "topk_logprobs"}
    has |= {"rollout_topk_logprobs", "support_logprobs", "rollout_support_logprobs"}
    needs = of_kind(registry().losses, "policy")[name].needs
    return next((need for need in needs if need not in has), "")


STARTS = list[Start]()  # a forked process has those of its parent


def job(name: str, setting: str) -> tuple[str, str, list[list[list[float]]], float]:
    """The runs of a loss in a setting, and the seconds of CPU that they took."""
    began = time.process_time()
    curves = train(shown(name), ITERATIONS[setting], STARTS)
    return name, setting, curves, time.process_time() - began


def run(names: Sequence[str], results: dict[str, Any]) -> None:
    """Train with these losses, and write gallery.json after each of them."""
    torch.set_num_threads(1)
    began = time.process_time()
    STARTS[:] = [make_start(seed) for seed in SEEDS]
    seconds = time.process_time() - began
    plan = [(name, setting) for name in names if not missing(name) for setting in ITERATIONS]
    earlier, losses = {*results}, results.setdefault("losses", {})
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("fork")) as pool:
        for future in as_completed([pool.submit(job, *one) for one in plan]):
            name, setting, curves, took = future.result()
            seconds += took
            entry = losses.setdefault(name, {"parameters": examples(shown(name).loss), "rewards": {}})
            entry["rewards"] |= dict(zip((setting, f"{setting}, noise"), curves, strict=True))
            if "CPU minutes" not in earlier:
                results["CPU minutes"] = round(seconds / 60, 1)
            gallery_pages.save(results)
            finals = ", ".join(f"{gallery_pages.final(x).mean:.2f}" for x in curves)
            print(f"{name}, {setting}: {finals} ({took:.1f} s of CPU)", flush=True)


def catalogue() -> list[str]:
    """The names of all policy losses."""
    return [*of_kind(registry().losses, "policy")]


def about() -> dict[str, Any]:
    """What the runs share, and where they ran."""
    cores = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    return {
        "date": date.today().isoformat(),
        "machine": cores,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "updates": UPDATES,
        "scored every": EVERY,
        "learning rate": LEARNING_RATE,
        "noise": SIGMAS[-1],
        "seeds": list(SEEDS),
        "not shown": {name: need for name in catalogue() if (need := missing(name))},
    }


def main() -> None:
    """Run, and draw."""
    asked = argparse.ArgumentParser(description="learning curves of every policy loss")
    asked.add_argument("--only", nargs="+", metavar="NAME", help="run these losses again, and no others")
    asked.add_argument("--draw", action="store_true", help="only draw the picture and write the table")
    given = asked.parse_args()
    names, results = given.only or catalogue(), about()
    if given.only:
        earlier, now = gallery_pages.load(), ("date", "machine", "not shown")
        if changed := [x for x in results if x not in now and results[x] != earlier[x]]:
            asked.error(f"{', '.join(changed)} are not those of gallery.json: run all losses")
        results = earlier | {"not shown": results["not shown"]}
    if not given.draw:
        run(names, results)
    gallery_pages.draw()


if __name__ == "__main__":
    main()
