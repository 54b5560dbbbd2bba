"""The measurements: how often a teacher is right, how far it is from the policy, and what it gives away."""

import random
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from composer_plugins.columns import Row, hint_of, hinted_prompt
from composer_plugins.kernels.divergences import forward_kl, reverse_kl
from composer_plugins.teacher.subject import Subject, TokenIds, batches

NAN = float("nan")
WORDS = 3  # of a wording: so many words in a row


class Measured(NamedTuple):
    """What is measured of a teacher, means over the rows. The first row, named "", is the policy alone."""

    name: str
    template: str
    greedy: float  # the reward of the most probable completion
    sampled: float  # the reward of completions sampled at the temperature of training
    gain: float = NAN  # `sampled` minus the policy's
    gain_error: float = NAN  # the standard error of `gain`, over the rows
    shown: float = NAN  # the share of prompts in which the teacher can read its whole hint
    forward_kl: float = NAN  # KL(teacher || policy) in nats per token of the policy's completions
    reverse_kl: float = NAN  # KL(policy || teacher), likewise
    ordered: float = NAN  # how often the teacher likes the better of two completions of a prompt more
    leaks: float = NAN  # the share of the teacher's completions that repeat the wording of the hints
    control: str = ""  # its kind; it is compared with the right hint in the same template:
    better: float = NAN  # `sampled` of the right hint minus the control's
    better_error: float = NAN  # its standard error, over the rows


def measure(
    subject: Subject, templates: Mapping[str, str], *, control: bool = False, seed: int = 0
) -> Iterator[Measured]:
    """Yield what is measured of the policy without a hint, and of its teacher by each template.

    The policy's sampled completions are those that the hint channel would distil on. On them the two
    distributions are compared, at the sampling temperature. `ordered` is the share of pairs of completions of
    one prompt, with different rewards, of which the better one has the larger mean of log T(y) - log S(y)
    per token; equal means count half, and it is NaN without such pairs.
    `leaks` looks for three words in a row that stand in the text around at least half of the hints, or in
    these, and neither in a prompt nor in a completion of the policy. With fewer than two rows it is NaN.

    With `control` every template is measured again with the hints of other rows, and then with the prompts
    and hints of other rows as solved examples. `seed` draws the other rows.
    """
    own = subject.encode([row["prompt"] for row in subject.rows])
    rows, repeated = _repeated(subject.rows, subject.samples), _repeated(own, subject.samples)
    completions = subject.completions(repeated, sampled=True)
    rewards = subject.rewarded(rows, completions)
    greedy = subject.rewarded(subject.rows, subject.completions(own, sampled=False))
    yield Measured("", "", _mean(greedy), _mean(rewards))
    said = [row["prompt"] for row in subject.rows]
    policy_means = _means(rewards, subject.samples)
    known = {gram for text in (*map(_text, said), *subject.texts(completions)) for gram in _grams(text)}
    others = other_rows(subject.rows, seed)
    wrong = [str(hint_of(row)) for row in others]
    solved = [f"{_text(row['prompt'])}\n{hint}" for row, hint in zip(others, wrong, strict=True)]
    hints = {"": [str(hint_of(row)) for row in subject.rows]}
    hints |= {"wrong hint": wrong, "unrelated example": solved} if control else {}
    right = dict[str, list[float]]()
    for kind, name, template in [(kind, *one) for kind in hints for one in templates.items()]:
        both = zip(said, hints[kind], strict=True)
        ids = subject.encode([hinted_prompt(prompt, hint, template) for prompt, hint in both])
        taught = subject.completions(_repeated(ids, subject.samples), sampled=True)
        best = subject.completions(ids, sampled=False)
        means = _means(subject.rewarded(rows, taught), subject.samples)
        gains = [theirs - ours for theirs, ours in zip(means, policy_means, strict=True)]
        forward, reverse, scores = _compared(subject, repeated, _repeated(ids, subject.samples), completions)
        added = [template.format(prompt="", privileged_context=hint) for hint in hints[kind]]
        better = [a - b for a, b in zip(right.setdefault(name, means), means, strict=True)]
        yield Measured(
            f"{name}, {kind}" if kind else name,
            template,
            _mean(subject.rewarded(subject.rows, best)),
            _mean(means),
            _mean(gains),
            _standard_error(gains),
            _shown(subject, ids, own, hints[kind]),
            forward,
            reverse,
            _ordered(rewards, scores, subject.samples),
            _leaks(_wording(added) - known, subject.texts(taught), len(subject.rows)),
            kind,
            *((_mean(better), _standard_error(better)) if kind else ()),
        )


