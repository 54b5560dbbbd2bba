"""`Health`: what an adapter calls with the tensors of its loss, and what warns the user."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from composer_plugins.batches import Recorder
from composer_plugins.errors import Finding, enforce
from composer_plugins.health.measuring import Window, gradient_sums, logged, token_sums
from composer_plugins.health.rules import RULES, Numbers, When, disagrees
from composer_plugins.kernels.types import Metric
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.flags import Flags

OURS = "composer/"
TOKENS, ROWS, MANY_ROWS = 256, 16, 32  # of a window; without so many tokens it ends after MANY_ROWS
FIRST_ROWS = 4  # of a window at equal weights that ends with the first update
STEPS = 16  # of a trend
FIRST_CALLS = 512  # are measured each, and of the later ones one of `every`
CLIPS = ("clip_low", "clip_high", "dual_clip", "ratio_cap", "tv_low", "tv_high", "kl_low", "kl_high")


class Judge:
    """The rules over the windows of a run: each warns once, and again where it is ten times worse."""

    def __init__(self) -> None:
        self.judged, self.updates = dict[int, int](), dict[int, int | None]()  # by rule
        self.streaks: dict[int, int] = {}  # by rule, the windows in a row in which it held
        self.told: dict[int, float] = {}  # by rule, the size when it last warned
        self.windows: dict[str, Window] = {}  # by "equal" or "later", the one that is being filled
        self.whole, self.baseline, self.has_ended_one = Window(), torch.inf, False

    def add(
        self, names: Sequence[str], values: Sequence[float], *, equal: bool, update: int | None = None
    ) -> list[Finding]:
        """Add a micro-batch, and return what is said by its window, if it is full, and by one that ends."""
        found, first = list[Finding](), self.windows.get("equal")
        if not equal and first and first["rows"] + first["empty rows"] >= FIRST_ROWS:
            found = self.ended(equal=True)
        window = self.windows.setdefault("equal" if equal else "later", Window())
        window.add(names, values)
        window.update = update
        count = window["rows"] + window["empty rows"]
        if count < ROWS or (window["tokens"] < TOKENS and count < MANY_ROWS):
            return found
        return found + self.ended(equal=equal)

    def ended(self, *, equal: bool) -> list[Finding]:
        """Judge the window of these weights, and begin another."""
        window = self.windows.pop("equal" if equal else "later")
        when: tuple[When, ...] = ("always", "equal", "whole") if equal else ("always", "later")
        if not self.has_ended_one:
            when, self.has_ended_one = (*when, "first") if equal else when, True
        if equal:
            window.sums["agreed before"] = float(self.whole["tokens"] >= 64 and not disagrees(self.whole))
            self.whole.add(tuple(window.sums), tuple(window.sums.values()))
        window.baseline = self.baseline
        found = self.judge(window, *when)
        if not equal and "kl" in window:
            self.baseline = min(self.baseline, max(window.mean("k3"), 1e-3))
        return found

    def judge(self, window: Window, *when: When) -> list[Finding]:
        """Return the warnings of the rules for these kinds of windows."""
        found = list[Finding]()
        for number, rule in enumerate(RULES):
            if rule.when not in when:
                continue
            of = self.whole if rule.when == "whole" else window
            held, self.judged[number] = rule.holds(of), self.judged.get(number, 0) + 1
            if rule.by_update and held:  # windows of one update count once, and of an unknown one never
                is_new = window.update is not None and window.update != self.updates.get(number)
                self.updates[number] = window.update
                self.streaks[number] = self.streaks.get(number, 0) + is_new
            else:
                self.streaks[number] = self.streaks.get(number, 0) + 1 if held else 0
            if rule.since_start and self.streaks[number] < self.judged[number]:
                continue
            others = {RULES[other].metric for other in self.told if other != number}
            is_explained = not others.isdisjoint(rule.unless.split())
            if self.streaks[number] < rule.windows or is_explained:
                continue
            size = abs(Numbers(of, 1)[rule.size]) if rule.size else 1.0
            if number not in self.told or size > 10 * self.told[number]:
                self.told[number] = size
                found.append(
                    Finding("warning", f"{OURS}health/{rule.metric}", rule.described(of), rule.remedy)
                )
        return found


class Health:
    """What the batches of a run say about it: metrics for the framework's log, and warnings.

    Sums of each micro-batch stay on the device and are copied without waiting for it, so that on a GPU a
    warning comes some calls later. With `on` False nothing is computed. A recorder writes each micro-batch.
    """

    def __init__(
        self,
        choice: Choice | None = None,
        *,
        on: bool = True,
        every: int = 1,
        recorder: Recorder | None = None,
    ) -> None:
        self.on, self.every, self.calls, self.recorder = on, every, 0, recorder
        self.judge = Judge()
        given = choice.params if choice is not None else {}
        self.facts = {"clip set": float(any(given.get(name) is not None for name in CLIPS))}
        self._flags, self._waiting = Flags(), deque[Any]()
        self._margins, self._last = deque[float](maxlen=STEPS), dict[str, Tensor]()
        self._rows, self._of_update = 0, 0.0  # seen so far, and in each update

    @classmethod
    def of(cls, config: Any, choice: Choice, framework: str, mode: str, *, every: int = 1) -> "Health":
        """What `health`, `record_batches` and `record_every` of our options ask for."""
        where = {"framework": framework, "version": "", "mode": mode}
        with suppress(PackageNotFoundError):  # PRIME-RL, NeMo-RL and slime run from a checkout
            where["version"] = version(framework)
        recorder = Recorder.of(config.record_batches, config.record_every, choice, **where)
        return cls(choice, on=config.health, every=every, recorder=recorder)

    def micro_batch(
        self,
        tensors: Mapping[str, Tensor | None],
        metrics: Mapping[str, Metric] | None = None,
        *,
        equal: bool | None = None,
        rows: float | Tensor | None = None,
        update: int | None = None,
        without: Sequence[str] = (),
        **recorded: Any,
    ) -> dict[str, Tensor]:
        """Measure a micro-batch; return its metrics, "health/kl", as 0-dimensional tensors on its device.

        `tensors` are as in `token_sums`. `equal` says whether trainer and sampler have the same weights;
        without it, the first `rows` rows of the run have them: by default the rows of one call.
        `update` is its number, if it is known, and `without` are metrics that the framework has itself. With
        `every` n, the first calls and each n-th later one are measured, and the last metrics are returned
        between them. A recorder gets `recorded` too: the loss, its counts and its factor.
        """
        self.calls += 1
        mask = tensors["mask"]
        size = len(mask) if mask is not None and mask.dim() > 1 else 1
        self._of_update = self._of_update or float(rows or 0.0) or max(size, FIRST_ROWS)
        step, self._rows = int(self._rows / self._of_update), self._rows + size
        if self.recorder is not None:
            is_row = mask is not None and mask.dim() == 1
            given = {name: x[None] if is_row else x for name, x in tensors.items() if x is not None}
            self.recorder(given, step=step, **recorded)
        is_left_out = self._last and self.calls > FIRST_CALLS and self.calls % self.every
        if not self.on or is_left_out or (mask is not None and not mask.numel()):
            return self._last
        equal = step == 0 and self._rows <= self._of_update if equal is None else equal
        sums = token_sums(tensors, metrics)
        policy = tensors["logprobs"]
        has_gradient = isinstance(policy, Tensor) and policy.requires_grad
        facts = self.facts | {"without a gradient": float(torch.is_grad_enabled() and not has_gradient)}
        at = step if update is None and rows is not None else update
        self.read(lambda names, values: self.judge.add(names, values, equal=equal, update=at), sums | facts)
        if isinstance(policy, Tensor) and has_gradient:
            policy.register_hook(lambda gradient: self._of_gradient(gradient, equal))
        self._last = {
            f"health/{name}": x for name, x in logged(sums, equal=equal).items() if name not in without
        }
        return self._last

    def _of_gradient(self, gradient: Tensor, equal: bool) -> None:
        name = "equal" if equal else "later"

        def add(names: Sequence[str], values: Sequence[float]) -> list[Finding]:
            self.judge.windows.setdefault(name, Window()).add(names, values)
            return []

        self.read(add, gradient_sums(gradient))

    def step(self, when: When, values: Mapping[str, Any]) -> None:
        """Judge what one step, or one update of the weights, shows: numbers, or tensors on a device."""
        if self.on:
            self.read(lambda *found: self.judge.judge(Window(dict(zip(*found, strict=True))), when), values)

    def margin(self, total: Tensor, count: Tensor) -> None:
        """Judge the trend of the margin of a batch's pairs, chosen less rejected: their sum and number."""

        def add(names: Sequence[str], values: Sequence[float]) -> list[Finding]:
            self._margins.extend([values[0] / values[1]] if values[1] else [])
            if len(self._margins) < STEPS or not values[1]:
                return []
            window = Window({"margin": self._margins[-1], "trend": _trend(self._margins)})
            return self.judge.judge(window, "pairs")

        if self.on:
            self.read(add, {"margin": total, "pairs": count})

    def read(self, add: Callable[..., list[Finding]], values: Mapping[str, Any]) -> None:
        """Give the values to `add` once the device has computed them, and warn of what it finds."""
        numbers = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        there = [value for value in values.values() if isinstance(value, Tensor)]
        names = [name for name in values if name not in numbers] + [*numbers]
        self._waiting.append((add, names, tuple(numbers.values())))
        vector = torch.stack(there).float() if there else torch.tensor([])
        for found in self._flags.read(vector):  # the vector itself from the host, which overtakes a GPU's
            judge, names, known = self._waiting.pop() if found is vector else self._waiting.popleft()
            enforce(judge(names, (*found.tolist(), *known)))


