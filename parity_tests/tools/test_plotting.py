"""What `composer-plugins plot` draws of every loss, and its errors."""

import math
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_plugins import plotting
from composer_plugins.errors import ConfigError
from composer_plugins.kernels.types import PairLoss, TokenLoss
from composer_plugins.losses.row import Loss
from composer_plugins.plotting.data import Picture, heights
from parity_tests.cases.faults import BOTH, named, not_masked, of_groups
from parity_tests.rigs.commands import error, output
from parity_tests.rigs.every import each, row_id, rows

pytestmark = pytest.mark.thorough


@cache
def drawn(*names: str, kind: str | None = None) -> Picture:
    return plotting.picture(names, kind=kind)


def of(loss: Loss) -> Picture:
    return drawn(loss.name, kind=loss.kind)


# Every loss


@pytest.mark.slow
@each()
def test_every_panel_has_finite_numbers_that_differ(row: Loss) -> None:
    picture = of(row)
    assert len(picture.panels) >= (1 if row.kind == "correction" else 2)
    drawn_of = dict[str, list[float]]()
    for panel in picture.panels:
        assert panel.series and panel.title and panel.x_label and panel.y_label
        for series in panel.series:
            bars = len(panel.categories)
            assert len(series.x) == len(series.y) and (len(series.y) == bars if bars else len(series.y) >= 90)
            assert all(map(math.isfinite, (*series.x, *series.y, *series.marks)))
            assert all(a < b for a, b in pairwise(series.x))
            assert "-0.0" not in map(str, series.marks)
            drawn_of.setdefault(series.label, []).extend(series.y)
    assert all(max(numbers) - min(numbers) > 1e-4 for numbers in drawn_of.values())


@each()
def test_a_loss_that_is_named_alone_comes_with_every_dialect_once(row: Loss) -> None:
    found = [name for series in of(row).panels[0].series for name in series.label.split(", ")]
    names = [name if name == row.name else f"@{name.partition('@')[2]}" for name in found]
    assert sorted(names) == sorted([row.name, *(f"@{d.upstream}" for d in row.dialects)])


# The data


def test_cispo_of_trl_caps_at_its_epsilon() -> None:
    """TRL's cap is epsilon_high itself, 0.2, where the paper and verl have 1 + 0.2."""
    picture = drawn("cispo@trl", "cispo@verl", "grpo")
    for panel in picture.panels[2:]:
        trl, verl, grpo = panel.series
        assert (trl.label, verl.label, grpo.label) == ("cispo@trl", "cispo@verl", "grpo")
        assert max(trl.y) == pytest.approx(0.2, abs=1e-12) and trl.cap == max(trl.y) and trl.marks == (0.2,)
        assert verl.marks == (0.8, 1.2) and verl.cap == pytest.approx(1.2)
        assert grpo.cap is None
    assert picture.panels[2].series[2].marks == (1.2,) and picture.panels[3].series[2].marks == (0.8,)


@pytest.mark.parametrize(
    ("name", "kind", "better", "worse"),
    [
        ("dapo", "policy", (1.28,), (0.8,)),
        ("gspo_token@verl", "policy", (1.2,), (0.8,)),
        ("gspo", "policy", (1.0004,), (0.9997,)),
        ("grpo@verl", "policy", (1.2,), (0.8, 3.0)),
        ("dppo_tv", "policy", (1.8,), (0.2,)),  # 0.25 x 1.8 - 0.25 = 0.2
        ("ipo", "policy", (0.6, 1.4), (0.6, 1.4)),  # its gradient does not vanish outside
        ("masked_is", "policy", (0.125, 8.0), (0.125, 8.0)),
        ("vespo", "policy", (), ()),
        ("hinge", "preference", (10.0,), (10.0,)),
        ("tis", "correction", (2.0,), (2.0,)),
        ("icepop", "correction", (0.5, 5.0), (0.5, 5.0)),
        ("abs", "kl", (0.0,), (0.0,)),
        ("jsd", "divergence", (0.5,), (0.5,)),  # its parameter
    ],
)
def test_marks_stand_at_the_ends_of_the_clip_range(
    name: str, kind: str, better: tuple[float, ...], worse: tuple[float, ...]
) -> None:
    panels = drawn(name, name, kind=kind).panels
    assert [panel.series[0].marks for panel in (panels[-2:][0], panels[-1])] == [better, worse]


# Not k3_corrected and its like: the ratio to the old policy is 1 at every point, and carries a gradient
# there.
DERIVED = [row for row in rows("policy", "kl") if row.gradient == "derivative"]
DERIVED = [row for row in DERIVED if not row.name.endswith("_corrected")]


