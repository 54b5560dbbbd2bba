"""The program of a Tinker user: the first step on the recorded replies, with each loss of LOSSES.

    python -m parity_tests.rigs.tinker_first_step URL MODEL

It prints the loss and the norm of the gradient that the server gives its optimizer, by the name of the loss,
and has the server write its LoRA to a file. It is a process of its own because the SDK leaves its connections
open.
"""

import json
import sys
from typing import Any

from tinker import ServiceClient, types

from composer_plugins.adapters.tinker_loss import add_advantages, add_teacher_logprobs, inputs_apart, loss_fn
from composer_plugins.adapters.tinker_loss.skyrl_server import forward_backward_on_skyrl
from composer_plugins.recipes.tinker.run import datum
from parity_tests.rigs import first_step
from parity_tests.rigs.first_step import HINT_WEIGHT

RANK = 16
# By objective of first_step. A hint is always divided by its tokens, so there is none that is divided by row.
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"policy": "dapo"},
    "dapo+hint": {"policy": "dapo", "hint_weight": HINT_WEIGHT, "hint_estimator": "k2"},
}


def data_of(client: Any, base: Any) -> list[Any]:
    """The replies, with the log-probabilities of the policy and of the teacher, and with advantages."""
    of = first_step.replies()
    bare, _ = inputs_apart([datum(one.prompt, one.tokens) for one in of], loss_fn(**LOSSES["dapo"]))
    outputs = client.forward(bare, "cross_entropy").result().loss_fn_outputs
    data = [
        datum(one.prompt, one.tokens, output["logprobs"].data[len(one.prompt) - 1 :])
        for one, output in zip(of, outputs, strict=True)
    ]
    data = add_advantages(data, [one.reward for one in of], [one.question for one in of], scale="none")
    return add_teacher_logprobs(data, base, [one.hinted for one in of])


def main(url: str, model: str) -> None:
    """Ask the server, and print what it finds."""
    service, found = ServiceClient(base_url=url, api_key="tml-local"), {}
    client = service.create_lora_training_client(base_model=model, rank=RANK, seed=0)
    data = data_of(client, service.create_sampling_client(base_model=model))
    for name, options in LOSSES.items():
        metrics = forward_backward_on_skyrl(client, data, loss_fn(**options), backend="jax")
        step = client.optim_step(types.AdamParams(learning_rate=0.0)).result()
        found[name] = [metrics["composer/loss"], step.metrics["skyrl.ai/grad_norm"]]
    client.save_weights_for_sampler("first").result()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
