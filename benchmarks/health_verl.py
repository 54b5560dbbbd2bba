"""Real runs of verl's main_ppo on two cores, each with one fault, and sound ones: what they are warned of.

Each of verl's processes imports this module, which registers a rollout engine and an agent loop whose fault
the environment names.
"""

import os
import random
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.health import ROOT, Case, Seen
from composer_plugins.recipes.verl.on_a_cpu import runner, tiny
from composer_plugins.recipes.verl.on_a_cpu.overrides import COMPOSER_CONFIG

FAULT, ENGINE, SCALE = "HEALTH_FAULT", "faulty_cpu", 8.0
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CONSTANT, RAW, SPARSE = "return 1.0", "return 1e5 * len(solution_str)", "return float(len(solution_str) == 5)"
LINE = re.compile(r"ComposerWarning: (.*)|step:(\d+) - ")
HINT = str((ROOT / "recipes" / "verl").resolve())


def make(reward: str, folder: Path) -> None:
    """Write what a run needs, with louder weights, so that no distribution is near uniform."""
    from transformers import AutoModelForCausalLM

    tiny.make(folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(SCALE if weight.ndim == 2 else 1.0)
    model.save_pretrained(folder / "model")
    if reward:
        (folder / "reward.py").write_text(
            f"def compute_score(data_source, solution_str, *_, **__):\n    {reward}\n"
        )


def run(
    *more: str, fault: str = "", reward: str = "", policy: str = "grpo", estimator: str = "grpo",
    sync: bool = True, steps: int = 3,
) -> Seen:  # fmt: skip
    """Train, and return the warnings, each with its step, and what was logged."""
    names = [f"algorithm.adv_estimator=composer/{estimator}"] * bool(estimator)
    names += [f"{ACTOR}.policy_loss.loss_mode=composer/{policy}"] * bool(policy)
    names += ["trainer.v1.trainer_mode=composer_sync"] * sync + [f"{ROLLOUT}.name={ENGINE}"] * bool(fault)
    sizes = ["trainer.total_epochs=20", f"{ROLLOUT}.n=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"]
    sizes += [f"{ACTOR}.optim.lr=1e-3", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"]
    os.environ |= {FAULT: fault, "PYTHONPATH": str(ROOT)}
    modules = f"{runner.REGISTER},{__name__}" if fault else runner.REGISTER
    with tempfile.TemporaryDirectory() as folder:
        options = [*sizes, *names, *more]
        done = runner.run(Path(folder), *options, steps=steps, make=partial(make, reward), modules=modules)
    if done.code != 0:
        raise RuntimeError(done.log[-3000:])
    told, step = list[tuple[int, str]](), 1
    for found in LINE.finditer(done.log):
        if found[2]:
            step = int(found[2]) + 1
        elif found[1] not in [text for _, text in told]:
            told.append((step, found[1].strip()))
    return Seen(told, done.metrics)


def faults() -> list[Case]:
    """Each fault, with the metric under which it is to be told."""
    once = f"{ACTOR}.ppo_epochs=1", f"{ACTOR}.ppo_mini_batch_size=4"
    clip = f"{ACTOR}.policy_loss._target_={COMPOSER_CONFIG}", f"{ACTOR}.policy_loss.loss_mode=composer"
    clip += (f"+{ACTOR}.policy_loss.composer={{policy: grpo, policy_params: {{clip_high: 0.1}}}}",)
    return [
        Case("one reward for all", "equal_group_frac", partial(run, reward=CONSTANT, steps=4)),
        Case(
            "rollout.n=1",
            "group_of_one_frac",
            partial(
                run,
                f"{ROLLOUT}.n=1",
                f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
                f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
                steps=2,
            ),
        ),
        Case(
            "rewards of 1e5, without a standard deviation",
            "advantage_max",
            partial(run, reward=RAW, estimator="dr_grpo", steps=2),
        ),
        Case("the rollout engine has top_p 0.9", "ratio_mean", partial(run, fault="top_p", steps=2)),
        Case("the rollout engine has temperature 0.6", "k3_kl", partial(run, fault="temperature", steps=2)),
        Case(
            "the engine returns the log-probabilities of the next tokens",
            "ess",
            partial(run, fault="shift", steps=2),
        ),
        Case(
            "the engine keeps its first weights",
            "k3_kl",
            partial(run, f"{ACTOR}.optim.lr=1e-2", fault="stale"),
        ),
        Case(
            "GSPO in bfloat16, bypass_mode",
            "clip_frac",
            partial(
                run,
                "algorithm.rollout_correction.bypass_mode=True",
                f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf16",
                policy="gspo",
                steps=2,
            ),
        ),
        Case(
            "an agent loop masks four of five responses out",
            "empty_row_frac",
            partial(run, f"{ROLLOUT}.agent.default_agent_loop=masked_out", fault="mask"),
        ),
        Case(
            "a clip with one update per step",
            "ratio_moved_frac",
            partial(run, *once, f"{ROLLOUT}.n=16", *clip, steps=6),
        ),
        Case(
            "learning rate 0, with a clip and four updates per step",
            "ratio_moved_frac",
            partial(run, f"{ACTOR}.optim.lr=0", *clip, steps=6),
        ),
    ]


def sound() -> list[Case]:
    """Runs that must say nothing."""
    channels = "+algorithm.composer.replay_weight=0.5", "--config-path", HINT, "--config-name", "hint_sdpo"
    return [
        Case("GRPO, four updates per step", "", run),
        Case(
            "CISPO in verl's own trainer, warm-up",
            "",
            partial(run, f"{ACTOR}.optim.lr_warmup_steps=2", policy="cispo", sync=False),
        ),
        Case(
            "GSPO, bypass_mode",
            "",
            partial(run, "algorithm.rollout_correction.bypass_mode=True", policy="gspo"),
        ),
        Case(
            "DAPO, micro-batches of 2",
            "",
            partial(run, f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", policy="dapo"),
        ),
        Case("sparse rewards", "", partial(run, reward=SPARSE, estimator="rloo", steps=5)),
        Case("hint and replay", "", partial(run, *channels, estimator="", policy="")),
    ]


if os.environ.get(FAULT) and "COMPOSER_VERL_RUN" in os.environ:
    from composer_plugins.recipes.verl.on_a_cpu import rollout

    class Server(rollout.Server):
        """A server with a fault."""

        def __init__(self, path: str, length: int) -> None:
            super().__init__(path, length)
            if os.environ[FAULT] == "top_p":
                self.model.register_forward_hook(self.cut)
            self.has_weights = False

        @staticmethod
        def cut(model: Any, args: Any, output: Any) -> None:
            most, places = output.logits.softmax(-1).sort(-1, descending=True)
            out = torch.zeros_like(most).bool().scatter(-1, places, most.cumsum(-1) - most >= 0.9)
            output.logits = output.logits.masked_fill(out, -torch.inf)

        async def load(self, weights: dict[str, Tensor], step: int | None) -> None:
            if not (self.has_weights and os.environ[FAULT] == "stale"):
                await super().load(weights, step)
            self.has_weights = True

        def sample(self, ids: Tensor, length: int, temperature: float, generator: torch.Generator) -> Any:
            temperature = 0.6 if os.environ[FAULT] == "temperature" else temperature
            tokens, logprobs = super().sample(ids, length, temperature, generator)
            shift = os.environ[FAULT] == "shift"
            return tokens, logprobs[1:] + logprobs[:1] if shift else logprobs

    class Replica(rollout.Replica):
        """The handle of that server."""

        server = Server

    rollout.register(ENGINE, Replica)
    if os.environ[FAULT] == "mask":
        from verl.experimental.agent_loop.agent_loop import register
        from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

        @register("masked_out")
        class MaskedOut(SingleTurnAgentLoop):
            """An agent loop that masks most responses out."""

            async def run(self, *args: Any, **kwargs: Any) -> Any:
                output = await super().run(*args, **kwargs)
                if random.random() < 0.8:
                    output.response_mask = [0] * len(output.response_mask)
                return output
