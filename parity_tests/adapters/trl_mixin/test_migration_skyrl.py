"""Twelve losses between TRL and SkyRL: exact, or with every difference named. SkyRL is not needed."""

from typing import Any

import pytest

from composer_plugins.frameworks import skyrl
from composer_plugins.frameworks.skyrl import NODE, Key
from composer_plugins.objective.by_table import nested
from composer_plugins.objective.resolve import migrate, resolve

OURS = {Key.POLICY: "composer", Key.ENTRYPOINT: skyrl.ENTRYPOINT}
# SkyRL's losses, with what TRL has otherwise.
LOSSES: dict[str, tuple[dict[str, Any], list[str]]] = {
    **{
        name: ({Key.POLICY: name}, [])
        for name in ("regular", "dual_clip", "gspo", "cispo", "sapo", "dppo", "rollout_is")
    },
    "dppo, KL": ({Key.POLICY: "dppo", Key.DPPO_TYPE: "binary_kl"}, []),
    "importance_sampling": (
        {Key.POLICY: "importance_sampling"}, ["rollout_logprobs: trainer -> rollout engine"]),
    **{
        f"composer/{name}": ({**OURS, NODE: {"policy": name}}, [])
        for name in ("gspo", "vespo", "luspo", "gmpo", "dr_grpo")
    },
}  # fmt: skip
TRLS = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_goes_from_skyrl_to_trl_and_back(name: str) -> None:
    options, wanted = LOSSES[name]
    objective = resolve("skyrl", nested({Key.USE_KL: False} | options), "0.4").required()
    there = migrate(objective, "trl")
    assert [str(one) for one in there.differences if not one.is_small] == wanted
    back = migrate(resolve("trl", there.table).required(), "skyrl", "0.4")
    assert [one for one in back.differences if not one.is_small] == []


@pytest.mark.parametrize("loss_type", TRLS)
def test_a_loss_goes_from_trl_to_skyrl(loss_type: str) -> None:
    found = migrate(resolve("trl", {"loss_type": loss_type}).required(), "skyrl")
    assert not found.differences


def test_a_hint_and_trls_own_kl_are_named() -> None:
    hint = migrate(resolve("trl", {"policy": "grpo", "hint_weight": 0.5}).required(), "skyrl")
    assert [one.what for one in hint.differences] == ["hint_weight", "hint_divergence"]
    (kl,) = migrate(resolve("trl", {"beta": 0.04}).required(), "skyrl").differences
    assert str(kl).startswith("KL: k3_corrected ") and "denominator seq-mean-token-mean" in str(kl)
