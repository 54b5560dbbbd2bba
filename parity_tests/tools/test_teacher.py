"""`composer_plugins.teacher`, on a model whose distributions are written down: each number by plain loops."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer_plugins.errors import ConfigError, DataError
from composer_plugins.teacher import TEMPLATES, Measured, Subject, advice, measure, named_templates
from composer_plugins.teacher.measuring import other_rows
from composer_plugins.teacher.subject import chosen_rows

SYMBOLS = ["<end>", *"abcdefghijklmnopqrstuvwxyz =:.\n"]
END, RIGHT, WRONG = 0, "r", "w"
TEMPERATURE = 0.5


class Model:
    """The next symbol depends on whether the row has the letters "hint": then it is r, otherwise often w."""

    device = torch.device("cpu")
    generation_config = SimpleNamespace(eos_token_id=END)

    def distribution(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits after one row: a completion has one letter and its end."""
        text = decode(ids.tolist())
        logits = torch.full((len(SYMBOLS),), -4.0, dtype=torch.float64)
        if text.endswith(("=r", "=w")):
            logits[END] = 8.0
        else:
            logits[SYMBOLS.index(RIGHT)] = 3.0 if "hint" in text else 0.5
            logits[SYMBOLS.index(WRONG)] = 1.0
        return logits

    def __call__(self, input_ids: Any, attention_mask: Any, position_ids: Any, use_cache: bool) -> Any:
        """The logits of every position, from the unmasked tokens up to it."""
        rows = []
        for ids, mask, places in zip(input_ids, attention_mask.bool(), position_ids, strict=True):
            assert places[mask].tolist() == list(range(int(mask.sum())))
            ends = range(1, len(ids) + 1)
            rows.append(torch.stack([self.distribution(ids[:end][mask[:end]]) for end in ends]))
        return SimpleNamespace(logits=torch.stack(rows))

    def generate(self, input_ids: Any, **given: Any) -> torch.Tensor:
        """Two tokens for each row, drawn at the temperature, or the most probable ones."""
        made = []
        for ids in input_ids:
            for _ in range(given["max_new_tokens"]):
                logits = self.distribution(ids)
                if given["do_sample"]:
                    token = torch.multinomial((logits / given["temperature"]).softmax(-1), 1)
                else:
                    token = logits.argmax()[None]
                ids = torch.cat([ids, token])
            made.append(ids)
        return torch.stack(made)


def decode(ids: list[int], skip_special_tokens: bool = True) -> str:
    """The text of token ids, without the end."""
    return "".join(SYMBOLS[i] for i in ids if i != END)


def encode(prompts: list[Any]) -> list[list[int]]:
    """A token for each letter, and the sign that asks for a completion."""
    return [[SYMBOLS.index(letter) for letter in f"{prompt}="] for prompt in prompts]


def subject(rows: list[dict[str, Any]], samples: int = 4, **options: Any) -> Subject:
    """The scripted model on these rows; r is right."""
    tokenizer = SimpleNamespace(decode=decode, pad_token_id=END, eos_token_id=END)

    def rewards(rows: Any, completions: Any, ids: Any) -> list[float]:
        return [float(text == RIGHT) for text in completions]

    drawn = {"temperature": TEMPERATURE, "max_new_tokens": 2, "samples": samples, "batch_size": 3}
    return Subject(Model(), tokenizer, rows, encode, rewards, **{**drawn, **options})


ROWS = [{"prompt": prompt, "privileged_context": "the good hint is r"} for prompt in ("a", "bcd", "ef", "g")]


