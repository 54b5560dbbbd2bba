"""What most frameworks' clip options set: the bounds of a ratio as distances from 1, and a second clip."""

from composer_plugins.frameworks.contract import Sets

# The losses whose clip is a distance from 1, and those that have a second clip where A < 0.
CLIPPED = (
    *("ppo", "grpo", "dapo", "dr_grpo", "gspo", "gspo_token", "luspo", "gmpo", "minirl", "opsm"),
    *("clip_cov", "rec", "fipo", "aspo", "tvpo", "ce_gppo", "cpgd"),
)
LOW, HIGH = (Sets(("clip_low",), CLIPPED),), (Sets(("clip_high",), CLIPPED),)
BOTH, DUAL = (Sets(("clip_low", "clip_high"), CLIPPED),), (Sets(("dual_clip",)),)
BY_RATIO = tuple(name for name in (*CLIPPED, "cispo") if name != "gmpo")  # gmpo's bounds are of the log ratio
