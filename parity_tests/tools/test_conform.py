"""`composer-plugins conform`: statuses, exit statuses and formats, on a framework of the test's own."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_plugins.conformance import suites
from composer_plugins.conformance.claims import GRADIENT, Absent, Claim, Compared, Place
from composer_plugins.conformance.prime_rl_claims.suite import version_of
from composer_plugins.conformance.running import Suite
from composer_plugins.conformance.stubs import variable
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.contract import Framework
from composer_plugins.frameworks.trl import TRL
from composer_plugins.testing.assertions import tolerance
from composer_plugins.testing.draws import Draw, assume
from parity_tests.rigs.commands import invoke

ONE = torch.ones(3, dtype=torch.float64)


def off_by(error: float) -> Callable[[Draw], Iterable[Compared]]:
    """A comparison whose value is off by so much, in some cases."""

    def compare(draw: Draw) -> Iterator[Compared]:
        wrong = draw.choose([0.0, 0.0, error], "error")
        yield Compared(ONE + wrong, ONE, 3)
        yield Compared(ONE, ONE, 3, what=GRADIENT)

    return compare


def raises(_: Draw) -> Iterator[Compared]:
    raise AttributeError("upstream renamed it\nand says so at length")
    yield


def ends(_: Draw) -> Iterator[Compared]:
    raise SystemExit(0)
    yield


def odd_cases(draw: Draw) -> Iterator[Compared]:
    seed = draw.integer(0, 99)
    assume(seed % 2 == 1)
    yield Compared(ONE, ONE, 3)


def refuses(_: Draw) -> Iterator[Compared]:
    assume(False)
    yield


def claim(compare: Any, theirs: str = "its grpo", ours: str = "grpo@new") -> Claim:
    return Claim("policy", ours, theirs, Place("registry", {"name": theirs}), compare, "a note")


def suite(*claims: Claim, version: str = "2.0", absent: Iterable[Absent] = ()) -> Suite:
    return Suite(
        version, ("1.0", "2.0"), [*claims], lambda place: "gone" not in place.options["name"], lambda: absent
    )


@pytest.fixture
def conform(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(*words: str, columns: int = 200, **found: Any) -> Any:
        known = {
            name: Framework(name=name, title=name.upper(), package=name, install=f"pip install {name}")
            for name in found
        }

        def suite_of(framework: Framework, _: Path | None) -> Suite | None:
            if isinstance(found[framework.name], Exception):
                raise found[framework.name]
            return found[framework.name]

        monkeypatch.setattr(suites, "compared", lambda: known)
        monkeypatch.setattr(suites, "suite_of", suite_of)
        return invoke("conform", *words, columns=columns)

    return run


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ({"a": suite(claim(off_by(0.0)))}, 0),
        ({"a": suite(claim(off_by(0.0))), "b": None}, 0),
        ({"a": suite(claim(off_by(1e-17)))}, 0),  # rounding
        ({"a": suite(claim(off_by(0.0)), claim(off_by(1e-9)))}, 1),
        ({"a": suite(claim(off_by(0.0)), claim(raises))}, 1),
        ({"a": suite(claim(off_by(0.0)), claim(ends))}, 1),
        ({"a": suite(claim(off_by(0.0)), claim(refuses))}, 1),
        ({"a": suite(claim(raises), claim(refuses))}, 2),
        ({"a": suite(claim(off_by(0.0))), "b": suite(claim(off_by(1e-9)))}, 1),
        ({"a": suite(claim(off_by(0.0))), "b": ConfigError("b", "it cannot be imported", "")}, 1),
        ({"a": None, "b": None}, 2),
        ({"a": ConfigError("a", "it cannot be imported", "")}, 2),
        ({"a": suite(claim(off_by(0.0), "gone"))}, 2),
        ({"a": suite(absent=[Absent("new_po", "unknown", missing=True)])}, 2),
    ],
)
def test_the_exit_status_is_0_if_all_are_equal_1_if_one_is_not_and_2_if_nothing_ran(
    found: dict[str, Any], status: int, conform: Callable[..., Any]
) -> None:
    assert conform(**found).exit_code == status


def test_a_framework_that_is_not_installed_is_a_line_that_says_how_to_install_it(
    conform: Callable[..., Any],
) -> None:
    done = conform(a=suite(claim(off_by(0.0))), b=None)
    assert done.stderr.splitlines() == ["B is not installed: pip install b"]


def test_each_status_is_in_the_table_with_its_reason(conform: Callable[..., Any]) -> None:
    claims = [
        claim(off_by(0.0)),
        claim(off_by(1e-9), "wrong"),
        claim(raises, "broken"),
        claim(ends, "ending"),
        claim(odd_cases, "odd"),
    ]
    absent = [Absent("new_po", "unknown", missing=True), Absent("old_po", "the same again", missing=False)]
    text = conform(a=suite(*claims, claim(off_by(0.0), "gone"), absent=absent)).output
    assert text.startswith("A 2.0\n") and "1.0e-09" in text
    for words in (
        ("grpo@new", "its grpo", "0", "equal", "a note"),
        ("wrong", "differs", "seed ", "value off by 1.0e-09, rounding explains 5.3e-15"),
        ("broken", "could not be run", "seed 0: AttributeError: upstream renamed it and says so at length"),
        ("ending", "could not be run", "seed 0: SystemExit: 0"),
        ("odd", "equal"),
        ("gone", "not in this version"),
        ("new_po", "not in the catalogue", "unknown"),
        ("old_po", "not compared", "the same again"),
    ):
        assert any(all(word in line for word in words) for line in text.splitlines()), words
    absences = "1 not in this version, 1 not in the catalogue, 1 not compared"
    assert f"2 equal, 1 differs, 2 could not be run, {absences}" in text


def test_a_version_that_nobody_has_compared_is_run_and_marked_as_new(conform: Callable[..., Any]) -> None:
    done = conform(a=suite(claim(off_by(0.0)), version="3.0"))
    assert done.exit_code == 0
    assert "A 3.0 (new: these comparisons were last run on 1.0, 2.0)" in done.output
    assert "(new" not in conform(a=suite(claim(off_by(0.0)))).output


def test_json_has_every_row_with_its_errors(conform: Callable[..., Any]) -> None:
    def infinite(_: Draw) -> Iterator[Compared]:
        yield Compared(ONE * torch.inf, ONE, 3)

    absent = [Absent("new_po", "unknown", missing=True)]
    done = conform("--json", "--cases", "7", a=suite(claim(off_by(1e-9)), claim(infinite), absent=absent))
    (found,) = json.loads(done.stdout)
    assert (found["framework"], found["version"], found["new"]) == ("A", "2.0", False)
    wrong, infinite_row, new = found["rows"]
    assert wrong["errors"]["value"]["found"] == pytest.approx(1e-9, rel=1e-6) and wrong["cases"] == 7
    assert wrong["errors"]["gradient"]["found"] == 0
    assert infinite_row["errors"]["value"]["found"] == "inf"
    assert (new["loss"], new["upstream"], new["status"]) == (None, "new_po", "not in the catalogue")


def test_markdown_is_a_table_with_the_version(conform: Callable[..., Any]) -> None:
    lines = conform("--markdown", a=suite(claim(off_by(0.0), "its | grpo"))).stdout.splitlines()
    assert lines[0] == "A 2.0, 40 random cases for each loss: 1 equal."
    assert lines[4] == "| policy | grpo@new | its / grpo | 0 | 0 | equal | a note |"
    assert {line.count("|") for line in lines[2:]} == {8}


def test_only_the_losses_and_the_frameworks_that_are_named_are_run(conform: Callable[..., Any]) -> None:
    claims = [claim(off_by(0.0)), claim(raises, ours="dapo@new")]
    found = {"a": suite(*claims, absent=[Absent("new_po", "", missing=True)]), "b": suite(claim(raises))}
    done = conform("a", "--loss", "grpo", "--json", **found)
    assert done.exit_code == 0
    assert [row["upstream"] for one in json.loads(done.stdout) for row in one["rows"]] == ["its grpo"]
    for words, said in ((["c"], "unknown framework 'c'"), (["--loss", "grop"], "unknown loss 'grop'")):
        assert said in str(conform(*words, **found).exception)


def test_a_loss_that_is_compared_nowhere_is_an_error_that_names_what_is(conform: Callable[..., Any]) -> None:
    claims = [claim(off_by(0.0)), claim(off_by(0.0), ours="dapo@new")]
    found = {"a": suite(*claims), "b": suite(claim(off_by(0.0), ours="gspo"))}
    said = "--loss: no loss of A 2.0 or B 2.0 is compared with 'cispo'; there are comparisons of "
    assert str(conform("--loss", "cispo", **found).exception) == f"{said}dapo, grpo, gspo"
    said = "--loss: no loss of A 2.0 or B 2.0 is compared with 'grpo@trl'; there are comparisons of "
    assert str(conform("--loss", "grpo@trl", **found).exception) == f"{said}grpo@new"
    assert conform("--loss", "gspo", **found).exit_code == 0  # of one of the two frameworks


def test_what_a_framework_prints_is_not_on_stdout(conform: Callable[..., Any]) -> None:
    def prints(_: Draw) -> Iterator[Compared]:
        print("printed")
        yield Compared(ONE, ONE, 3)

    done = conform("--json", "--cases", "1", a=suite(claim(prints)))
    assert json.loads(done.stdout) and "printed" in done.stderr


def test_an_error_is_relative_to_the_largest_term_and_so_is_what_rounding_explains() -> None:
    found = Compared(ONE + 1e-9, ONE, terms=3, magnitude=100.0).error
    assert found == pytest.approx((1e-11, tolerance(torch.float64, 3, 1.0)), rel=1e-6)
    scaled = Compared(ONE + 1e-9, ONE, terms=3, magnitude=100.0, scale=2.0).error
    assert scaled == pytest.approx((5e-10, tolerance(torch.float64, 3, 50.0)), rel=1e-6)


def test_nan_is_equal_to_nan_alone_and_a_shape_to_itself() -> None:
    nan, infinite = ONE * torch.nan, ONE * torch.inf
    for same in (nan, infinite):
        assert Compared(same, same, 3).error.found == 0
    for ours, theirs in ((nan, ONE), (ONE, nan), (infinite, -infinite), (infinite, ONE), (ONE, ONE[:2])):
        assert Compared(ours, theirs, 3).error.found == torch.inf


def test_no_checkout_and_a_folder_that_is_none_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable("prime-rl"), raising=False)
    done = invoke("conform", "prime-rl")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("no checkout of PRIME-RL is given: git clone https://")
    assert version_of(tmp_path) == "without git"
    done = invoke("conform", "prime-rl", "--source", str(tmp_path))
    assert done.exit_code == 2 and "is not a checkout of PRIME-RL" in done.stderr


def test_a_framework_that_cannot_be_imported_is_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("trl", "transformers"):  # whichever is imported first
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('no torch')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"trl: it cannot be imported \(RuntimeError: no torch\)"):
        suites.suite_of(TRL, None)


def test_every_framework_says_how_to_install_it() -> None:
    known = {"trl", "verl", "prime-rl", "skyrl", "nemo-rl", "slime", "torchtitan"}
    assert known <= {*suites.compared()}
    for framework in suites.compared().values():
        absent = replace(framework, package="not_installed_here" if framework.package else "")
        assert suites.suite_of(absent, None) is None
        assert "pip install" in framework.install
