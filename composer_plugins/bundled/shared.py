"""What rows of several kinds share."""

import math

from composer_plugins.catalogue import Parameter

TINY = math.ulp(0.0)  # the least positive number: "above zero"

LOG_RATIO_CLAMP = Parameter("clamp on the log ratio, in nats; verl: 20.0", low=TINY)
CLIPS = {
    "clip_low": Parameter("the ratio is clipped below at 1 - clip_low", low=0, high=1),
    "clip_high": Parameter("the ratio is clipped above at 1 + clip_high", low=0),
}
LABEL_SMOOTHING = Parameter("chance that a preference is labelled the wrong way", low=0, high=0.5)
TEMPERATURE = Parameter("divides both logits", low=1e-3)