@pytest.mark.parametrize("loss", DERIVED, ids=row_id)
def test_the_gradient_is_the_slope_of_the_value(loss: Loss) -> None:
    """The drawn gradient comes from autograd, this one from the drawn values alone."""
    panels, half = of(loss).panels, len(of(loss).panels) // 2
    for i, (above, below) in enumerate(zip(panels[:half], panels[half:], strict=True)):
        minus_advantage = -1.0 if i == 0 and loss.kind == "policy" and "A = " in below.title else 1.0
        for value, gradient in zip(above.series, below.series, strict=True):
            x, y = torch.tensor(value.x).double(), torch.tensor(value.y).double()
            log_x = x if loss.kind == "kl" else x.log()
            slope = (y[2:] - y[:-2]) / (log_x[2:] - log_x[:-2])
            expected = minus_advantage * torch.tensor(gradient.y).double()[1:-1]
            wrong = (slope - expected).abs() > 0.03 * (1 + expected.abs())
            assert wrong.sum() <= 4 + 6 * len(gradient.marks), (value.label, x[1:-1][wrong])


def test_the_teacher_of_a_divergence_is_where_the_dotted_line_stands() -> None:
    value, gradient, _, _ = drawn("jsd").panels
    jsd = value.series[0]
    assert jsd.x[jsd.y.index(min(jsd.y))] == pytest.approx(value.reference, abs=0.003)
    assert gradient.series[0].y[0] < 0 < gradient.series[0].y[-1]


def test_advantages_are_those_of_the_rewards_below_them() -> None:
    panels = drawn("dr_grpo", "rloo", kind="advantage").panels
    for panel in panels:
        rewards = torch.tensor([float(text) for text in panel.categories]).double()
        centred = rewards - rewards.mean()
        assert panel.series[0].y == pytest.approx(tuple(centred.tolist()))
        assert panel.series[1].y == pytest.approx(tuple((centred * 4 / 3).tolist()))


def test_weights_of_an_aggregation_mode_sum_to_1() -> None:
    one, whole = drawn("token-mean", "seq-mean-token-mean").panels
    assert one.series[0].y == pytest.approx((1 / 6,) * 3) and sum(whole.series[1].y) == pytest.approx(1)
    assert whole.series[1].y == pytest.approx((1 / 3,) * 3)


def test_curves_that_coincide_are_one_line() -> None:
    series = drawn("grpo", "ppo", "dapo", kind="policy").panels[2].series
    assert [one.label for one in series] == ["grpo, ppo", "dapo"]


def test_a_line_of_a_much_larger_scale_does_not_flatten_the_others() -> None:
    picture = drawn("dpo", "ipo", kind="preference")
    assert picture.panels[0].beyond == ("ipo",) and heights(picture)[0][1] < 6
    assert "ipo: of a much larger scale, and cut at the edge of some panels." in picture.notes
    assert drawn("dpo", "hinge").panels[0].beyond == ()
    assert drawn("ipo", "dpo", kind="preference").panels[0].beyond == ()  # what is named first is never cut


def test_notes_say_what_the_example_assumes() -> None:
    note = "minirl has no default for clip_low, clip_high: drawn with clip_low=0.2, clip_high=0.2."
    assert note in drawn("minirl", "grpo", kind="policy").notes
    text = " ".join(drawn("gspo", "cispo", "kl_cov").notes)
    assert "The ratio of gspo is the ratio of the whole response" in text
    assert "kl_cov: the batch, whose statistics the loss uses" in text
    assert "Gradient of cispo: of a detached weight" in text


# Names and options


def test_a_name_of_two_kinds_takes_the_kind_of_the_others() -> None:
    assert drawn("grpo", "cispo").title == "grpo, cispo: policy losses"
    assert drawn("grpo", kind="advantage").panels[0].categories


# Functions of a user, by their import path. For the letters see cases/faults.py.

not_a_kernel = not_masked(lambda p, q, a, m: 1 / 0)
too_large = not_masked(lambda p, q, a, m: -1e307 * (p - q).exp() * a)
half_nan = not_masked(lambda p, q, a, m: -a * (1.5 - (p - q).exp()).log())  # NaN above a ratio of 1.5
infinite = named(BOTH, lambda c, r: PairLoss((r - c) * math.inf, {}))
no_advantages = of_groups(lambda r, ids: r / (0 * r))
with_entropies = named("logprobs advantages mask entropies", lambda p, a, m, e: TokenLoss(-a * p - e, {}))
with_group_ids = named("logprobs advantages mask group_ids", lambda p, a, m, ids: TokenLoss(-a * p * ids, {}))


