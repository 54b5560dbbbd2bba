"""vllm_mode="server": TRL's own client, whose HTTP requests a double of a vLLM server answers."""

import copy
from typing import Any

import pytest
import torch

from parity_tests.rigs import by_rows, tiny, vllm_server

pytest.importorskip("requests", reason="TRL's client of a vLLM server needs it")

OPTIONS = {"scripted": False, "use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 10.0}
OPTIONS |= {"vllm_importance_sampling_clip_max": 1.1, "loss_type": "grpo", "max_steps": 2}
OPTIONS |= {"replay_params": {"beta": 0.3}}
WEIGHTS = {"policy_weight": 1.5, "hint_weight": 0.7, "replay_weight": 0.3}
CORRECTIONS = {
    "token_truncate": lambda ratio: ratio.clamp(max=1.1),
    "token_mask": lambda ratio: torch.where(ratio > 1.1, 0.0, ratio),
    "sequence_truncate": lambda ratio: ratio.prod().clamp(max=1.1),
    "sequence_mask": lambda ratio: torch.where(ratio.prod() > 1.1, 0.0, ratio.prod()),
}


def policy_by_rows(made: Any, inputs: dict[str, Any], engine: vllm_server.Engine, mode: str) -> torch.Tensor:
    """GRPO's loss row by row, without padding, from the log-probabilities that the server returned."""
    total, weights = torch.zeros((), dtype=torch.float64), []
    for i, advantage in enumerate(inputs["advantages"].double()):
        prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()]
        ids, mine = by_rows.completion(inputs, i), by_rows.logprobs(made.model, inputs, i)
        theirs = torch.tensor(engine.sampled[tuple(prompt.tolist()), tuple(ids.tolist())])
        ratio = torch.where(theirs.isnan(), 1.0, (mine.detach() - theirs).exp())
        weights.append(CORRECTIONS[mode](ratio))
        total = total - (advantage * weights[-1] * (mine - mine.detach()).exp()).mean()
    assert any((weight - 1).abs().max() > 0.05 for weight in weights), "the correction does nothing"
    return total / len(inputs["advantages"])


@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        ("sequence_mask", "trl"),
        ("sequence_mask", "grpo"),
        ("token_truncate", "grpo"),
        pytest.param("sequence_truncate", "grpo", marks=pytest.mark.slow),
        pytest.param("token_mask", "grpo", marks=pytest.mark.slow),
    ],
)
def test_all_channels_with_a_server_equal_a_loop_over_unpadded_rows(mode: str, policy: str) -> None:
    """After two steps, so that the server must have got the weights of the policy."""
    with vllm_server.running() as (engine, url):
        initial = tiny.model(torch.float64)
        own = {"policy": policy, "vllm_server_base_url": url, "vllm_importance_sampling_mode": mode}
        made = tiny.trainer(**OPTIONS, **WEIGHTS, **own, policy_model=copy.deepcopy(initial))
        made.train()
        inputs = tiny.batch(made)
    expected = WEIGHTS["policy_weight"] * policy_by_rows(made, inputs, engine, mode)
    expected = expected + WEIGHTS["hint_weight"] * by_rows.hint(made, inputs, initial.eval())
    expected = expected + WEIGHTS["replay_weight"] * by_rows.replay(made, initial, "dpo")[0]
    tiny.assert_computes(made, inputs, expected, value=1e-5)
    assert engine.requests.count("/v1/completions") == 3
    for name, weight in made.model.named_parameters():
        assert torch.equal(weight, engine.model.get_parameter(name))
    announced = [len(update["names"]) for update in engine.announced]
    assert announced == [len(list(made.model.parameters()))] * len(announced) and len(announced) >= 3