def kl(one: torch.Tensor, other: torch.Tensor) -> float:
    """KL(one || other) of two rows of logits."""
    p, q = (one / TEMPERATURE).softmax(-1).tolist(), (other / TEMPERATURE).softmax(-1).tolist()
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def test_divergences_and_order_are_those_of_plain_loops() -> None:
    torch.manual_seed(0)
    made = subject(ROWS)
    policy, teacher = measure(made, {"one": "{privileged_context} {prompt}"})
    torch.manual_seed(0)
    own = [ids for ids in encode([row["prompt"] for row in ROWS]) for _ in range(4)]
    completions = made.completions(own, sampled=True)
    forward, reverse, scores, right = [], [], [], []
    for i, completion in enumerate(completions):
        score = []
        for t, token in enumerate(completion):
            hinted = encode([f"the good hint is r {ROWS[i // 4]['prompt']}"])[0] + completion[:t]
            theirs = Model().distribution(torch.tensor(hinted))
            ours = Model().distribution(torch.tensor(own[i] + completion[:t]))
            forward.append(kl(theirs, ours))
            reverse.append(kl(ours, theirs))
            ratio = (theirs / TEMPERATURE).log_softmax(-1) - (ours / TEMPERATURE).log_softmax(-1)
            score.append(float(ratio[token]))
        scores.append(sum(score) / len(score))
        right.append(decode(completion) == RIGHT)
    assert teacher.forward_kl == pytest.approx(sum(forward) / len(forward), rel=1e-12)
    assert teacher.reverse_kl == pytest.approx(sum(reverse) / len(reverse), rel=1e-12)
    pairs = [
        scores[a] > scores[b]
        for a in range(16)
        for b in range(16)
        if a // 4 == b // 4 and right[a] and not right[b]
    ]
    assert pairs and teacher.ordered == sum(pairs) / len(pairs) == 1
    assert policy.sampled == sum(right) / 16 and policy.greedy == 0 and teacher.greedy == 1
    assert teacher.gain == pytest.approx(teacher.sampled - policy.sampled) and teacher.gain_error > 0


def test_a_hint_that_the_template_leaves_out_is_seen() -> None:
    _, whole, none = measure(subject(ROWS), {"whole": "{privileged_context} {prompt}", "none": "{prompt}"})
    assert (whole.shown, whole.leaks) == (1, 0) and whole.forward_kl > 0
    assert (none.shown, none.leaks) == (0, 0) and none.forward_kl == 0


def test_a_completion_with_the_wording_of_the_hints_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": p, "privileged_context": f"the good hint is {x}"} for p, x in ("ax", "by", "cz", "dw")]
    made = subject(rows)
    said = {"hinted": "the good hint is r", "own": "r"}

    def completions(prompts: list[list[int]], *, sampled: bool) -> list[list[int]]:
        texts = [said["hinted" if "hint" in decode(ids) else "own"] for ids in prompts]
        return [[SYMBOLS.index(letter) for letter in text] for text in texts]

    monkeypatch.setattr(Subject, "completions", staticmethod(completions))
    template = {"one": "{privileged_context} {prompt}"}
    assert [*measure(made, template)][1].leaks == 1
    said["hinted"] = "good r x"  # the words of the hint, and no three of them in a row
    assert [*measure(made, template)][1].leaks == 0
    said |= {"hinted": "the good hint is r", "own": "the good hint is"}  # the policy says so without one
    assert [*measure(made, template)][1].leaks == 0
    assert math.isnan([*measure(subject(rows[:1]), template)][1].leaks)


def measured(name: str, **given: float) -> Measured:
    """A good teacher, but for what is given."""
    good = {"greedy": 1.0, "sampled": 0.5, "gain": 0.3, "gain_error": 0.05, "shown": 1.0}
    good |= {"forward_kl": 0.2, "reverse_kl": 0.2, "ordered": 0.8, "leaks": 0.0}
    return Measured(name, f"{name} {{privileged_context}}", **{**good, **given})


@pytest.mark.parametrize(
    ("given", "severity", "word"),
    [
        ({"shown": 0.5}, "error", "cannot read"),
        ({"gain": -0.2}, "error", "gain of -0.2"),
        ({"gain": 0.05}, "warning", "gain of 0.05"),
        ({"leaks": 0.5}, "warning", "wording"),
        ({"forward_kl": 0.001}, "warning", "nats"),
    ],
)
def test_a_teacher_with_a_fault_is_named_and_not_chosen(
    given: dict[str, float], severity: str, word: str
) -> None:
    policy = Measured("", "", 0.1, 0.2)
    found = advice([policy, measured("bad", sampled=0.9, **given), measured("good")])
    assert found.best is not None and found.best.name == "good"
    (finding,) = found.findings
    assert (finding.severity, finding.key) == (severity, "bad") and word in finding.problem
    assert advice([policy, measured("bad", **given)]).best is None