def other_rows(rows: Sequence[Row], seed: int) -> list[Row]:
    """Another row for each row; one with the same hint only where more than half of the rows have it."""
    hints = [str(hint_of(row)) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (random.Random(f"{seed} {hints[i]}").random(), i))
    most = max(Counter(hints).values())
    shift = most if most < len(rows) else 1
    other = dict(zip(order, [*order[shift:], *order[:shift]], strict=True))
    return [rows[other[i]] for i in range(len(rows))]


def _compared(
    subject: Subject, prompts: Sequence[TokenIds], hinted: Sequence[TokenIds], completions: Sequence[TokenIds]
) -> tuple[float, float, list[float]]:
    """Both divergences per token, and each completion's mean of log T(y) - log S(y)."""
    forward = reverse = tokens = 0.0
    scores = list[float]()
    together = list(zip(prompts, hinted, completions, strict=True))
    for batch in batches(together, subject.batch_size):
        own, theirs, ids = zip(*batch, strict=True)
        student, mask = subject.logits(own, ids)
        teacher, _ = subject.logits(theirs, ids)
        temperature = subject.temperature
        forward += float(forward_kl(student, teacher, mask, temperature=temperature).loss.sum())
        reverse += float(reverse_kl(student, teacher, mask, temperature=temperature).loss.sum())
        tokens += float(mask.sum())
        ratio = _logprobs(teacher, ids, temperature) - _logprobs(student, ids, temperature)
        scores += (torch.where(mask, ratio, 0.0).sum(-1) / mask.sum(-1)).tolist()
    return forward / tokens, reverse / tokens, scores


def _logprobs(logits: Tensor, completions: Sequence[TokenIds], temperature: float) -> Tensor:
    """The log-probabilities [rows, tokens] of the completions' tokens."""
    length = logits.shape[1]
    ids = torch.tensor([[*one, *[0] * (length - len(one))] for one in completions], device=logits.device)
    return (logits.float() / temperature).log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def _ordered(rewards: Sequence[float], scores: Sequence[float], samples: int) -> float:
    groups = [range(start, start + samples) for start in range(0, len(rewards), samples)]
    pairs = [two for group in groups for two in permutations(group, 2) if rewards[two[0]] > rewards[two[1]]]
    right = sum((scores[a] > scores[b]) + (scores[a] == scores[b]) / 2 for a, b in pairs)
    return right / len(pairs) if pairs else NAN


def _shown(subject: Subject, hinted: list[TokenIds], own: list[TokenIds], hints: list[str]) -> float:
    """The share of rows whose teacher's prompt, decoded, has the whole text of the hint."""
    texts = (" ".join(text.split()) for text in subject.texts(hinted))
    both = zip(texts, (" ".join(hint.split()) for hint in hints), hinted, own, strict=True)
    found = [hint in text and ids != without for text, hint, ids, without in both]
    return sum(found) / len(found)


def _wording(texts: Sequence[str]) -> set[tuple[str, ...]]:
    """What at least half of the texts, and at least two, have in common: three words in a row."""
    counts = Counter(gram for text in texts for gram in _grams(text))
    return {gram for gram, count in counts.items() if count >= max(2, len(texts) / 2)}


def _grams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}


def _leaks(wording: set[tuple[str, ...]], completions: Sequence[str], rows: int) -> float:
    if rows < 2:
        return NAN
    return sum(not wording.isdisjoint(_grams(text)) for text in completions) / len(completions)


def _text(prompt: object) -> str:
    """Every text of a prompt."""
    if isinstance(prompt, list):
        return " ".join(_text(message.get("content")) for message in prompt)
    return str(prompt)


def _repeated(rows: Sequence, times: int) -> list:  # type: ignore[type-arg]
    return [row for row in rows for _ in range(times)]


def _means(rewards: Sequence[float], samples: int) -> list[float]:
    """The mean reward of each prompt's completions."""
    return [_mean(rewards[start : start + samples]) for start in range(0, len(rewards), samples)]


def _standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of the values that are known; NaN of fewer than two."""
    known = [value for value in values if value == value]
    return statistics.stdev(known) / len(known) ** 0.5 if len(known) > 1 else NAN


def _mean(values: Sequence[float]) -> float:
    """The mean of the rewards that apply."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else NAN
