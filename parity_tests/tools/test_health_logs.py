"""`composer-plugins health`: healthy logs and planted troubles, by the names of each framework."""

import json
import math
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from parity_tests.rigs.commands import error, invoke

LAST, PLANTED = 120, 61  # steps
# The metrics of a healthy run: their values at the start and at the end, and the noise of their logarithms.
TRL = """loss .02 .02 1, grad_norm .4 .2 .5, learning_rate 1e-6 1e-7 0, entropy .9 .3 .1, kl .001 .4 .3,
    reward_std .3 .2 .3, rewards/f/std .3 .4 .2, rewards/g/std .2 .0 .2, completions/clipped_ratio .4 .1 .4,
    clip_ratio/region_mean .001 .01 1, sampling/sampling_logp_difference/mean .01 .03 .4,
    sampling/importance_sampling_ratio/mean 1 1 .02, composer/health/surprise .03 .06 .5"""
VERL = """actor/pg_loss .01 .01 1, actor/grad_norm .1 .3 .6, actor/lr 1e-6 1e-6 0, actor/entropy .6 .2 .1,
    actor/pg_clipfrac .001 .02 1, actor/kl_loss .0001 .05 .4, rollout_corr/kl .0004 .0009 .8,
    rollout_corr/k3_kl .0004 .0009 .5, critic/rewards/max 1 1 0, critic/rewards/min .01 .02 .5,
    critic/advantages/max 2 2 .1, critic/advantages/min -2 -2 .1, response_length/clip_ratio .2 .05 .5,
    actor/composer/health/kl .0004 .0009 .8, rollout_corr/rollout_is_eff_sample_size .99 .9 .02"""
# Asynchronous: far from the sampler, with a clip that fires.
PRIME_RL = """loss/mean .01 .01 1, entropy/all/mean .5 .3 .1, optim/lr 1e-6 1e-6 0, is_masked/mean .03 .09 .3,
    optim/grad_norm .02 .03 .5, mismatch_kl/all/mean .05 .08 .3, train/agg/all/reward/max 1 1 0,
    train/agg/all/reward/min .01 .01 .3, train/agg/all/is_truncated/mean .1 .2 .3"""
FORMS = {"trl": TRL, "trackio": TRL, "verl": VERL, "prime-rl": PRIME_RL, "prime-rl console": PRIME_RL}
LABELS = {"loss/mean": "Loss", "entropy/all/mean": "Entropy", "optim/grad_norm": "Grad. Norm"}
# The kind of the trouble, the format of the log, and what becomes of its metrics from a step on.
PLANTS = """not finite, trackio, loss = nan
not finite, prime-rl console, loss/mean = inf
no gradient, prime-rl console, optim/grad_norm = 0
learning rate 0, verl, actor/lr = 0
equal rewards, trl, reward_std = 0
equal rewards, prime-rl, train/agg/all/reward/min = 1
no advantage, verl, critic/advantages/max = 0, critic/advantages/min = 0
same completions, trl, entropy = 0, reward_std = 0
sampler mismatch, verl, rollout_corr/kl = -.2
growing mismatch, verl, rollout_corr/k3_kl * 40
ratio to the sampler, trackio, sampling/importance_sampling_ratio/mean = .3
effective sample size, verl, rollout_corr/rollout_is_eff_sample_size = .1
surprise, trl, composer/health/surprise = -.4
idle clip, prime-rl, is_masked/mean = 0, mismatch_kl/all/mean = .2
idle clip, verl, actor/pg_clipfrac = 0, actor/composer/health/kl = .06
clip, trl, clip_ratio/region_mean = .7
entropy collapse, prime-rl console, entropy/all/mean = .01
cut completions, verl, response_length/clip_ratio = .8
reference KL, trl, kl + 3
gradient spike, verl, actor/grad_norm * 40""".splitlines()


def written(path: Path, form: str, changes: str = "", seed: int = 0) -> Path:
    """The log of a run. Its rewards are equal in two steps, and those of one function at the end."""
    drawn, made = random.Random(seed), []
    for step in range(1, LAST + 1):
        row: dict[str, Any] = {"step": step}
        for name, start, end, noise in map(str.split, FORMS[form].split(",")):
            middle = float(start) + (float(end) - float(start)) * step / LAST
            row[name] = middle * math.exp(drawn.gauss(0, float(noise)))
        row |= {name: 0.0 for name in row if name in ("reward_std", "grad_norm") and step in (20, 21)}
        for name, sign, number in map(str.split, changes.split(",") if changes and step >= PLANTED else ()):
            x = float(number)
            row[name] = {"=": x, "+": row[name] + x, "*": row[name] * x}[sign]
        made.append(row)
    if form == "trl":
        (path / "checkpoint-120").mkdir(parents=True)
        state = {"global_step": LAST, "log_history": made}
        (path / "checkpoint-120" / "trainer_state.json").write_text(json.dumps(state))
    elif form == "trackio":  # with an earlier run, whose rewards are equal
        named = [{f"train/{name}": "NaN" if x != x else x for name, x in row.items()} for row in made]
        rows = [("new", json.dumps(row | {"train/global_step": row["train/step"]})) for row in named]
        with closing(sqlite3.connect(path)) as database, database:
            database.execute(
                "CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name, step DEFAULT 0, metrics)"
            )
            rows = [("old", '{"train/reward_std": 0.0, "step": 3}')] * 9 + rows
            database.executemany("INSERT INTO metrics (run_name, metrics) VALUES (?, ?)", rows)
    else:
        lines = [json.dumps(row) for row in made]
        if form.endswith("console"):
            cells = [[f"{label} {row[name]:.4f}" for name, label in LABELS.items()] for row in made]
            lines = [f"\x1b[32mok\x1b[0m Step {i} | 3.2s | {' | '.join(c)}" for i, c in enumerate(cells, 1)]
        path.write_text("\n".join([*lines, '{"step": 12']))  # of a run that was killed
    return path


@pytest.mark.parametrize("form", FORMS)
def test_a_healthy_log_has_no_finding(form: str, tmp_path: Path) -> None:
    for seed in range(5):
        done = invoke("health", str(written(tmp_path / f"log {seed}", form, seed=seed)))
        assert done.exit_code == 0 and "nothing found" in done.stdout, done.stdout
        assert "idle clip" in done.stdout or form in ("verl", "prime-rl")


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_trouble_is_named_from_its_first_step_on(plant: str, tmp_path: Path) -> None:
    kind, form, changes = plant.split(", ", 2)
    done = invoke("health", str(written(tmp_path / "log", form, changes)), "--json")
    findings = {one["key"].partition(":")[0]: one for one in json.loads(done.stdout)["findings"]}
    assert done.exit_code == 1 and findings[kind]["step"] == PLANTED, findings
    assert "last value" in findings[kind]["problem"] and "limit: " in findings[kind]["problem"]
    causes = {"equal rewards", "entropy collapse"} if kind == "same completions" else set()
    assert findings.keys() - {kind} <= causes


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    for name, text in {"x.json": "{}", "x.txt": "no metrics", "x.wandb": ":W&B\xe1\xbe\x00"}.items():
        (tmp_path / name).write_text(text)
        said = error("health", str(tmp_path / name))
        assert (
            name in said
            and ("No module named 'wandb'" if name == "x.wandb" else "give TRL's trainer_state") in said
        )
    assert "no step" in error("health", str(tmp_path))
