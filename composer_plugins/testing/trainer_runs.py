"""`Trainer`: a function that makes trainers, as a subject; the rows that all of them are given."""

import inspect
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from composer_plugins.calling_convention import scalar_problems
from composer_plugins.errors import ConfigError, with_place
from composer_plugins.testing.law import NotApplicable, require
from composer_plugins.testing.subject import Cut, Found, Signs

PROBE = "composer_plugins.adapters.trl_mixin.probe"
MakeTrainer = Callable[..., Any]
Rows = dict[str, Any]
# Rows of the generation batch: they are cut into 1, 2 and 4 parts.
PARTS = (1, 2, 4)
JUNK = -40.0
CLOSE = 1e-4  # of the norm: sums in float32 in another order
GRADIENT = "the gradient"


class Trainer:
    """A function that makes trainers, the rows that all of them are given, and their gradients."""

    label = ""

    def __init__(self, make: MakeTrainer) -> None:
        try:
            self.probe = import_module(PROBE)
        except ImportError as error:
            problem = f"TRL cannot be imported here: {error}"
            raise ConfigError("--trainer", problem, "run this where TRL is installed") from None
        self.make_own = make
        first = self.make()
        self.args = first.args
        self.size = math.lcm(2 * PARTS[-1], first.num_generations)
        made = self.make(**self.step(1, generations=2, size=2 * self.size))
        try:
            generated = self.probe.generated_rows(made)
        except Exception as error:
            problem = f"its first rows cannot be generated: {with_place(error)}"
            raise ConfigError("--trainer", problem, "return a trainer that trains") from error
        self.rows = prepared(generated, self.size)
        self.on_policy = prepared(generated, self.size, spread=0.0)

    @cached_property
    def whole(self) -> Tensor:
        """The gradient of one micro-batch."""
        (found,) = self.gradients(**self.step(1))
        require(found.any(), "the gradient is 0", cause="usual cause: a loss that is detached")
        return found

    def options(self) -> list[str]:
        """The options of TRL's loss that this config has, and those that the user's own config adds."""
        names = {field.name for field in fields(self.args)}
        theirs = [name for name in self.probe.LOSS_OPTIONS if name in names]
        return [*theirs, *sorted(names - self.probe.TRL_FIELDS)]

    def batches(self, to_be_cut: bool = False) -> list[Rows]:
        """The rows that every trainer is given."""
        return [self.rows]

    def run(
        self, batch: Rows, *, cut: Cut | None = None, seed: int | None = None, weighted: bool = False
    ) -> Found:
        """The gradient of a step on these rows."""
        if batch is self.rows and cut is None and seed is None:
            return {GRADIENT: self.whole}
        options = self.step(1) if cut is None else cut.options
        return {GRADIENT: self.gradients(batch, seed=seed, **options)[0]}

    def compare(self, ours: Found, wanted: Found, what: str, *, exactly: bool = False) -> None:
        """Raise BrokenLaw unless two gradients agree within the roundings of float32."""
        error = difference(ours[GRADIENT], wanted[GRADIENT])
        require(error <= CLOSE, f"{what.format(GRADIENT)}: |difference| / |gradient| = {error:.3g}")

    def cuts(self, batch: Rows) -> Iterator[Cut]:
        """Yield 2 and 4 micro-batches."""
        for parts in PARTS[1:]:
            yield Cut(f"{parts} micro-batches of {self.size} rows", [], options=self.step(parts))

    def masked(self, batch: Rows, junk: Tensor | None = None) -> Iterator[tuple[str, Rows]]:
        """Yield the rows with other tokens and other log-probabilities where completion_mask is 0."""
        yield "with other tokens where masked", poisoned(batch)

    def padded(self, batch: Rows) -> Iterator[tuple[str, Rows]]:
        """Yield the rows with masked columns at the end of every completion."""
        yield "with 3 more columns", padded(batch)

    def both_signs(self) -> Iterator[Signs]:
        """Yield what descent raises where all policies are equal."""
        ours, flipped = self._both_signs
        if ours is None or flipped is None:
            problem = "the loss does not call the trainer's _get_per_token_logps_and_entropies for its rows"
            raise NotApplicable(problem)
        yield Signs(ours.mask, ours.advantages, -ours.gradient, -flipped.gradient, by_row=True)

    @cached_property
    def _both_signs(self) -> list[Any]:
        options, rows = self.step(1), self.on_policy
        if getattr(self.args, "top_entropy_quantile", 1.0) != 1.0:
            options["top_entropy_quantile"] = 1.0  # it leaves out tokens of low entropy
        signed = [rows | {"advantages": sign * rows["advantages"]} for sign in (1, -1)]
        return [self.probe.token_gradients(self.make(**options), one) for one in signed]

    def make(self, **overrides: Any) -> Any:
        """A new trainer with these options; ConfigError if it does not have them."""
        shown = (
            ", ".join(f"{name}={value!r}" for name, value in overrides.items())
            or "the options that every check sets"
        )
        overrides = {**self.probe.QUIET, "max_steps": 1, **overrides}
        try:
            made = self.make_own(**overrides)
        except Exception as error:
            remedy = "let it take overrides of its config: make_trainer(**overrides) -> GRPOTrainer"
            if not isinstance(error, TypeError):
                remedy = "correct the function: it must return a trainer"
            raise ConfigError("--trainer", f"it fails with {shown}: {with_place(error)}", remedy) from error
        self.probe.require_trainer(made)
        for name, value in overrides.items():
            # TRL fills in a value for None, and makes a list of a name.
            if value is not None and name != "report_to" and getattr(made.args, name) != value:
                problem = f"the trainer has {name}={getattr(made.args, name)!r}, and not {value!r}"
                raise ConfigError("--trainer", problem, "set the overrides over the options of your own")
        self.probe.around_loss(made, after=lambda loss: require_loss(made, loss))
        return made

    def step(self, parts: int, *, generations: int = 1, size: int = 0) -> dict[str, Any]:
        """The options of a step of that many micro-batches, and of that many steps per generation batch."""
        return {
            "per_device_train_batch_size": (size or self.size) // parts // generations,
            "gradient_accumulation_steps": parts,
            "steps_per_generation": parts * generations,
            "generation_batch_size": None,
            "max_steps": generations,
        }

    def gradients(self, rows: Rows | None = None, *, seed: int | None = None, **options: Any) -> list[Tensor]:
        """The gradient of each step on these rows, perhaps with other random numbers in the loss."""
        found: list[Tensor] = self.probe.gradients(self.make(**options), rows or self.rows, seed)
        return found


