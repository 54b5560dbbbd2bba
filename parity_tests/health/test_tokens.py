"""What the tensors of micro-batches show: the sums, and the warnings of faulty and of sound runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from composer_plugins.errors import ComposerWarning
from composer_plugins.health.measuring import LARGEST, METRICS, Window, logged, token_sums
from composer_plugins.health.watch import Health, rollouts
from composer_plugins.kernels.policy import gspo
from composer_plugins.kernels.types import Metric
from composer_plugins.losses.choosing import choose
from composer_plugins.losses.flags import Flags
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.worlds import World

Change = Callable[[dict[str, Any]], dict[str, Any]]


def told(
    world: World,
    change: Change = lambda batch: batch,
    *,
    equal: bool | None = True,
    steps: int = 12,
    health: Health | None = None,
) -> list[str]:
    """The metrics under which a run of so many micro-batches warns, in their order."""
    health = health or Health()
    health.facts["sees hints"] = 1.0
    with pytest.warns(ComposerWarning) as caught:
        for step in range(steps):
            batch = change(world.batch())
            health.micro_batch(batch, batch.pop("metrics", None), equal=equal, update=step)
            if batch["logprobs"].requires_grad:
                (batch["logprobs"] * batch["advantages"] * batch["mask"]).sum().backward()
    return [str(one.message).partition(": ")[0].removeprefix("composer/health/") for one in caught]


def with_(**changes: Callable[[Tensor], Tensor]) -> Change:
    """Change these tensors of each batch."""
    return lambda batch: batch | {name: change(batch[name]) for name, change in changes.items()}


def holes(x: Tensor) -> Tensor:
    return x.expand(-1, 24).clone().index_fill(1, torch.arange(8), 0.0)


def spike(batch: dict[str, Any]) -> dict[str, Any]:
    big = torch.ones(16, 24)
    big[0, 0] = 1e6
    return batch | {"advantages": big * 1e-4}


def prompt_in_the_mask(batch: dict[str, Any]) -> dict[str, Any]:
    first = torch.arange(24) == 0
    changed = torch.where(first, -8.0, batch["logprobs"])
    return batch | {"logprobs": changed, "rollout_logprobs": batch["rollout_logprobs"] * ~first}


def padding_in_the_mask(batch: dict[str, Any]) -> dict[str, Any]:
    end = torch.arange(24) > 18
    changed = torch.where(end, -9.0, batch["logprobs"])
    return {name: x for name, x in batch.items() if name != "rollout_logprobs"} | {"logprobs": changed}


def without_rollout(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in batch.items() if name != "rollout_logprobs"}


def clipped(share: float) -> Change:
    def change(batch: dict[str, Any]) -> dict[str, Any]:
        where = torch.rand(16, 24) < share
        return batch | {"metrics": {"clip_frac": Metric(where, batch["mask"])}}

    return change


def reference(gap: float) -> Change:
    return lambda batch: batch | {"ref_logprobs": batch["old_logprobs"] - gap * torch.rand(16, 24)}


def teacher(of: Callable[[dict[str, Any]], Tensor]) -> Change:
    return lambda batch: batch | {"teacher_logprobs": of(batch)}


FAULTS: dict[str, tuple[str, Change, str, bool | None]] = {
    "top_p": ("top_p", lambda x: x, "ratio_mean", True),
    "top_k": ("top_k", lambda x: x, "ratio_mean", True),
    "min_p": ("min_p", lambda x: x, "ratio_mean", True),
    "temperature 0.7": ("temperature 0.7", lambda x: x, "k3_kl", True),
    "temperature 1.3": ("temperature 1.3", lambda x: x, "k3_kl", True),
    "shifted": ("sound", with_(rollout_logprobs=lambda x: x.roll(1, -1)), "ess", True),
    "top_p unseen": ("top_p", without_rollout, "surprise", True),
    "temperature unseen": ("temperature 0.7", without_rollout, "surprise", True),
    "padding": ("sound", padding_in_the_mask, "surprise", True),
    "prompt": ("sound", prompt_in_the_mask, "not_sampled_frac", False),
    "noise": ("bf16", clipped(0.3), "clip_frac", True),
    "most are clipped": ("sound", clipped(0.7), "clip_frac", False),
    "holes": ("sound", with_(advantages=holes), "zero_adv_token_frac", True),
    "zero": ("sound", with_(advantages=torch.zeros_like), "zero_adv_frac", True),
    "whitened twice": ("sound", lambda x: x | {"alike": torch.arange(16) < 4}, "equal_group_frac", True),
    "raw": ("sound", with_(advantages=lambda x: x * 1e5), "advantage_max", True),
    "no token": ("sound", with_(mask=torch.zeros_like), "empty_row_frac", True),
    "most rows": ("sound", with_(mask=lambda x: x & (torch.arange(16) < 4)[:, None]), "empty_row_frac", True),
    "one token": ("sound", spike, "grad_top_frac", True),
    "frozen": ("sound", with_(logprobs=lambda x: x.detach()), "no_gradient", True),
    "one seed": ("sound", with_(logprobs=lambda x: x[:1].expand(16, -1)), "repeated_row_frac", False),
    "reference": ("sound", reference(3.0), "ref_k3_kl", True),
    "same teacher": ("sound", teacher(lambda x: x["old_logprobs"]), "teacher_gap", True),
    "teacher against": (
        "sound",
        teacher(lambda x: x["old_logprobs"] - x["advantages"] * torch.rand(16, 24)),
        "teacher_agreement",
        True,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_once(name: str) -> None:
    sampler, change, metric, equal = FAULTS[name]
    assert told(World(sampler), change, equal=equal) == [metric]


SOUND: dict[str, tuple[str, Change, bool | None]] = {
    "equal weights": ("sound", lambda x: x, True),
    "without a sampler": ("sound", without_rollout, True),
    "rounding": ("bf16", lambda x: x, True),
    "a clip that acts": ("bf16", clipped(0.03), True),
    "many clipped later": ("bf16", clipped(0.3), False),
    "an older sampler": ("temperature 0.7", clipped(0.05), False),
    "a teacher": ("sound", teacher(lambda x: x["old_logprobs"] + torch.randn(16, 24)), True),
    "a reference": ("sound", reference(0.01), True),
    "one token each": ("sound", with_(advantages=lambda x: x.sign()), True),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_run_says_nothing(name: str, seed: int, recwarn: pytest.WarningsRecorder) -> None:
    sampler, change, equal = SOUND[name]
    world, health = World(sampler, seed), Health()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("composer_plugins.health.watch.enforce", _raise)
        for _ in range(40):
            batch = change(world.batch())
            health.micro_batch(batch, batch.pop("metrics", None), equal=equal)
            (batch["logprobs"] * batch["advantages"]).sum().backward()


def _raise(found: list[Any]) -> None:
    assert not found


def test_an_idle_clip_and_a_growing_gap_are_told() -> None:
    assert told(World("temperature 0.7"), clipped(0.0), equal=False) == ["clip_frac"]
    world, health = World(), Health()
    with pytest.warns(ComposerWarning, match="has grown from 0.001 to ") as caught:
        for shift in [0] * 4 + [1] * 8:
            batch = world.batch()
            health.micro_batch(
                batch | {"rollout_logprobs": batch["rollout_logprobs"].roll(shift, -1)}, equal=False
            )
    assert len(caught) == 1


def test_a_clip_that_was_set_and_cannot_act_is_told() -> None:
    policy = choose("policy", "grpo", {"clip_high": 0.1})
    assert told(World(), equal=True, health=Health(policy)) == ["ratio_moved_frac"]
    moved = with_(old_logprobs=lambda x: x + 1e-3)
    with pytest.raises(pytest.fail.Exception):
        told(World(), moved, equal=True, health=Health(policy))


def test_a_sampler_that_keeps_old_weights_is_told_from_one_with_another_temperature() -> None:
    old, health = World(), Health()
    before = old.logits.detach().clone()
    with pytest.warns(ComposerWarning, match="they agreed before, as where the sampler no longer") as caught:
        for step in range(6):
            old.logits = (before * (1 + 0.2 * step)).requires_grad_()
            batch = old.batch()
            theirs = batch["rollout_logprobs"] if step == 0 else batch["rollout_logprobs"] / (1 + 0.2 * step)
            health.micro_batch(batch | {"rollout_logprobs": theirs}, equal=True)
    assert len(caught) == 1


def test_unrelated_logprobs_of_a_flat_policy_are_told_as_such() -> None:
    """Their ratios stay near 1, so that the effective sample size is large."""
    world = World()
    world.logits = (world.logits.detach() * 0.3).requires_grad_()
    assert told(world, with_(rollout_logprobs=lambda x: x.roll(1, -1))) == ["ess"]


def test_windows_of_one_update_count_once(recwarn: pytest.WarningsRecorder) -> None:
    health = Health(choose("policy", "grpo", {"clip_high": 0.1}))
    for _ in range(20):
        health.micro_batch(World().batch(), equal=True, update=0)
        health.micro_batch({name: x[:0] for name, x in World().batch().items()}, equal=True, update=0)
    assert not [one for one in recwarn if "composer/health" in str(one.message)]


def test_a_warning_comes_again_where_it_is_ten_times_worse() -> None:
    sizes = iter([1e4, 1e4, 3e4, 1e6, 1e6])
    assert (
        told(World(), lambda batch: batch | {"advantages": torch.full((16, 1), next(sizes))}, steps=5)
        == ["advantage_max"] * 2
    )


@given(seed=st.integers(0, 999), parts=st.sampled_from([1, 2, 4, 8]))
def test_the_cut_of_a_batch_leaves_the_sums(seed: int, parts: int) -> None:
    batch = World("temperature 0.7", seed).batch() | {"mask": torch.rand(16, 24) < 0.7}
    whole = token_sums(batch)
    window, every = Window(), torch.arange(16).chunk(parts)
    for rows in every:
        part = token_sums({name: x[rows] for name, x in batch.items()})
        window.add(tuple(part), [float(x) for x in part.values()])
    # Rows are compared within a micro-batch, so the cut may separate two that are equal by chance.
    assert window["repeated rows"] <= float(whole.pop("repeated rows"))
    for name, value in whole.items():
        size = 1.0 if name.startswith(LARGEST) else 400.0
        wanted = value.detach().double()
        assert_parity(
            torch.tensor(window[name]).double(), wanted, terms=400, magnitude=size, dtype=torch.float32
        )


def test_the_metrics_are_the_formulas_of_the_field() -> None:
    batch = World("temperature 0.7").batch()
    found = logged(token_sums(batch))
    gap = (batch["logprobs"] - batch["rollout_logprobs"]).detach().double()
    wanted = {
        "kl": -gap.mean(),
        "k3_kl": (gap.exp() - gap - 1).mean(),
        "ratio_mean": gap.exp().mean(),
        "chi2": (2 * gap).exp().mean() - 1,
        "ratio_outside_frac": ((gap.exp() < 0.5) | (gap.exp() > 2)).double().mean(),
        "surprise": (-batch["logprobs"] - batch["entropies"]).detach().double().mean(),
        "zero_adv_frac": torch.zeros(()).double(),
    }
    assert found.keys() == wanted.keys() <= METRICS.keys()
    for name, value in wanted.items():
        assert_parity(found[name].double(), value, terms=400, magnitude=10.0, dtype=torch.float32, what=name)


def test_temperature_and_correlation_are_those_of_the_two_log_probabilities() -> None:
    batch, window = World("temperature 0.7").batch(), Window()
    sums = token_sums(batch)
    window.add(tuple(sums), [float(x) for x in sums.values()])
    own, sampled = (batch[name].detach().flatten() for name in ("logprobs", "rollout_logprobs"))
    covariance = torch.stack([sampled, own - sampled]).double().cov(correction=0)
    linear = covariance[0, 1] ** 2 / (covariance[0, 0] * covariance[1, 1])
    assert window.by_temperature == pytest.approx(float(linear), rel=1e-3)
    wanted = torch.corrcoef(torch.stack([sampled, own]).double())[0, 1]
    assert window.correlation == pytest.approx(float(wanted), rel=1e-3)


def test_the_rows_of_an_update_have_equal_weights() -> None:
    health = Health()
    with pytest.warns(ComposerWarning, match="composer/health/ratio_mean"):
        health.micro_batch(World("top_p").batch(), rows=32)


def test_the_first_rows_have_equal_weights_and_the_later_ones_not() -> None:
    """By default those of the first call, and at least four."""
    assert told(World("top_p"), equal=None, steps=2) == ["ratio_mean"]
    world, health = World("top_p"), Health()
    health.micro_batch(World().batch(), equal=None)
    for _ in range(3):
        health.micro_batch(
            world.batch(), {"clip_frac": Metric(torch.ones(16, 24).bool(), torch.ones(16, 24).bool())}
        )


def test_nothing_waits_for_the_device_and_nothing_is_computed_when_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tensor of the device "meta" has no numbers, so a look at one of them is an error."""
    monkeypatch.setattr(Flags, "read", lambda self, flags: [])
    there = {
        name: x.detach().to("meta").requires_grad_(name == "logprobs")
        for name, x in World().batch().items()
        if name != "mask"
    }
    there["mask"] = torch.ones(16, 24, dtype=torch.bool, device="meta")
    needed = {name: there[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")}
    found = Health(choose("policy", "grpo")).micro_batch(there, gspo(**needed).metrics, equal=True)
    assert {x.device.type for x in found.values()} == {"meta"} and "health/clip_frac" in found
    assert Health(on=False).micro_batch(there) == {}


def test_numbers_of_a_step_do_not_take_the_place_of_sums_that_a_device_still_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rollouts are counted on the host, between micro-batches that a GPU has not finished."""
    monkeypatch.setattr(Flags, "read", lambda self, flags: [] if flags.is_meta else [flags])
    health = Health()
    health.micro_batch({name: x.detach().to("meta") for name, x in World().batch().items()}, equal=True)
    with pytest.warns(ComposerWarning, match="group_of_one_frac: the 4 rollouts"):
        health.step("rollouts", rollouts(torch.arange(4.0), list(range(4))))
