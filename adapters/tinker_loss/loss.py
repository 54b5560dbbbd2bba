"""The three channels on the data of one `forward_backward_custom`: the loss, and its metrics."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from composer_plugins.adapters.tinker_loss.options import Parsed
from composer_plugins.adapters.tinker_loss.upstream import (
    Batch,
    Requests,
    entry,
    pair_weight,
    place,
    read_mask,
)
from composer_plugins.errors import ComposerWarning, ConfigError, DataError, Finding
from composer_plugins.health.watch import OURS, Health, per_token
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.composer import composer
from composer_plugins.kernels.masking import keep
from composer_plugins.kernels.preference import sequence_logprobs, weighted
from composer_plugins.kernels.types import Metric
from composer_plugins.losses.calling import call, differ_by_token, differing_advantages
from composer_plugins.losses.metrics import means
from composer_plugins.objective.terms import hint_choice, hinted_advantages, policy_term

Result = tuple[Tensor, dict[str, float]]
FROM_SAMPLER = "write the log-probabilities that the sampler returned, and 0 at targets of the prompt"
FROM_REFERENCE = "call add_ref_logprobs"
FROM_TEACHER = "call add_teacher_logprobs, which also takes data without a hint"


class Counts(NamedTuple):
    """What the channels of one step are divided by."""

    tokens: int  # unmasked, of data that are in no pair
    sequences: int  # of those data, with an unmasked token
    hint_tokens: int
    pairs: int


class Layout(NamedTuple):
    """Which tokens of the data each channel trains, [B, T] each, and the rows (chosen, rejected) of pairs."""

    rows: list[Tensor]  # the mask of each datum, [tokens]
    mask: Tensor
    policy: Tensor
    hint: Tensor
    pairs: list[tuple[int, int]]

    @property
    def counts(self) -> Counts:
        """The counts of these data."""
        tokens, rows, hinted = self.policy.sum(), self.policy.any(-1).sum(), self.hint.sum()
        return Counts(int(tokens), int(rows), int(hinted), len(self.pairs))


class Loss:
    """The loss of these channels as a function of (data, logprobs), for `forward_backward_custom`."""

    def __init__(self, parsed: Parsed) -> None:
        self.parsed, self.asked, self.options = parsed, parsed.asked, parsed.options
        self.hint = hint_choice(parsed.asked.config)
        self.keys = parsed.entries
        self.warned = set[str]()
        self.health = Health.of(parsed.options, parsed.asked.choice, "tinker", parsed.mode)
        self.last: Requests | None = None  # of the last call

    def __call__(self, data: Sequence[Any], logprobs: Sequence[Tensor]) -> Result:
        """The loss [] of a step with one call, and its metrics."""
        options, layout = self.options, self.layout(data)
        is_divided = options.policy_weight and self.parsed.mode != "token-sum"
        if is_divided or self.asked.hint or self.asked.replay:
            self._require_one_call()
        return self.of_counts(layout, data, logprobs, layout.counts)

    def _require_one_call(self) -> None:
        """Raise ConfigError if this is one of several calls of its step, as far as the SDK shows it."""
        calls, requests = self.options.calls_per_step, Requests.of_this_call()
        remedy = "pass loss.of_step(loss.count(data)) with the data of all calls of the step"
        if calls > 1:
            problem = f"it is {calls}, and this call has no counts of the whole step"
            raise ConfigError("calls_per_step", problem, remedy)
        if requests is not None and requests.follow(self.last):
            problem = "it is 1, and this is a second call before optim_step"
            raise ConfigError("calls_per_step", problem, f"set it to the number of calls, and {remedy}")
        self.last = requests

    def __repr__(self) -> str:
        options, asked, correction = self.options, self.asked, self.asked.correction
        policy = f"policy {asked.choice.described}, {self.parsed.mode}"
        policy += f", old_policy={options.old_policy!r}" if options.old_policy else ""
        policy += f", rollout_correction {correction.described}" if correction else ""
        terms = [(options.policy_weight, policy)]
        terms += [(options.hint_weight, f"hint {asked.hint.described}")] if asked.hint else []
        terms += [(options.replay_weight, f"replay {asked.replay.described}")] if asked.replay else []
        calls = f", calls_per_step={options.calls_per_step}" * (options.calls_per_step > 1)
        return " + ".join(f"{weight:g} * ({term})" for weight, term in terms if weight) + calls

    def count(self, data: Sequence[Any]) -> Counts:
        """The counts of a step, from the data of all its calls; DataError for what the loss would refuse.

        It runs the loss with log-probabilities of 0, so that the data are read as in the step.
        """
        layout = self.layout(data)
        self.of_counts(layout, data, [torch.zeros(len(one)) for one in layout.rows], layout.counts)
        return layout.counts

    def of_step(self, counts: Counts) -> "Step":
        """The loss for the calls of one step: their gradients add up to the gradients of one call."""
        return Step(self, counts)

    def layout(self, data: Sequence[Any]) -> Layout:
        """Which tokens each channel trains; DataError for an incomplete pair, and for a wrong mask."""
        masks = [read_mask(data, row, self.keys["mask"]) for row in range(len(data))]
        mask = pad_sequence(masks, batch_first=True)
        pairs = self._pairs(data)
        for row in (row for pair in pairs for row in pair if not masks[row].any()):
            problem = "it is 0 at every target, and the datum is in a pair"
            raise DataError(place(row, self.keys["mask"]), problem, "leave the pair out")
        policy = mask.clone()
        policy[[row for pair in pairs for row in pair]] = False
        hint, key = torch.zeros_like(mask), self.keys["hint_mask"]
        if self.asked.hint is not None:
            present = [key in one.loss_fn_inputs for one in data]
            marks = [read_mask(data, row, key) if has else masks[row] for row, has in enumerate(present)]
            hint = pad_sequence(marks, batch_first=True) & policy
        return Layout(masks, mask, policy, hint, pairs)

    def _pairs(self, data: Sequence[Any]) -> list[tuple[int, int]]:
        """The rows (chosen, rejected) of each pair."""
        key, found = self.keys["pair"], dict[int, dict[bool, int]]()
        for row in range(len(data)):
            if key not in data[row].loss_fn_inputs:
                continue
            given = float(entry(data, row, key, ""))
            if given != (number := int(given)):  # negative for the rejected completion
                remedy = "write one whole number: mark_pairs does"
                raise DataError(place(row, key), f"it is {given:g}", remedy)
            if self.asked.replay is None:
                problem = "the datum is in a pair, and replay_weight is 0"
                raise DataError(place(row, key), problem, "set replay_weight, or leave the pairs out")
            sides = found.setdefault(abs(number), {})
            if (number > 0) in sides:
                raise DataError(place(row, key), f"two data have the number {number}", "call mark_pairs once")
            sides[number > 0] = row
        for number, sides in found.items():
            if len(sides) != 2:
                problem = f"pair {number} has a {'chosen' if True in sides else 'rejected'} completion alone"
                (row,) = sides.values()
                raise DataError(place(row, key), problem, "pass both completions of a pair in one call")
        return [(sides[True], sides[False]) for sides in found.values()]

    def of_counts(
        self, layout: Layout, data: Sequence[Any], logprobs: Sequence[Tensor], counts: Counts
    ) -> Result:
        """The loss [] of some data of a step, divided by the counts of the step; and its metrics."""
        options = self.options
        self._require(counts)
        batch = Batch.of(data, logprobs, layout.mask)
        metrics: dict[str, float] = {}
        policy = keep(batch.logprobs, torch.zeros_like(layout.mask)).sum()  # 0, with a gradient for every row
        hint = self._hint(batch, layout, metrics) if self.asked.hint is not None else None
        if options.policy_weight:
            given, correction = self.policy_inputs(batch, layout), self.asked.correction
            old = given["old_logprobs"] if self.asked.needs_old else None
            token = policy_term(self.asked.choice, given, correction, layout.policy, old)
            named: dict[str, Any] = {"num_tokens": counts.tokens, "num_sequences": counts.sequences}
            named |= {"max_length": options.max_length} if options.max_length else {}
            policy = aggregate(token.loss, layout.policy, self.parsed.mode, **named)  # type: ignore[arg-type]
            metrics |= means(token.metrics, "composer/policy/")
            if batch.logprobs.requires_grad:  # `count` has none of the policy
                value = None if correction else policy
                measured = self.health.micro_batch(given, token.metrics, loss=value, counts=named)
                metrics |= means(per_token(measured, layout.policy), OURS)
        replay = self._replay(batch, layout, metrics) if self.asked.replay is not None else None
        hint = None if hint is None else hint.sum() / max(counts.hint_tokens, 1)
        replay = None if replay is None else replay.sum() / counts.pairs
        terms = {"policy": policy if options.policy_weight else None, "hint": hint, "replay": replay}
        metrics |= {f"composer/{name}/loss": float(x.detach()) for name, x in terms.items() if x is not None}
        total = composer(
            policy,
            hint,
            replay,
            policy_weight=options.policy_weight or 1.0,
            hint_weight=options.hint_weight,
            replay_weight=options.replay_weight,
        )
        return total, {**metrics, "composer/loss": float(total.detach())}

    def _require(self, counts: Counts) -> None:
        """Raise DataError for a step without pairs, and warn of one without tokens."""
        options, mask = self.options, self.keys["mask"]
        if self.asked.replay is not None and not counts.pairs:
            problem = f"replay_weight is {options.replay_weight:g}, and no datum of the step has it"
            raise DataError(self.keys["pair"], problem, "add pairs with mark_pairs, or remove replay_weight")
        if options.policy_weight and not counts.tokens:
            problem = "it is 0 at every target of the data that are in no pair, so the policy term is 0"
            remedy = "write 1 at the targets of each completion, or set policy_weight to 0"
            self._warn(Finding("warning", mask, problem, remedy))
        if self.asked.hint is not None and not counts.hint_tokens:
            problem = f"it is {options.hint_weight:g}, and no token has a hint"
            remedy = "give a prompt to add_teacher_logprobs, or remove hint_weight"
            self._warn(Finding("warning", "hint_weight", problem, remedy))

    def _warn(self, finding: Finding) -> None:
        """Warn once: every step may have it."""
        if finding.key not in self.warned:
            warnings.warn(str(finding), ComposerWarning, stacklevel=5)
        self.warned.add(finding.key)

    def policy_inputs(self, batch: Batch, layout: Layout) -> dict[str, Tensor]:
        """The inputs of the policy loss by their names, [B, T] each."""
        mask, config, needs_old = layout.policy, self.options, self.asked.needs_old
        given = {"logprobs": batch.logprobs, "mask": mask}
        wanted = {*self.asked.choice.loss.needs, *self.asked.choice.optional}
        for name in wanted & {"ref_logprobs", "teacher_logprobs"}:
            remedy = FROM_TEACHER if name == "teacher_logprobs" else FROM_REFERENCE
            given[name] = batch.tokens(self.keys[name], mask, remedy)
        if "advantages" in wanted:
            given["advantages"] = self._advantages(batch, layout)
            if self.asked.choice.loss.per_sequence and differ_by_token(given["advantages"], mask):
                raise differing_advantages(self.asked.choice.loss)
        of_old = self.keys["old_logprobs"]
        trained = (batch.data[row] for row in mask.any(-1).nonzero().flatten().tolist())
        has_old = needs_old and config.old_policy is None and any(of_old in x.loss_fn_inputs for x in trained)
        from_sampler = needs_old and not has_old and config.old_policy != "current"
        correction = self.asked.correction
        if from_sampler or correction is not None or "rollout_logprobs" in wanted:
            given["rollout_logprobs"] = self._rollout(batch, mask)
        if from_sampler and correction is not None:
            problem = "old_logprobs are the sampler's too, so that each of its weights is 1"
            remedy = f"add {of_old!r} to loss_fn_inputs, or use policy='reinforce'"
            raise ConfigError("rollout_correction", problem, remedy)
        if has_old:
            remedy = "add it to all data, or to none"
            given["old_logprobs"] = batch.tokens(of_old, mask, remedy)
        elif needs_old:
            given["old_logprobs"] = given["rollout_logprobs"] if from_sampler else batch.logprobs.detach()
        return given

    def _rollout(self, batch: Batch, mask: Tensor) -> Tensor:
        return batch.tokens(self.keys["rollout_logprobs"], mask, FROM_SAMPLER)

    def _advantages(self, batch: Batch, layout: Layout) -> Tensor:
        """The advantages, with the hint in them where hint_estimator is "advantage"."""
        key, remedy = self.keys["advantages"], "call add_advantages"
        advantages = batch.tokens(key, layout.policy, remedy, is_logprob=False)
        if self.asked.hint is None or self.hint is not None:
            return advantages
        teacher = batch.tokens(self.keys["teacher_logprobs"], layout.hint, FROM_TEACHER)
        weight = self.options.hint_weight
        return hinted_advantages(advantages, batch.logprobs, teacher, layout.hint, weight)

    def _hint(self, batch: Batch, layout: Layout, metrics: dict[str, float]) -> Tensor | None:
        """The divergence per token [B, T]; None where it is a part of the advantages."""
        teacher = batch.tokens(self.keys["teacher_logprobs"], layout.hint, FROM_TEACHER)
        gap = batch.logprobs.detach() - teacher
        logged = {"kl": Metric(gap, layout.hint)}
        token = None
        if self.hint is not None:
            given = {"student_logprobs": batch.logprobs, "teacher_logprobs": teacher, "mask": layout.hint}
            token = call(self.hint, given | {"old_logprobs": self._rollout(batch, layout.hint)})
            logged |= token.metrics
        metrics |= means(logged, "composer/hint/")
        return None if token is None else keep(token.loss, layout.hint)

    def _replay(self, batch: Batch, layout: Layout, metrics: dict[str, float]) -> Tensor:
        """The loss per pair [pairs], times the pair's weight."""
        choice = self.asked.replay
        assert choice is not None
        if not layout.pairs:
            return batch.logprobs.new_zeros(1)
        rows, mask = torch.tensor(layout.pairs), torch.zeros_like(layout.mask)
        mask[rows.flatten()] = layout.mask[rows.flatten()]
        streams = {"": batch.logprobs}
        if "ref_chosen" in choice.loss.needs:
            streams["ref_"] = batch.tokens(self.keys["ref_logprobs"], mask, FROM_REFERENCE)
        sides = {"chosen": rows[:, 0], "rejected": rows[:, 1]}
        given = {
            prefix + side: sequence_logprobs(x[at], mask[at], average=choice.average)
            for prefix, x in streams.items()
            for side, at in sides.items()
        }
        better = sides["chosen"]
        given["chosen_nll"] = -sequence_logprobs(batch.logprobs[better], mask[better], average=True)
        pair, key = call(choice, given), self.keys["pair_weight"]
        metrics |= means(pair.metrics, "composer/replay/")
        weights = [
            pair_weight(place(row, key), entry(batch.data, row, key, ""))
            if key in batch.data[row].loss_fn_inputs
            else 1.0
            for row in better.tolist()
        ]
        loss: Tensor = weighted(pair, torch.tensor(weights, dtype=pair.loss.dtype)).loss
        return loss


class Step:
    """The loss for the calls of one step, divided by the counts of the whole step."""

    def __init__(self, loss: Loss, counts: Counts) -> None:
        self.loss, self.counts, self.seen = loss, counts, Counts(0, 0, 0, 0)

    def __call__(self, data: Sequence[Any], logprobs: Sequence[Tensor]) -> Result:
        """The loss [] of one call of the step, and its metrics."""
        layout = self.loss.layout(data)
        self.seen = Counts(*map(sum, zip(self.seen, layout.counts, strict=True)))
        names = ("tokens", "sequences", "tokens with a hint", "pairs")
        for name, seen, expected in zip(names, self.seen, self.counts, strict=True):
            if seen > expected:
                problem = f"the calls of this step have {seen} {name}, and it was made for "
                remedy = "count the data of all calls, and make a new one after each optim_step"
                raise DataError("of_step", f"{problem}{expected}", remedy)
        return self.loss.of_counts(layout, data, logprobs, self.counts)