def test_of_several_good_teachers_the_nearest_one_is_chosen() -> None:
    policy = Measured("", "", 0.1, 0.2)
    far, near = measured("far", sampled=0.9), measured("near", forward_kl=0.1)
    assert advice([policy, far, near]).best == advice([policy, near, far]).best == near


def test_rows_without_a_hint_are_left_out_and_none_is_an_error() -> None:
    rows = [*ROWS, {"prompt": "h", "privileged_context": None}]
    assert {row["prompt"] for row in chosen_rows(rows, 9, 0)} == {"a", "bcd", "ef", "g"}
    assert len(chosen_rows(rows, 2, 0)) == 2
    with pytest.raises(DataError, match="privileged_context"):
        chosen_rows(rows[4:], 9, 0)


def test_templates_are_named_or_texts_with_their_fields() -> None:
    assert named_templates([]) == TEMPLATES
    given = named_templates(["labelled", "{prompt}\\n{privileged_context}"])
    assert given == {"labelled": TEMPLATES["labelled"], "given 2": "{prompt}\n{privileged_context}"}
    for wrong in ("lablled", "{prompt}", "{hint}"):
        with pytest.raises(ConfigError, match="template"):
            named_templates([wrong])


class Reader(Model):
    """A hint counts only where it names the prompt that it stands before: "the hint for a is r a="."""

    def distribution(self, ids: torch.Tensor) -> torch.Tensor:
        text = decode(ids.tolist())
        asked = text.partition("=")[0][-1:]
        return super().distribution(ids if f"for {asked} " in text else ids[ids != SYMBOLS.index("h")])


TEMPLATE = {"one": "{privileged_context} {prompt}"}
NAMED = [{"prompt": one, "privileged_context": f"the hint for {one} is r"} for one in "abcdefghij"]


def with_controls(model: Model) -> list[Measured]:
    torch.manual_seed(0)
    return [*measure(replace(subject(NAMED, samples=8), model=model), TEMPLATE, control=True)]


def test_a_right_hint_is_better_than_the_controls_by_the_means_over_rows() -> None:
    policy, right, *controls = found = with_controls(Reader())
    assert [one.name for one in found] == ["", "one", "one, wrong hint", "one, unrelated example"]
    for control in controls:
        assert control.better == pytest.approx(right.sampled - control.sampled)
        assert control.better > 2 * control.better_error > 0 and control.shown == 1
        assert (control.forward_kl, control.ordered) == (pytest.approx(0, abs=1e-12), 0.5)
    advised = advice(found)
    assert advised.best == right and math.isnan(right.better)
    assert [(one.severity, one.key) for one in advised.findings] == [("info", c.name) for c in controls]
    torch.manual_seed(0)
    plain = [*measure(replace(subject(NAMED, samples=8), model=Reader()), TEMPLATE)]
    assert repr(plain) == repr(found[:2])


def test_a_hint_that_is_not_better_than_a_control_is_a_warning_and_stays_chosen() -> None:
    found = advice(with_controls(Model()))  # which any hint tells the answer
    assert [(one.severity, one.key) for one in found.findings] == [
        ("warning", "one, wrong hint"),
        ("warning", "one, unrelated example"),
    ]
    assert found.best is not None and found.best.name == "one"


@pytest.mark.parametrize("hints", ["abcdefg", "aabbcc", "aaabc", "ab", "aaaab"])
def test_each_row_gets_the_hint_of_another_row(hints: str) -> None:
    rows = [{"prompt": i, "privileged_context": hint} for i, hint in enumerate(hints)]
    for seed in range(20):
        others = other_rows(rows, seed)
        assert others == other_rows(rows, seed) and {id(one) for one in others} == {*map(id, rows)}
        assert all(one is not other for one, other in zip(rows, others, strict=True))
        same = sum(
            a["privileged_context"] == b["privileged_context"] for a, b in zip(rows, others, strict=True)
        )
        assert same == max(0, 2 * max(map(hints.count, hints)) - len(hints))
