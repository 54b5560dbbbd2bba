"""Where types are checked at run time, integers in place of floats and masks of numbers are refused."""

import pytest

from composer_plugins.losses.row import Loss
from composer_plugins.testing.inputs import draw, float_tensors, tensors
from composer_plugins.testing.settings import settings
from parity_tests.rigs.every import each


@pytest.mark.usefixtures("annotation_checks")
@each("policy", "divergence", "kl", "correction", "preference", "advantage")
def test_wrong_types_are_refused(row: Loss) -> None:
    for setting in settings(row, thorough=False):
        batch = draw(setting)
        wrong = [(name, x.long()) for name, x in float_tensors(batch).items()]
        wrong += [(name, tensors(batch)[name].double()) for name in ("mask", "group_ids") if name in batch]
        if row.kind != "advantage" and "mask" in batch:
            wrong.append(("mask", batch["mask"].long()))
        for name, x in wrong:
            with pytest.raises(Exception, match="(?i)type-check|violates|beartype"):
                setting.result(batch | {name: x})
