"""A divergence refuses tensors whose shapes do not belong together, and says which."""

from functools import partial
from typing import Any

import pytest
import torch

from composer_plugins.kernels.divergences import forward_kl_topk, reverse_kl_topk
from composer_plugins.testing.settings import Setting, settings
from parity_tests.rigs.every import rows

LOGITS = ("student_logits", "teacher_logits", "mask")
SETTINGS = [one for row in rows("divergence") if row.needs == LOGITS for one in settings(row)]


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: f"{one.loss.name}-{one.label}")
def test_shapes_that_differ_are_refused_by_name(setting: Setting) -> None:
    """Some would broadcast, and some were written over: a loss of another shape, or of other tokens."""
    z, mask = torch.zeros(2, 3, 5), torch.ones(2, 3, dtype=torch.bool)
    kernel = partial(setting.loss.kernel(), **setting.params)
    assert kernel(z, z, mask).loss.shape == mask.shape
    for wrong in (mask.view(3, 2), mask[:1], mask[:, :1], mask[0], mask[None], mask.view(6)):
        with pytest.raises(
            ValueError, match=rf"mask is \[{', '.join(map(str, wrong.shape))}\], and what it masks"
        ):
            kernel(z, z, wrong)
    for teacher in (z[:1], z[:, :1], z[..., :1], z[0], z.view(3, 2, 5), z.view(6, 5)):
        with pytest.raises(ValueError, match=r"teacher_logits is \[.*\], and the other side is \[2, 3, 5\]"):
            kernel(z, teacher, mask)


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize("kernel", [forward_kl_topk, reverse_kl_topk])
def test_a_given_top_k_of_another_shape_is_refused(kernel: Any) -> None:
    z, mask = torch.zeros(2, 3, 5), torch.ones(2, 3, dtype=torch.bool)
    logprobs, ids = torch.full((2, 3, 4), -2.0), torch.arange(4).expand(2, 3, 4)
    assert kernel(z, logprobs, ids, mask).loss.shape == mask.shape
    for given, message in (
        (
            (z, logprobs[..., :1], ids, mask),
            r"teacher_topk_ids is \[2, 3, 4\], and the other side is \[2, 3, 1\]",
        ),
        ((z, logprobs, ids[..., :1], mask), "teacher_topk_ids is"),
        ((z, logprobs[:1], ids[:1], mask), "mask is"),
        ((z[:1], logprobs, ids, mask), "mask is"),
        ((z, logprobs, ids, mask[:1]), "mask is"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel(*given)
