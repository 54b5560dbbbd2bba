"""`composer-plugins compare`: its numbers against formulas in float64, its options, and its page."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.batches import load, save
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.policy import grpo
from composer_plugins.losses.row import MODES
from parity_tests.rigs.commands import error, invoke, output
from parity_tests.rigs.paths import ROOT

RECORD = str(ROOT / "docs/recorded/smollm")
PAGE = (ROOT / "docs/denominators.md").read_text()
BLOCKS = re.findall(r"```\n(composer-plugins .*)\n```\n(?:\n```text\n((?:.*\n)*?)```)?", PAGE)


def rows(*words: str) -> dict[str, dict[str, Any]]:
    (record,) = json.loads(output("compare", *words, "--json"))["records"]
    return {one["loss"]: one for one in record["losses"]}


def joined(name: str) -> Tensor:
    return torch.cat([batch.tensors[name] for batch in load(RECORD)])


def weights(low: float, high: float) -> Tensor:
    """Of each token: its ratio, and 0 where the clip or the mask takes its gradient away."""
    ratio, paid = (joined("logprobs").double() - joined("old_logprobs").double()).exp(), joined("advantages")
    dead = torch.where(paid > 0, ratio > 1 + high, ratio < 1 - low) | (paid == 0) | ~joined("mask")
    return torch.where(dead, 0.0, ratio)


@pytest.mark.parametrize(("name", "high"), [("dapo", 0.28), ("grpo", 0.2)])
def test_the_numbers_are_those_of_the_formula(name: str, high: float) -> None:
    weight, mask, paid = weights(0.2, high), joined("mask"), joined("advantages").double()
    count = mask.sum().double()
    per_token = 1 / (count if name == "dapo" else mask.sum(-1, keepdim=True).double() * len(mask))
    gradient, ran = -paid * weight * per_token, -paid * weights(0.2, 0.28) / count
    one, size, counted = rows(RECORD, name)[name], gradient.abs().flatten(), mask & (paid != 0)
    assert one["gradient_norm"] == pytest.approx(gradient.norm().item(), rel=1e-12)
    assert one["clipped_tokens"] == ((weight == 0) & counted).sum() / count
    assert one["zero_advantage_tokens"] == (mask & (paid == 0)).sum() / count
    assert one["masked_tokens"] == pytest.approx((~mask).double().mean().item())
    assert one["zero_advantage_rows"] == (paid == 0).double().mean() and one["clipped_rows"] == 0
    largest = size.sort(descending=True).values[:24].sum() / size.sum()  # of 2,357 tokens
    assert one["largest_1_percent"] == pytest.approx(largest.item())
    cosine = (gradient * ran).sum() / gradient.norm() / ran.norm()
    assert one["cosine"] == pytest.approx(cosine.item())
    assert one["largest_weight"] == pytest.approx(weight.max().item())
    share = weight.sum() ** 2 / weight.square().sum() / counted.sum()
    assert one["ESS"] == pytest.approx(share.item())
    edge = torch.where(paid > 0, paid * 0 + 1 + high, 0.8)  # of clipped tokens
    value = -(paid * torch.where(weight > 0, weight, edge) * per_token)[counted].sum()
    assert one["value"] == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command[17:60] for command, _ in BLOCKS])
def test_a_command_of_the_page_does_so(command: str, shown: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    made = output(*shlex.split(command.replace("clip.html", str(tmp_path / "clip.html")))[1:])
    if shown:
        ends = re.compile(r" +$", re.MULTILINE)
        assert ends.sub("", made).strip() == ends.sub("", shown).strip()
    else:
        page = (tmp_path / "clip.html").read_text()
        assert page.count("data:image/png") == 2 and "prefers-color-scheme: dark" in page and "cosine" in page
        assert not re.search(r"(src|href|srcset)=\"(?!data:)|url\(|@import|<script", page)
    assert len(BLOCKS) == 4 and sum(x.stat().st_size for x in Path(RECORD).iterdir()) < 300_000


def test_every_policy_loss_has_numbers_or_says_what_it_lacks() -> None:
    found = rows(RECORD)  # the one that ran is among them twice
    assert len(found) == 52 and "value" not in found["opd"]
    assert found["opd"]["problem"].startswith("opd: the record has no teacher_logprobs; compare")
    assert found["dr_grpo"]["denominator"] == "seq-mean-token-sum-norm"
    assert found["gspo"]["ESS"] is None  # it clips every token
    swept = rows(RECORD, "dro", "--sweep", "beta=0.05,0.5")
    assert [*swept][1:] == ["dro beta=0.05", "dro beta=0.5"] and "dro beta=0.05" in found
    assert swept["dro beta=0.05"]["value"] == found["dro beta=0.05"]["value"]
    assert swept["dro beta=0.05"]["value"] != swept["dro beta=0.5"]["value"]


def test_a_batch_in_parts_has_the_value_of_the_whole(tmp_path: Path) -> None:
    whole = {name: joined(name) for name in load(RECORD)[0].tensors}
    given = [whole[name].double() for name in ("logprobs", "old_logprobs", "advantages")]
    loss = grpo(*given, whole["mask"]).loss
    for mode in MODES:
        save(tmp_path / mode / "whole", whole, choice="grpo", mode=mode)
        for part in (slice(0, 5), slice(5, 22), slice(22, 64)):  # cut within prompts
            rows_of_part = {name: x[part] for name, x in whole.items()}
            save(tmp_path / mode / "parts", rows_of_part, choice="grpo", mode=mode)
        value = aggregate(loss, whole["mask"], mode, max_length=48, group_ids=whole["group_ids"])
        found = [rows(str(tmp_path / mode / x), "grpo")["grpo (ran)"] for x in ("whole", "parts")]
        one, other = ({name: x for name, x in row.items() if isinstance(x, float)} for row in found)
        assert one["value"] == pytest.approx(value.item(), rel=1e-9), mode
        assert len(one) == 12 and one == pytest.approx(other, rel=1e-9), mode


def test_pairs_and_teachers_scores_are_compared(tmp_path: Path) -> None:
    pairs = {"chosen": torch.tensor([-1.0, -2.0]), "rejected": torch.tensor([-1.5, -1.0])}
    pairs |= {f"ref_{name}": x - 0.1 for name, x in pairs.items()}
    save(tmp_path, pairs, choice="dpo", kind="preference", loss=0.694399)
    found = rows(str(tmp_path), "simpo")
    margin = 0.1 * (pairs["chosen"] - pairs["rejected"] - pairs["ref_chosen"] + pairs["ref_rejected"])
    assert found["dpo (ran)"]["value"] == pytest.approx(-margin.sigmoid().log().mean().item())
    assert found["simpo"]["cosine"] > 0.9
    teacher = {"student_logprobs": torch.full((2, 3), -1.0), "teacher_logprobs": torch.full((2, 3), -0.5)}
    teacher["mask"] = torch.ones(2, 3).bool()
    save(tmp_path, teacher, choice="sampled_token", kind="divergence")
    found = rows(str(tmp_path), "jsd", "--kind", "divergence")
    assert "no student_logits and no teacher" in found["jsd"]["problem"] and len(found) == 2
    assert "no ratio" in error("compare", str(tmp_path), "dpo", "--kind", "preference", "--out", "a.html")
    assert "no losses of the kind kl; name" in str(invoke("compare", str(tmp_path), "--kind", "kl").exception)


def test_against_is_0_only_where_both_logs_are_computed_again(tmp_path: Path) -> None:
    first, found = load(RECORD)[0], {}
    for name, loss in (("right", first.about.loss), ("wrong", 0.07), ("none", None)):
        about = {"choice": "grpo@trl" if name == "right" else "dapo", "loss": loss, "factor": 2.0}
        about |= {"counts": first.about.counts, "params": {"clip_high": 0.28}, "mode": "token-mean"}
        save(tmp_path / name, first.tensors, **about)
        found[name] = invoke("compare", RECORD, "--against", str(tmp_path / name), "--json")
    assert {name: one.exit_code for name, one in found.items()} == {"right": 0, "wrong": 1, "none": 1}
    equal = {name: json.loads(one.stdout)["records"][1]["equal"] for name, one in found.items()}
    assert equal == {"right": True, "wrong": False, "none": None}


WRONG = {
    "--sweep clip_high": "--sweep: 'clip_high' has no values; write NAME=VALUE",
    "--sweep clip=0.1": "--sweep.clip: unknown grpo parameter 'clip'",
    "--step 3": "no batch of step 3 is there; name another folder, or one of the steps that it has: [4]",
    "--out a.gif": "--out: 'a.gif' has another suffix; end it in .png or .svg",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_option_is_an_error_in_three_parts(words: str) -> None:
    assert WRONG[words] in str(invoke("compare", RECORD, "grpo", *words.split()).exception)
