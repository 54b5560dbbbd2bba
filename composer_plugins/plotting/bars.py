"""Advantages on example groups of rewards, and the weights that aggregation modes give to tokens."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from composer_plugins.losses.choosing import Choice
from composer_plugins.plotting.data import Curves, Panel, Picture, filled
from composer_plugins.plotting.lines import call

# Two rewards of each of four rollouts, for three prompts: a rare success, partial ones, and all equal.
COMPONENTS = (
    ((1.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
    ((1.0, 0.0), (0.5, 0.5), (0.5, 0.0), (0.0, 0.0)),
    ((0.5, 0.0), (0.0, 0.5), (0.5, 0.0), (0.0, 0.5)),
)
CASES = ("one of four succeeds", "mixed rewards", "all have the same reward")
TOKEN_COUNTS = (3, 5, 2, 4)  # tokens of each rollout of a group, for losses that use lengths
TOKENS, BASELINE, VALUES = 3, 0.5, (0.3, 0.4, 0.5)
REFERENCE = (0.0, 0.0, 1.0, 0.5)  # rewards of a reference policy
PROBABILITIES = (0.9, 0.5, 0.3, 0.2)  # of the tokens of each rollout
SQUARED = 0.15  # of the other entries, squared
ALPHA = 1.0  # of VAPO's lambda, 1 - 1 / (alpha length): published for thousands of tokens
LENGTHS, PROMPTS = (1, 2, 3), (0, 1, 1)


def advantage_picture(chosen: Sequence[Choice]) -> Picture:
    """The advantage of each rollout, in three groups of four."""
    x = torch.arange(len(COMPONENTS[0]), dtype=torch.float64)
    curves = [Curves(one, tuple((x, group) for group in advantages(one))) for one in chosen]
    panels = []
    for case, group in zip(CASES, COMPONENTS, strict=True):
        rewards = tuple(f"{sum(components):g}" for components in group)
        panels.append(Panel(case, "reward of each rollout of the prompt", "advantage", categories=rewards))
    return Picture(filled(panels, curves), len(panels), tuple(_advantage_notes(chosen)))


def advantages(choice: Choice) -> Tensor:
    """The advantage of each rollout [groups, rollouts]; the first token's where tokens differ."""
    components = torch.tensor(COMPONENTS, dtype=torch.float64)
    groups, size, _ = components.shape
    rewards = components.sum(-1).flatten()
    by_token = "token_rewards" in choice.loss.needs
    last = torch.zeros(len(rewards), TOKENS, dtype=torch.float64)
    last[:, -1] = rewards
    pi = torch.tensor(PROBABILITIES, dtype=torch.float64).repeat(groups).unsqueeze(1).expand(last.shape)
    inputs = {
        "rewards": rewards,
        "group_ids": torch.arange(groups).repeat_interleave(size),
        "lengths": torch.tensor(TOKEN_COUNTS, dtype=torch.float64).repeat(groups),
        "reward_components": components.flatten(0, 1),
        "token_rewards": last,
        "reference_rewards": torch.tensor(REFERENCE, dtype=torch.float64).expand(len(rewards), -1),
        "old_logprobs": pi.log(),
        "sum_pi_squared": pi.square() + SQUARED * (1 - pi),
        "values": torch.tensor(VALUES, dtype=torch.float64).expand(len(rewards), -1),
        "baselines": torch.full_like(rewards, BASELINE),
        "mask": torch.ones_like(last if by_token else rewards, dtype=torch.bool),
    }
    if _is_for_long_responses(choice):
        choice = replace(choice, params={**choice.params, "alpha": ALPHA})
    found = call(choice, inputs)
    return (found[:, 0] if by_token else found).reshape(groups, size)


def _is_for_long_responses(choice: Choice) -> bool:
    return "values" in choice.loss.needs and "alpha" in choice.loss.parameters


def _advantage_notes(chosen: Sequence[Choice]) -> list[str]:
    notes, needs = [], {need for one in chosen for need in one.loss.needs}
    if "lengths" in needs:
        notes.append(f"The rollouts have {', '.join(map(str, TOKEN_COUNTS))} tokens.")
    if "reward_components" in needs:
        each = ["; ".join(f"{a:g} + {b:g}" for a, b in group) for group in COMPONENTS]
        notes.append(f"The rewards are sums of two: {' | '.join(each)}.")
    if by_token := [one.name for one in chosen if "token_rewards" in one.loss.needs]:
        notes.append(f"{', '.join(by_token)}: the first of {TOKENS} tokens; the last one has the reward.")
    if "baselines" in needs:
        notes.append(f"The greedy response has the reward {BASELINE:g}.")
    if long := [one.name for one in chosen if _is_for_long_responses(one)]:
        notes.append(f"{', '.join(long)}: alpha is {ALPHA:g}, because the responses are short.")
    if "sum_pi_squared" in needs:
        shown = ", ".join(f"{one:g}" for one in PROBABILITIES)
        notes.append(f"The tokens of the four rollouts have the probabilities {shown}.")
    if "reference_rewards" in needs:
        notes.append(f"The reference's rewards are {', '.join(f'{one:g}' for one in REFERENCE)}.")
    if "values" in needs:
        notes.append(f"The critic's values are {', '.join(f'{one:g}' for one in VALUES)}.")
    return notes


def aggregation_picture(chosen: Sequence[Choice]) -> Picture:
    """The weight of one token of each response in the loss, and of the whole response."""
    x = torch.arange(len(LENGTHS), dtype=torch.float64)
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    weights = [token_weights(one) for one in chosen]
    curves = [Curves(one, ((x, w), (x, w * lengths))) for one, w in zip(chosen, weights, strict=True)]
    categories, label = tuple(map(str, LENGTHS)), "tokens of the response"
    titles = ("weight of one token in the loss", "weight of the whole response")
    blank = [Panel(title, label, "weight", categories=categories) for title in titles]
    notes = ("One batch of three responses; the last two answer the same prompt.",)
    return Picture(filled(blank, curves), 2, notes)


def token_weights(choice: Choice) -> Tensor:
    """The derivative of the loss by the loss of the first token of each response."""
    rows, width = len(LENGTHS), max(LENGTHS)
    token_loss = torch.zeros(rows, width, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    inputs = {"token_loss": token_loss, "mask": mask, "group_ids": torch.tensor(PROMPTS)}
    facts = {"rows": rows, "width": width}
    dialect = choice.dialect
    counts = {name: facts[fact] for name, fact in dialect.denominators.items()} if dialect else {}
    total = call(replace(choice, params={**choice.params, **counts}), inputs)
    (gradient,) = torch.autograd.grad(total, token_loss)
    return gradient[:, 0]
