"""The page of the laws that `composer-plugins check` runs: on a loss, with `--as` and with `--trainer`."""

from collections.abc import Iterable

from composer_plugins.catalogue import KINDS
from composer_plugins.testing.conventions.laws import NOT_RUN, REDUCED
from composer_plugins.testing.laws import LAWS, Law
from composer_plugins.testing.trainers import LAWS as OF_A_TRAINER
from docs.generator.markdown import plain, table

INTRODUCTION = """# The laws of a loss

`composer-plugins check` runs these on a loss ([how](../docs/checking_a_loss.md)).
"""
REDUCED_TEXT = """## With --as

These laws are run on a function that returns one number for a batch, in the convention of a framework.
A function of the convention `torch` that returns one loss per token gets the laws above.
"""
NOT_RUN_TEXT = "These laws of policy losses are not run on one number:\n"
TRAINER_TEXT = """## With --trainer

These laws are run on a trainer of TRL. One more for each option of the loss,
`option_NAME_moves_the_gradient`, says that another value of the option gives another gradient.
"""


def pages() -> dict[str, str]:
    """The Markdown of the page, by file."""
    head = ("law", "what it says", "what usually breaks it")
    kinds = [
        (*row, ", ".join(KINDS[kind].plural.replace(" losses", "") for kind in law.kinds))
        for law, row in zip(LAWS.values(), _rows(LAWS.values()), strict=True)
    ]
    trainer = [
        (f"`{name}`", plain(cause) or "not run: the check has one process")
        for name, cause in OF_A_TRAINER.items()
    ]
    not_run = [(f"`{name}`", plain(reason)) for name, reason in NOT_RUN.items()]
    parts = [INTRODUCTION, table((*head, "kinds"), kinds)]
    parts += [REDUCED_TEXT, table(head, _rows(REDUCED.values()))]
    parts += [NOT_RUN_TEXT, table(("law", "why"), not_run)]
    parts += [TRAINER_TEXT, table(("law", "what usually breaks it"), trainer)]
    return {"losses/laws.md": "\n".join(parts)}


def _rows(laws: Iterable[Law]) -> list[tuple[str, str, str]]:
    return [(f"`{law.name}`", plain(law.summary), plain(law.cause)) for law in laws]