def per_token(found: Mapping[str, Tensor], mask: Tensor) -> dict[str, Metric]:
    """Return metrics of a micro-batch as metrics of a loss, which a framework averages over tokens."""
    return {name: Metric(value.expand(mask.shape), mask) for name, value in found.items()}


def equal_groups(rewards: Tensor, groups: Sequence[Any]) -> list[list[int]]:
    """Return the rows of each group in which all rewards, [rows] or [rows, functions], are equal."""
    table, members = _table(rewards), _members(groups)
    return [rows for rows in members.values() if len(rows) > 1 and not (table[rows] != table[rows[0]]).any()]


def rollouts(
    rewards: Tensor, groups: Sequence[Any], completions: Sequence[Sequence[int]] = ()
) -> dict[str, float]:
    """Return what a step's rollouts show, for `Health.step("rollouts", ...)`.

    `rewards` are [rows] or [rows, functions], `groups` the id of each row's prompt, and `completions` the
    token ids of each row, if they are at hand, -1 where masked out.
    """
    table, members = _table(rewards), _members(groups)
    same = [rows for rows in members.values() if len(rows) > 1 and completions]
    same = [rows for rows in same if len({tuple(completions[row]) for row in rows}) == 1]
    constant = (table == table[:1]).all(0) if len(table) else torch.ones(1)
    return {
        "rows": len(groups),
        "groups": len(members),
        "largest group": max(map(len, members.values()), default=0),
        "groups of one": sum(len(rows) == 1 for rows in members.values()),
        "equal groups": len(equal_groups(rewards, groups)),
        "same groups": sum(max(completions[rows[0]], default=-1) >= 0 for rows in same),
        "reward functions": table.shape[1],
        "constant rewards": float(constant.sum()),
        "one reward": float(bool(constant.all()) and bool(table.any())),  # for all rollouts, and not 0
    }


def _table(rewards: Tensor) -> Tensor:
    table = rewards.detach().float().cpu().nan_to_num()
    return table if table.dim() > 1 else table.unsqueeze(1)


def _members(groups: Sequence[Any]) -> dict[Any, list[int]]:
    members = dict[Any, list[int]]()
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    return members


def _trend(values: Sequence[float]) -> float:
    """The slope of a line through these values, in its standard errors; -inf for a fall without noise."""
    y = torch.tensor(list(values), dtype=torch.float64)
    x = torch.arange(len(y), dtype=torch.float64) - (len(y) - 1) / 2
    slope = (x * y).sum() / x.square().sum()
    error = ((y - y.mean() - slope * x).square().sum() / (len(y) - 2) / x.square().sum()).sqrt()
    return float(slope / error) if error > 0 else float(torch.sign(slope)) * torch.inf if slope else 0.0
