"""What rows of several kinds share."""

import math

from composer_plugins.catalogue import Parameter

KERNELS = "composer_plugins.kernels"
TINY = math.ulp(0.0)  # the least positive number: "above zero"

LOG_RATIO_CLAMP = Parameter(None, "clamp on the log ratio, in nats; verl: 20.0", low=TINY)
LABEL_SMOOTHING = Parameter(0.0, "chance that a preference is labelled the wrong way", low=0, high=0.5)
TEMPERATURE = Parameter(1.0, "divides both logits", low=1e-3)
