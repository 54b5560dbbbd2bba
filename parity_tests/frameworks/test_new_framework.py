"""A framework that does not exist (`rigs/made_up`), known to every command by the plugin hook alone.

It is a table and a loss. Only the entry point of its distribution tells the package of it.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from composer_plugins.calling_convention import Counts
from composer_plugins.frameworks.registry import frameworks
from composer_plugins.losses.registry import registry
from docs.generator import names
from parity_tests.rigs.commands import invoke
from parity_tests.rigs.made_up.loss import Loss

OPTIONS = {"loss": "surrogate", "upper": 1.28, "leash": 0.01, "leash_kind": "first", "tries": 4}
MINE = """
from composer_plugins.kernels.masking import safe_exp
def sound(new, old, credit, keep):
    ratio = safe_exp((new - old).where(keep, 0))
    return -(ratio * credit).where(keep, 0).sum()

def padded(new, old, credit, keep):
    return -(safe_exp(new - old) * credit).sum()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the distribution lantern-rl is installed, with a config."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "lantern_rl-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lantern-rl\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text("[composer_plugins]\nlantern = parity_tests.rigs.made_up.table\n")
    (folder / "run.lantern").write_text(yaml.safe_dump({"lantern": OPTIONS | {"name": "first light"}}))
    (folder / "made_up_losses.py").write_text(MINE)
    sys.path.insert(0, str(folder))
    for known in (frameworks, registry):
        known.cache_clear()
    yield folder
    sys.path.remove(str(folder))
    for known in (frameworks, registry):
        known.cache_clear()


def run(*words: str | Path) -> tuple[int, str]:
    """The status and the output of `composer-plugins` with these words."""
    done = invoke(*map(str, words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return 2, str(done.exception)
    return done.exit_code, done.output


def test_without_its_distribution_no_command_knows_it() -> None:
    assert "unknown framework 'lantern'" in run("list", "--framework", "lantern")[1]


@pytest.mark.parametrize("divide", ["words", "stories"])
def test_its_losses_have_its_denominator_and_add_up_over_parts(site: Path, divide: str) -> None:
    g = torch.Generator().manual_seed(0)
    new, old = (-torch.rand(4, 5, generator=g, dtype=torch.float64) for _ in range(2))
    credit = torch.randn(4, 1, generator=g, dtype=torch.float64)
    keep = (torch.rand(4, 5, generator=g) < 0.7) | (torch.arange(5) == 0)
    new.requires_grad_()
    loss, totals = Loss({"lantern": OPTIONS | {"divide": divide}}), Counts(int(keep.sum()), 4, 1, 1, 5)
    whole = loss(new, old, credit, keep, totals)
    parts = [loss(new[i : i + 2], old[i : i + 2], credit[i : i + 2], keep[i : i + 2], totals) for i in (0, 2)]
    ratio = (new - old).exp()
    token = -torch.min(ratio * credit, ratio.clamp(0.8, 1.28) * credit) * keep
    want = token.sum() / keep.sum() if divide == "words" else (token.sum(-1) / keep.sum(-1)).mean()
    for other in (sum(parts), want):
        assert isinstance(other, torch.Tensor)
        torch.testing.assert_close(whole, other, rtol=1e-13, atol=0)
        ours, theirs = (torch.autograd.grad(x, new, retain_graph=True)[0] for x in (whole, other))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_list_knows_which_losses_it_runs(site: Path) -> None:
    status, out = run("list", "--framework", "lantern", "--json")
    listed = {one["name"] for one in json.loads(out)["losses"]}
    assert status == 0 and {"ppo", "cispo", "reinforce"} <= listed and "dppo_tv" not in listed


@pytest.mark.parametrize(
    ("changed", "severity", "words"),
    [
        ({}, "nothing found", "against the options of Lantern 3.1"),
        ({"upper": 0.5}, "error: lantern.upper", "it is 0.5|sets clip_high to -0.5"),
        ({"loss": "surogate"}, "error: lantern.loss", "did you mean 'surrogate'"),
        ({"divide": "word"}, "error: lantern.divide", "did you mean 'words'"),
        ({"divide": ["words"]}, "error: lantern.divide", "unknown value|known: stories, words"),
        ({"leash_kind": "second"}, "error: lantern.leash_kind", "known: first, third"),
        ({"heat": 0}, "error: lantern.heat", "it is 0"),
    ],
)
def test_the_doctor_examines_its_configs(
    site: Path, tmp_path: Path, changed: dict[str, Any], severity: str, words: str
) -> None:
    (tmp_path / "run.lantern").write_text(yaml.safe_dump({"lantern": OPTIONS | changed}))
    status, out = run("doctor", tmp_path / "run.lantern")
    assert status == severity.startswith("error") and severity in out, out
    assert all(word in out for word in words.split("|")), out


def test_migrate_reads_and_writes_its_configs(site: Path) -> None:
    file = site / "run.lantern"
    status, out = run("migrate", file, "lantern.divide=stories", "--from", "lantern", "--to", "prime-rl")
    assert status == 1 and "Read as a config of Lantern 3.1." in out and "clip_high = 0.28" in out
    assert "denominator: seq-mean-token-mean -> token-mean" in out
    to_itself = ("--from", "lantern", "--to", "lantern")
    status, out = run("migrate", file, *to_itself)
    assert status == 0 and "Nothing that is known here differs." in out
    assert yaml.safe_load(out) == {"lantern": OPTIONS}
    status, out = run("migrate", file, "lantern.fog=1", "lantern.dream=true", *to_itself)
    assert status == 1 and "Not looked at: lantern.* (2)" in out
    assert "not carried over: lantern.dream = True" in out
    status, out = run("migrate", "--loss", "dppo_tv", "--to", "lantern")
    assert status == 2 and "Lantern has no loss 'dppo_tv' of its own; choose one of ppo, cispo, rei" in out


@pytest.mark.thorough
def test_check_calls_a_function_as_it_does(site: Path) -> None:
    assert run("check", "made_up_losses:sound", "--as", "lantern")[0] == 0
    status, out = run("check", "made_up_losses:padded", "--as", "lantern")
    assert status == 1 and "failed: masked_tokens" in out, out


def test_the_pages_have_its_names(site: Path) -> None:
    page = names.pages()["losses/names.md"]
    section = page.partition("## Lantern\n")[2].partition("\n## ")[0]
    assert "- `lantern.loss: surrogate` → `ppo`" in section
    assert "upper" in page.partition("## Parameters")[2]
