"""What rows of several kinds share."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from composer_plugins.losses.row import Dialect, Parameter, Unlikely

TINY = math.ulp(0.0)  # the least positive number: "above zero"

LOG_RATIO_CLAMP = Parameter("clamp on the log ratio, in nats; verl: 20.0", low=TINY)

# 10 is the largest published bound of a ratio per token: DeepSeek-R1, arXiv 2501.12948v2 section 3.2.1. From
# 100 on, the bound is taken to be switched off on purpose.
PERCENTAGE = Unlikely(
    10,
    100,
    "clips the ratio only above {ratio:g}, which hardly any token reaches",
    "set {percent:g} if it is a percentage (PPO: 0.2, DAPO: 0.28, DeepSeek-R1: 10)",
)
# TRL's one option for both bounds is 10 in its settings for DeepSeek-R1.
NO_LOWER_BOUND = PERCENTAGE._replace(
    effect="does not clip the ratio from below", remedy="set {percent:g} if it is a percentage, or 1"
)
# The ratio of a sequence is a geometric mean over its tokens. GSPO, arXiv 2507.18071 section 5.1: 3e-4 and
# 4e-4. LUSPO: 2e-3 and 2.5e-3. The limit is 20 times the largest of these, and the least PPO clip is 0.1.
# That 0.2 is wrong for it: huggingface/trl#3834.
OF_SEQUENCE = Unlikely(
    0.05,
    100,
    "bounds the ratio of a sequence, a geometric mean over its tokens, which stays so near 1 that hardly any "
    "sequence is clipped",
    "set clip_low and clip_high as GSPO (3e-4 and 4e-4) or LUSPO (2e-3 and 2.5e-3)",
)

CLIPS = {
    "clip_low": Parameter(
        "the ratio is clipped below at 1 - clip_low; from 1 on it is not",
        low=0,
        unlikely=(NO_LOWER_BOUND,),
    ),
    "clip_high": Parameter(
        "the ratio is clipped above at 1 + clip_high",
        low=0,
        unlikely=(PERCENTAGE,),
    ),
}
SEQUENCE_CLIPS = {
    "clip_low": replace(CLIPS["clip_low"], unlikely=(OF_SEQUENCE._replace(below=1),)),
    "clip_high": replace(CLIPS["clip_high"], unlikely=(OF_SEQUENCE,)),
}
PPO_CLIPS = {"clip_low": 0.2, "clip_high": 0.2}  # the values of PPO's paper and of most upstreams

# Of TRL's GRPOTrainer: where it computes the loss, and the advantages and rollout corrections before it.
GRPO_LOSS = "trainer/grpo_trainer.py _compute_loss"
GRPO_SCORES = "trainer/grpo_trainer.py _generate_and_score_completions"

# The proofs of a dialect that is compared with its framework's code: the claims of `conform`.
TRL_CLAIM = "live/trl/test_conform.py::test_the_loss_equals_trl"
VERL_CLAIM = "live/verl/test_conform.py::test_the_loss_equals_verl"
NEMO_RL_CLAIM = "adapters/nemo_rl_loss/test_live.py::test_the_loss_equals_nemo_rl"
SLIME_CLAIM = "adapters/slime_loss/test_live.py::test_the_loss_equals_slime"
SKYRL_CLAIM = "live/skyrl/test_conform.py::test_the_loss_equals_skyrl"

# The dialects of one upstream: the fields that they share. A row may override them.
prime_rl = partial(Dialect, upstream="prime-rl")
nemo_rl = partial(
    Dialect,
    upstream="nemo-rl",
    source="NVIDIA-NeMo/RL nemo_rl/algorithms/loss/loss_functions.py@7ea279a ClippedPGLossFn",
    proof=NEMO_RL_CLAIM,
)
oat = partial(Dialect, upstream="oat", proof="golden/test_policy.py::test_grpo_and_dr_grpo_equal_oat")


def verl(function: str, **fields: Any) -> Dialect:
    """The dialect of a function in verl's core_algos.py; `fields` are the other fields of Dialect."""
    source = f"verl 0.9.1 trainer/ppo/core_algos.py {function}"
    return Dialect(upstream="verl", **{"source": source, "proof": VERL_CLAIM} | fields)


def trl(source: str, **fields: Any) -> Dialect:
    """The dialect of a function in TRL, by its file; `fields` are the other fields of Dialect."""
    return Dialect(upstream="trl", source=f"TRL 1.16 {source}", **{"proof": TRL_CLAIM} | fields)


def slime(function: str, note: str, **params: float) -> Dialect:
    """A loss of slime, which takes the mean of each rollout's tokens by default."""
    return Dialect(
        upstream="slime",
        params=params,
        source=f"THUDM/slime slime/utils/ppo_utils.py@624b824 {function}",
        proof=SLIME_CLAIM,
        note=note,
        mode="seq-mean-token-mean",
    )


def skyrl(function: str, file: str = "ppo_utils.py", upstream: str = "skyrl", **fields: Any) -> Dialect:
    """The dialect of a function in SkyRL's utils; `fields` are the other fields of Dialect."""
    source = f"skyrl 0.3.0 and 0.4.0 skyrl/backends/skyrl_train/utils/{file} {function}"
    return Dialect(upstream=upstream, **{"source": source, "proof": SKYRL_CLAIM} | fields)
