"""A hint that depends on the completion: a rollout_func returns it in the place of the column's."""

from typing import Any

import pytest
from datasets import Dataset

from composer_plugins.findings import ComposerWarning
from parity_tests.rigs import tiny


def test_a_rollout_func_returns_a_hint_about_each_completion() -> None:
    """The rows of the data set have none, and a warning says what the hint loss depends on."""
    data = Dataset.from_list([{"prompt": row["prompt"], "privileged_context": None} for row in tiny.rows()])

    def hints(rollout: dict[str, Any]) -> dict[str, Any]:
        own = [f"{ids[0]}" if len(ids) > 2 else None for ids in rollout["completion_ids"]]
        return {"privileged_context": own}

    with pytest.warns(ComposerWarning, match="so the hint loss is 0 unless the rollout_func returns hints"):
        made = tiny.with_rollout(hints, dataset=data)
    inputs = tiny.batch(made)
    long = inputs["completion_mask"].sum(1) > 2
    assert 0 < long.sum() < len(long) and inputs["hint_mask"].any(1).equal(long)
    for i in long.nonzero()[:, 0].tolist():
        assert tiny.shown(made, inputs, "hint_prompt", i).endswith(str(int(inputs["completion_ids"][i, 0])))
