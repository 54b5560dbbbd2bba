"""Real TRL runs of a two-layer model, each with one fault, and sound ones: what they are warned of."""

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PrinterCallback
from trl import GRPOTrainer

from benchmarks.health import Case, Seen
from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, probe
from composer_plugins.adapters.trl_mixin.mixin import ComposerGRPOTrainer, ComposerLossMixin
from composer_plugins.errors import ComposerWarning

Batch = dict[str, Any]
TOKENS = 24
OPTIONS = {
    **probe.OPTIONS,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "policy": "grpo",
    "per_device_train_batch_size": 16,
}
OPTIONS |= {
    "num_generations": 8,
    "max_completion_length": TOKENS,
    "learning_rate": 1e-3,
    "max_grad_norm": 1.0,
}
OPTIONS |= {"top_k": 0, "temperature": 1.0}
PAIR = {"prompt": "a?", "chosen": "aaaa", "rejected": "1111"}
ROWS = [
    {
        "prompt": f"{'abcd'[i % 4] * (1 + i % 2)}?",
        "privileged_context": f"[{7 - i % 4}{i % 4}]",
        "chosen": f"{i % 4}1",
        "rejected": "80",
    }
    for i in range(32)
]
HINT = {"hint_weight": 0.5, "hint_divergence": "sampled_token", "max_completion_length": 16}
MANY = {"steps_per_generation": 2, "num_iterations": 8}
SEVERAL = {"steps": 16, "num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1}


def reward(name: str, of: Callable[[list[int]], float]) -> Any:
    """A reward function of the tokens of a completion."""

    def function(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [of(ids) for ids in completion_ids]

    function.__name__ = name
    return function


MIXED = reward("mixed", lambda ids: sum(ids) % 5 / 4 + 0.01 * len(ids))
CONSTANT = reward("constant", lambda ids: 1.0)
RAW = reward("raw", lambda ids: 1e5 * (sum(ids) % 5))
SPARSE = reward("sparse", lambda ids: float(sum(ids) % 11 == 0))
ONES = reward("ones", lambda ids: float(ids.count(4) - ids.count(13)))  # the symbols 1 and a


def against_the_hint() -> Batch:
    """A policy, and a reward that is smaller where the hint makes a completion likelier."""
    model = probe.model()

    def logprob(prompt: str, ids: list[int]) -> float:
        before = probe.tokenizer()(prompt)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([before + ids])).logits[0, len(before) - 1 : -1]
        return float(logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).sum())

    def function(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        rows = zip(prompts, completion_ids, strict=True)
        return [logprob(prompt, ids) - logprob(f"{prompt}\n\n[42]", ids) for prompt, ids in rows]

    return {"model": model, "rewards": function, "rows": [{"prompt": "a?", "privileged_context": "[42]"}] * 8}


def sampler(
    change: Callable[[Tensor], Tensor] = lambda x: x, model: Any = None, syncs: bool = True, **options: Any
) -> Any:
    """A rollout_func that returns log-probabilities, as an inference engine does."""

    def rollout(prompts: list[str], trainer: Any) -> Batch:
        given = probe.tokenizer()(prompts, padding=True, return_tensors="pt")
        if (engine := model) is None:
            engine = trainer.model
        elif syncs:
            engine.load_state_dict(trainer.model.state_dict())
        asked = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS, **options}
        with torch.no_grad():
            found = engine.generate(**given, **asked, output_scores=True, return_dict_in_generate=True)
        ids = found.sequences[:, given["input_ids"].shape[1] :]
        scores = torch.stack(found.scores, 1).float().log_softmax(-1)
        logprobs = change(scores.gather(-1, ids[..., None])[..., 0])
        ends = [(row.tolist() + [1]).index(1) + 1 for row in ids]
        return {
            "prompt_ids": probe.tokenizer()(prompts)["input_ids"],
            "completion_ids": [row[:end].tolist() for row, end in zip(ids, ends, strict=True)],
            "logprobs": [row[:end].tolist() for row, end in zip(logprobs, ends, strict=True)],
        }

    return {"rollout_func": rollout}


def changed(change: Callable[[Batch], Batch]) -> type:
    """A trainer that changes what TRL has made of the rollouts."""

    class Changed(GRPOTrainer):
        def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
            output = super()._generate_and_score_completions(*args, **kwargs)
            return output | change(output)

    return type("Mixed", (ComposerLossMixin, Changed), {})


