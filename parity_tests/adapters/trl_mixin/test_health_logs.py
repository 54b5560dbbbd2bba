"""`composer-plugins health` on what TRL's trainer has written."""

import json
from pathlib import Path

import pytest

from parity_tests.rigs import tiny
from parity_tests.rigs.commands import invoke


@pytest.mark.parametrize("is_constant", [False, True])
def test_the_log_of_a_real_run_is_read(is_constant: bool, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "max_grad_norm": 1.0}
    made = tiny.trainer(output_dir=str(tmp_path), learning_rate=1e-3, **options)
    if is_constant:
        made.reward_funcs = [lambda completion_ids, **_: [0.5] * len(completion_ids)]
    made.train()
    done = invoke("health", str(tmp_path), "--json")
    data = json.loads(done.stdout)
    assert {"not finite", "equal rewards", "entropy collapse"}.isdisjoint(data["not_looked_at"])
    found = {one["key"]: one["step"] for one in data["findings"]}
    assert done.exit_code == is_constant
    assert found == ({"equal rewards: reward_std": 1, "no gradient: grad_norm": 1} if is_constant else {})
