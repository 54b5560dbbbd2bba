"""What rows of several kinds share."""

import math
from functools import partial
from typing import Any

from composer_plugins.catalogue import Dialect, Parameter

TINY = math.ulp(0.0)  # the least positive number: "above zero"

LOG_RATIO_CLAMP = Parameter("clamp on the log ratio, in nats; verl: 20.0", low=TINY)
CLIPS = {
    "clip_low": Parameter("the ratio is clipped below at 1 - clip_low", low=0, high=1),
    "clip_high": Parameter("the ratio is clipped above at 1 + clip_high", low=0),
}
PPO_CLIPS = {"clip_low": 0.2, "clip_high": 0.2}  # the values of PPO's paper and of most upstreams

GRPO_LOSS = "TRL 1.16 trainer/grpo_trainer.py _compute_loss"

# The dialects of one upstream: the fields that they share. A row may override them.
trl = partial(Dialect, upstream="trl")
prime_rl = partial(Dialect, upstream="prime-rl")
oat = partial(Dialect, upstream="oat", proof="golden/test_policy.py::test_grpo_and_dr_grpo_equal_oat")


def verl(function: str, **fields: Any) -> Dialect:
    """The dialect of a function in verl's core_algos.py; `fields` are the other fields of Dialect."""
    return Dialect(upstream="verl", source=f"verl 0.9.1 trainer/ppo/core_algos.py {function}", **fields)