class _Unhinted(ComposerGRPOTrainer):
    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        x = super()._generate_and_score_completions(*args, **kwargs)
        return x | {"hint_prompt_ids": x["prompt_ids"], "hint_prompt_mask": x["prompt_mask"]}


def _whitened(x: Batch) -> Batch:
    each = x["advantages"][:, None].expand_as(x["completion_mask"])[x["completion_mask"].bool()]
    return {"advantages": (x["advantages"] - each.mean()) / (each.std() + 1e-4)}


def _far_token(x: Batch) -> Batch:
    old = x["old_per_token_logps"].clone()
    old[x["advantages"].argmin(), 0] -= 12
    return {"old_per_token_logps": old}


def _holes(x: Batch) -> Batch:
    return {"advantages": x["advantages"][:, None] * (torch.arange(x["completion_ids"].shape[1]) >= 8)}


def without_gradient() -> Batch:
    """An adapter of which only A trains, while B is 0."""
    made = get_peft_model(probe.model(), LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, weight in made.named_parameters():
        weight.requires_grad_("lora_A" in name)
    return {"model": made}


def saved() -> Any:
    """A model with a folder, from which TRL loads the reference."""
    model, folder = probe.model(), tempfile.mkdtemp()
    model.save_pretrained(folder)
    model.config._name_or_path = folder
    return model


def trained_on() -> Batch:
    """A model whose weights have changed since it was saved."""
    model = saved()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return {"model": model}


def run(
    model: Any = None,
    rewards: Any = MIXED,
    cls: type = ComposerGRPOTrainer,
    rows: list[Batch] | None = None,
    arguments: Batch | None = None,
    steps: int = 10,
    **options: Any,
) -> Seen:
    """Train, and return the warnings, each with its step, and what was logged."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    told, trainers, quiet = list[tuple[int, str]](), list[Any](), io.StringIO()

    def show(message: Any, category: type, *_: Any, **__: Any) -> None:
        if issubclass(category, ComposerWarning):
            told.append((trainers[0].state.global_step + 1 if trainers else 0, str(message)))

    with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        warnings.simplefilter("always", ComposerWarning)
        warnings.showwarning = show
        given = OPTIONS | {"max_steps": steps, "output_dir": tempfile.mkdtemp()} | options
        made = cls(
            model=probe.model() if model is None else model,
            reward_funcs=rewards,
            args=ComposerGRPOConfig(**given),
            train_dataset=Dataset.from_list(ROWS if rows is None else rows),
            **{"processing_class": probe.tokenizer(), **(arguments or {})},
        )
        made.remove_callback(PrinterCallback)
        trainers.append(made)
        made.train()
    return Seen(told, [line for line in made.state.log_history if "loss" in line])


# fmt: off
def faults() -> list[Case]:
    """Each fault, with the metric under which it is to be told."""
    def case(cause: str, metric: str, make: Callable[[], Batch] = dict, **options: Any) -> Case:
        return Case(cause, metric, lambda: run(**make(), **options))

    to_sampler = changed(lambda x: {"old_per_token_logps": x["sampling_per_token_logps"]})
    return [
        case("top_p=0.9", "surprise", top_p=0.9),
        case("top_k=5", "surprise", top_k=5),
        case("min_p=0.1", "surprise", min_p=0.1),
        case("temperature 0.6 in generation_kwargs only", "surprise", generation_kwargs={"temperature": 0.6}),
        case("greedy generation, as with one seed", "same_completion_frac",
             generation_kwargs={"do_sample": False}),
        case("top_p=0.9 in a rollout_func", "ratio_mean", arguments=sampler(top_p=0.9)),
        case("temperature 0.6 in a rollout_func", "k3_kl", arguments=sampler(temperature=0.6)),
        case("a rollout_func returns the log-probabilities of the next tokens", "ess",
             arguments=sampler(lambda x: x.roll(1, -1))),
        case("tool results, with 0 as their log-probabilities, and no env_mask", "not_sampled_frac",
             arguments=sampler(lambda x: x * (torch.arange(x.shape[1]) >= 4))),
        case("the engine of a rollout_func keeps its first weights", "k3_kl", learning_rate=1e-2,
             arguments=sampler(model=probe.model(), syncs=False)),
        case("GSPO on the log-probabilities of an engine in bfloat16", "clip_frac", policy="gspo",
             cls=to_sampler, arguments=sampler(model=probe.model(torch.bfloat16))),
        case("a clip from 0.01 to 10, and 16 updates per generation", "k3_kl", steps=16, arguments=sampler(),
             policy_params={"clip_low": 0.99, "clip_high": 9.0}, **MANY),
        case("16 updates per generation at a high learning rate", "clip_frac", learning_rate=3e-3, steps=32,
             arguments=sampler(), **MANY),
        case("the mask counts the padding behind the end", "surprise",
             cls=changed(lambda x: {"completion_mask": torch.ones_like(x["completion_mask"])})),
        case("mask_truncated_completions, and 4 tokens are too few", "empty_row_frac",
             mask_truncated_completions=True, max_completion_length=4),
        case("every completion is masked out", "empty_row_frac",
             cls=changed(lambda x: {"completion_mask": 0 * x["completion_mask"]})),
        case("learning_rate=0", "learning_rate", learning_rate=0.0),
        case("weights in bfloat16, learning rate 1e-6", "moved_frac", learning_rate=1e-6,
             model=probe.model(torch.bfloat16)),
        case("the optimizer has the weights of another model", "moved_frac",
             arguments={"optimizers": (torch.optim.AdamW(probe.model().parameters(), lr=1e-3), None)}),
        case("LoRA of which B is 0 and frozen", "no_gradient", without_gradient),
        case("one reward for all", "equal_group_frac", rewards=CONSTANT),
        case("one of two reward functions is constant", "constant_reward_frac", rewards=[MIXED, CONSTANT]),
        case("rewards of 1e5, scale_rewards=none", "advantage_max", rewards=RAW, scale_rewards="none"),
        case("a subclass whitens the advantages again, over tokens", "equal_group_frac", rewards=SPARSE,
             cls=changed(_whitened)),
        case("a subclass gives the first 8 tokens the advantage 0", "zero_adv_token_frac",
             cls=changed(_holes)),
        case("clip_high=0.1 with one update per generation", "ratio_moved_frac",
             policy_params={"clip_high": 0.1}),
        case("an old log-probability that is too small by 12", "grad_top_frac", cls=changed(_far_token),
             num_iterations=2),
        case("the reference is loaded from weights before a training", "ref_k3_kl", trained_on, beta=0.04),
        case("sync_ref_model at every step, with mixup 1", "ref_k3_kl", lambda: {"model": saved()}, beta=0.04,
             steps=20, per_device_train_batch_size=32, sync_ref_model=True, ref_model_sync_steps=1,
             ref_model_mixup_alpha=1.0),
        case("a subclass gives the teacher the policy's prompt", "teacher_gap", cls=_Unhinted,
             per_device_train_batch_size=32, **HINT),
        case("a hint against the rewards", "teacher_agreement", against_the_hint, **HINT),
        case("pairs whose rejected sides are rewarded", "pair_margin", rows=[PAIR] * 8, rewards=ONES,
             steps=24, replay_weight=0.01, learning_rate=5e-3),
    ]


def sound() -> list[Case]:
    """Runs that must say nothing."""
    case = partial(Case, metric="")
    return [
        case("TRL's own loss", run=lambda: run(policy="trl")),
        case("GRPO, beta 0.04", run=lambda: run(model=saved(), beta=0.04)),
        case("GSPO, 4 updates per generation", run=lambda: run(policy="gspo", **SEVERAL)),
        case("DAPO, micro-batches of 8", run=lambda: run(
            policy="dapo", per_device_train_batch_size=8, gradient_accumulation_steps=4)),
        case("CISPO on a rollout_func, 4 updates per generation", run=lambda: run(
            policy="cispo", arguments=sampler(), **SEVERAL)),
        case("warm-up from 0", run=lambda: run(
            warmup_steps=4, lr_scheduler_type="constant_with_warmup")),
        case("hint and replay", run=lambda: run(replay_weight=0.5, steps=20, **HINT)),
        case("sparse rewards, 8 groups", run=lambda: run(
            rewards=SPARSE, per_device_train_batch_size=64, max_completion_length=8)),
    ]
