"""torchtitan: the losses of its RL trainer, their options, and the one denominator that it has.

Read in torchtitan 0.3.0 and in pytorch/torchtitan at b5bcd76: `torchtitan/experiments/rl/losses/dapo.py`,
`losses/grpo.py`, `rollout/advantage.py`, `components/batcher.py` and `actors/trainer.py`.

A config of torchtitan is a Python function. A key here is a keyword of the class that the function gives to
`PolicyTrainer.Config(loss=...)`, and "loss" is the name of that class.
"""

from composer_plugins.frameworks.clips import BOTH, HIGH, LOW
from composer_plugins.frameworks.contract import Conversion, Framework, NamedLoss, Option, Sets

LOSS = "loss"
OWN = "ComposerLoss"  # the class of our adapter
ESTIMATOR = "should_std_normalize"  # of AdvantageEstimator.Config, which is not the config of the loss
MODE = "token-mean"
STD = Conversion(values={False: "dr_grpo@torchtitan", True: "grpo@torchtitan"})

UNAVAILABLE = {
    "hint_weight": (
        "torchtitan passes a loss the log-probabilities of its generator alone, and no teacher's",
        "set it to 0; the hint channel runs in TRL, verl, PRIME-RL and Tinker",
    ),
    "replay_weight": (
        "torchtitan packs rollouts into rows, and has no pairs of completions",
        "set it to 0; the replay channel runs in TRL, verl, PRIME-RL and Tinker",
    ),
}
BY_SEQUENCE = (
    "torchtitan packs several sequences into one row and does not tell the loss where each begins",
    "choose a loss whose terms depend on single tokens, such as grpo, dapo, cispo, sapo or dppo_tv",
)

TORCHTITAN = Framework(
    name="torchtitan",
    title="torchtitan",
    path="composer_plugins.adapters.torchtitan_loss.loss:ComposerLoss",
    summary="torchtitan's RL trainer with any policy loss whose terms depend on single tokens",
    release="0.3.0",
    losses=(
        NamedLoss("grpo@torchtitan", {LOSS: "GRPOLoss"}),
        NamedLoss("dapo@torchtitan", {LOSS: "DAPOLoss"}),
    ),
    options=(
        Option(key="clip_eps", default=0.2, sets=(Sets(("clip_low", "clip_high"), ("grpo",)),)),
        Option(key="ratio_clip_low", default=0.2, sets=(Sets(("clip_low",), ("dapo",)),)),
        Option(key="ratio_clip_high", default=0.2, sets=(Sets(("clip_high",), ("dapo",)),)),
        Option(key=ESTIMATOR, default=False, objective="advantage", conversion=STD),
    ),
    names={"clip_eps": BOTH, "ratio_clip_low": LOW, "ratio_clip_high": HIGH},
    denominators={"global_valid_tokens": MODE},
    provides={"policy": frozenset({"logprobs", "old_logprobs", "rollout_logprobs", "advantages", "mask"})},
    partial_batch={"policy": "torchtitan cuts the batch into micro-batches, and those into chunks"},
    unavailable=UNAVAILABLE,
    packs_rows=True,
    package="torchtitan",
    install="pip install torchtitan==0.3.0",
    convention="composer_plugins.testing.conventions.logits:TORCHTITAN",
    claims="composer_plugins.conformance.torchtitan_claims.suite",
    migration="composer_plugins.adapters.torchtitan_loss.migration",
)