def require_loss(trainer: Any, loss: Any) -> None:
    """Raise BrokenLaw, with the place of the trainer's `_compute_loss`, unless this is one number."""
    try:
        problems = scalar_problems(loss)
    except TypeError as error:
        problems = (str(error),)
    code = inspect.unwrap(type(trainer)._compute_loss).__code__
    place = f"_compute_loss at {os.path.relpath(code.co_filename)}:{code.co_firstlineno}"
    require(
        not problems, f"{'; '.join(problems)} ({place})", cause="return a tensor: one number, with a gradient"
    )


def difference(ours: Tensor, wanted: Tensor) -> float:
    """|a - b| / |b|."""
    return float((ours - wanted).norm() / wanted.norm().clamp(min=1e-30))


def prepared(rows: Rows, size: int, spread: float = 0.3) -> Rows:
    """Rows with completions of different lengths, advantages of both signs, and old and reference policies.

    `spread` is how far the log-probabilities of these policies lie from those of the policy.
    A small model's own rows may all be equally long, with equal rewards: they would show no fault.
    """
    generator = torch.Generator().manual_seed(0)
    rows = {
        n: x[:size] if isinstance(x, Tensor) and x.dim() and len(x) >= size else x for n, x in rows.items()
    }
    ids = rows["completion_ids"]
    width = ids.shape[1]
    lengths = torch.tensor([1 + (3 * i + i // 4) % width for i in range(size)])
    mask = (torch.arange(width) < lengths[:, None]).to(rows["completion_mask"])
    tools = rows.get("tool_mask")
    tokens = (mask if tools is None else mask * tools).sum()
    shape = rows["advantages"].shape
    advantages = torch.randn(shape, generator=generator).to(rows["advantages"])
    rows |= {"completion_mask": mask, "num_items_in_batch": tokens, "advantages": advantages}
    old = rows.get("old_per_token_logps")
    if old is not None:
        far = [old + spread * torch.randn(old.shape, generator=generator).to(old) for _ in range(2)]
        near = [x.clamp(max=0.0) for x in far]  # a trainer may refuse a probability above 1
        rows |= dict(zip(("old_per_token_logps", "ref_per_token_logps"), near, strict=True))
    return rows


def poisoned(rows: Rows) -> Rows:
    """Other tokens and other log-probabilities where completion_mask is 0."""
    out = rows["completion_mask"] == 0
    other = rows["completion_ids"].flip(0).flip(1)
    other = torch.where(
        other == rows["completion_ids"], (other + 1) % (rows["completion_ids"].max() + 1), other
    )
    logps = {n: torch.where(out, JUNK, x) for n, x in rows.items() if n.endswith("_per_token_logps")}
    return rows | logps | {"completion_ids": torch.where(out, other, rows["completion_ids"])}


def padded(rows: Rows, columns: int = 3) -> Rows:
    """Masked columns at the end of every completion."""
    shape = rows["completion_ids"].shape
    wide = {n: x for n, x in rows.items() if isinstance(x, Tensor) and x.shape == shape}
    added = {n: torch.cat([x, x[:, -1:].expand(-1, columns)], 1) for n, x in wide.items()}
    added["completion_mask"][:, shape[1] :] = 0
    return rows | added
