"""Divergences: value and gradient against the student's probability, and against their own parameter."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from composer_plugins.losses.choosing import Choice
from composer_plugins.plotting.bends import Ends
from composer_plugins.plotting.data import Curves, Panel, Picture, filled
from composer_plugins.plotting.lines import POINTS, with_gradients

TEACHER = (0.4, 0.3, 0.15, 0.1, 0.05)
K = 3
STUDENT = 0.7  # its probability of the first token where the parameter varies


def picture(chosen: Sequence[Choice]) -> Picture:
    """Value and gradient against the student's probability; and for losses with one, against a parameter."""
    p = torch.linspace(0.005, 0.995, POINTS, dtype=torch.float64)
    curves = [
        Curves(one, (*((p, y) for y in measure(one, p)), *_by_parameter(one)), _ends(one)) for one in chosen
    ]
    student, gradient = "student's probability of the teacher's first token", "d loss / d logit of the token"
    panels = [
        Panel("the student varies", student, "loss of the token (nats)", reference=TEACHER[0]),
        Panel("the student varies", student, gradient, reference=TEACHER[0]),
    ]
    notes = [
        f"The teacher gives its first token {TEACHER[0]:g} (dotted); the student shares the rest as it does."
    ]
    named = {one.name: parameter for one in chosen if (parameter := mixing_parameter(one))}
    if named:
        x_label = ", ".join(dict.fromkeys(named.values()))
        title = f"the parameter varies (student: {STUDENT:g})"
        panels += [Panel(title, x_label, one.y_label) for one in panels]
        notes.append("The parameter's own value is marked.")
    if cut := [one.name for one in chosen if "teacher_topk_ids" in one.loss.needs or one.value("top_k")]:
        notes.append(f"{', '.join(cut)}: the {K} likeliest tokens of {len(TEACHER)}.")
    return Picture(filled(panels, curves), 2, tuple(notes))


def measure(choice: Choice, p: Tensor) -> list[Tensor]:
    """The divergence at each probability that the student gives to the first token, and its gradient."""
    teacher = torch.tensor(TEACHER, dtype=torch.float64)
    rest = (teacher[1:] / teacher[1:].sum()).log().expand(len(p), -1)
    logit = torch.logit(p).requires_grad_()
    student = torch.cat([logit[:, None], rest], -1)[:, None]
    logprobs = student.log_softmax(-1)[..., 0]
    log_t = teacher.log().expand(len(p), 1, -1)
    inputs = {
        "student_logits": student,
        "teacher_logits": log_t,
        "teacher_topk_logprobs": log_t[..., :K],
        "teacher_topk_ids": torch.arange(K).expand(len(p), 1, -1),
        "student_logprobs": logprobs,
        "old_logprobs": logprobs.detach(),
        "teacher_logprobs": log_t[..., 0],
        "mask": torch.ones(len(p), 1, dtype=torch.bool),
    }
    if choice.value("top_k"):
        choice = replace(choice, params={**choice.params, "top_k": K})
    return with_gradients(choice, inputs, logit)


def mixing_parameter(choice: Choice) -> str:
    """The first parameter that goes from 0 to 1 ("beta", "skew", "t"); "" for a loss without one."""
    for name, parameter in choice.loss.parameters.items():
        if not parameter.integer and 0 <= parameter.low < 0.5 < parameter.high <= 1:
            return name
    return ""


def _ends(choice: Choice) -> tuple[Ends, ...]:
    """Where a parameter varies, its own value is marked."""
    value = choice.value(mixing_parameter(choice))
    mark = Ends() if value is None else Ends((float(value),))
    return (Ends(), Ends(), mark, mark)


def _by_parameter(choice: Choice) -> list[tuple[Tensor, Tensor]]:
    name, student = mixing_parameter(choice), torch.tensor([STUDENT], dtype=torch.float64)
    x = torch.linspace(0.01, 0.99, POINTS // 4 if name else 0, dtype=torch.float64)
    at = [replace(choice, params={**choice.params, name: value}) for value in x.tolist()]
    found = [torch.stack(measure(one, student)) for one in at]
    values, gradients = torch.cat(found, -1) if found else (x, x)
    return [(x, values), (x, gradients)]