def weighed(logprobs: Any, advantages: Any, mask: Any, *, weight: float) -> Any:
    """A function with a parameter that has no default."""
    return TokenLoss(-weight * advantages * logprobs, {})


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("not_a_kernel", ": a kernel fails on the example: ZeroDivisionError: division by zero; run "),
        (
            "half_nan",
            ": 'loss of the token' is nan where 'ratio π / π_old' is 1.50551 "
            "(panel 'A = +1 (better than its group)'), and cannot be drawn at 161 of 400 points; ",
        ),
        ("infinite", ": 'loss of the pair' is inf where 'margin of the chosen response over the rejected"),
        ("too_large", ": 'loss of the token' is -2e+305 where 'ratio π / π_old' is 0.02 (panel 'A = +1"),
        ("no_advantages", ": 'advantage' is inf where 'reward of each rollout of the prompt' is 1 (panel 'o"),
        ("with_group_ids", " needs group_ids, which the picture of a policy loss does not have; "),
    ],
)
def test_a_loss_that_cannot_be_drawn_is_an_error_that_says_why(function: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        drawn(f"{__name__}:{function}")
    assert f"plot: {__name__}:{function}{problem}" in str(raised.value)


def test_a_loss_of_entropies_is_drawn_with_those_of_the_example() -> None:
    picture = drawn(f"{__name__}:with_entropies", "reinforce")
    bonus, reinforce = picture.panels[0].series
    at_1 = min(range(len(bonus.x)), key=lambda i: abs(bonus.x[i] - 1))
    entropy = -sum(p * math.log(p) for p in (0.25, 0.375, 0.225, 0.15))
    assert reinforce.y[at_1] - bonus.y[at_1] == pytest.approx(entropy, abs=0.01)
    assert any("entropy is over the token and three others" in note for note in picture.notes)


def test_a_function_of_a_user_is_drawn_over_a_loss_of_the_catalogue() -> None:
    name = f"{__name__}:weighed"
    weight = drawn(name, "reinforce").panels[2].series[0]
    assert weight.label == name and set(weight.y) == {0.5}
    assert any("has no default for weight: drawn with weight=0.5" in note for note in drawn(name).notes)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "composer_plugins.plotting.drawing", raising=False)
    monkeypatch.delattr(plotting, "drawing", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = error("plot", "cispo", "--out", "cispo.png")
    assert message.startswith("plot: it needs matplotlib")
    assert "pip install 'composer-plugins[plot]'" in message
    assert not Path("cispo.png").exists()


# With matplotlib


@pytest.fixture
def matplotlib() -> Any:
    return pytest.importorskip("matplotlib", reason="needs the extra plot")


OF_EACH_KIND = (
    "cispo@trl cispo@verl grpo",
    "gspo",
    "opd",
    "kto",
    "sft",
    "jsd tv",
    "k3",
    "tis mis",
    "dpo ipo",
)


@pytest.mark.parametrize("names", [*OF_EACH_KIND, "token-mean prompt-mean", "grpo gdpo"])
def test_a_figure_shows_the_data(matplotlib: Any, names: str) -> None:
    picture, figure = drawn(*names.split()), plotting.figure(names.split())
    assert len(figure.axes) == len(picture.panels)
    for axes, panel in zip(figure.axes, picture.panels, strict=True):
        if panel.categories:
            heights_drawn = [bar.get_height() for bar in axes.patches]
            assert heights_drawn == [y for series in panel.series for y in series.y]
        else:
            lines = {(tuple(line.get_xdata()), tuple(line.get_ydata())) for line in axes.lines}
            assert lines >= {(series.x, series.y) for series in panel.series}
        texts = (axes.get_title(), axes.get_xlabel().replace("\n", " "), axes.get_ylabel())
        assert texts == (panel.title, panel.x_label, panel.y_label)
    legend = [text.get_text() for one in figure.legends for text in one.texts]
    assert legend == list(dict.fromkeys(s.label for panel in picture.panels for s in panel.series))


def test_a_figure_says_where_cispo_of_trl_stays(matplotlib: Any) -> None:
    figure = plotting.figure(["cispo@trl", "grpo"])
    texts = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert ["→ 0.2" in each for each in texts] == [False, False, True, True]
    assert all("0.2" in each for each in texts)


def test_labels_stand_where_they_are_wanted_or_apart(matplotlib: Any) -> None:
    from composer_plugins.plotting.drawing import spread

    assert spread([0.1, 0.8, 1.5], 0.2, 0.0, 2.0) == [0.1, 0.8, 1.5]
    assert spread([1.0, 1.0, 1.1, 1.9], 0.2, 0.0, 2.0) == pytest.approx(
        [0.8333, 1.0333, 1.2333, 1.9], abs=1e-4
    )
    assert spread([1.9, 1.9], 0.2, 0.0, 2.0) == pytest.approx([1.8, 2.0])
    assert spread([0.0, 0.0], 0.2, 0.0, 2.0) == pytest.approx([0.0, 0.2])


def test_the_suffix_says_the_format_and_an_svg_is_always_the_same(matplotlib: Any, tmp_path: Path) -> None:
    one, two, dark, png = (tmp_path / name for name in ("one.svg", "two.svg", "dark.svg", "a.png"))
    for path in (one, two, dark, png):
        said = output("plot", "k3", "--out", str(path), *["--dark"] * (path == dark))
        assert said == f"wrote {path}\n"
    assert one.read_bytes() == two.read_bytes() != dark.read_bytes()
    assert b"<svg" in one.read_bytes() and png.read_bytes().startswith(b"\x89PNG")
    assert "end it in .png or .svg" in error("plot", "k3", "--out", str(tmp_path / "a.pdf"))
    assert "No such file or directory" in error("plot", "k3", "--out", str(tmp_path / "no" / "a.png"))
    (folder := tmp_path / "folder.png").mkdir()
    said = f"--out: {str(folder)!r} cannot be written (Is a directory); name another path"
    assert error("plot", "k3", "--out", str(folder)) == said
