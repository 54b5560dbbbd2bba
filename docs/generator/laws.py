"""The page of the laws that `composer-plugins check` runs: on a loss, and with `--as`."""

from collections.abc import Iterator

from composer_plugins.losses.row import KINDS
from composer_plugins.testing.all_laws import Section, sections
from composer_plugins.testing.report import FINDINGS
from docs.generator.markdown import plain, table

INTRODUCTION = """# The laws of a loss

`composer-plugins check` runs these ([how](../docs/writing_a_loss.md)). It says of a loss that breaks one:

""" + "".join(f"- **{finding}**: {meaning}\n" for finding, meaning in FINDINGS.items())
NOT_RUN_TEXT = "\nThese laws are not run:\n"


def pages() -> dict[str, str]:
    """The Markdown of the page, by file."""
    return {
        "losses/laws.md": "\n".join([INTRODUCTION, *(part for one in sections() for part in _parts(one))])
    }


def _parts(section: Section) -> Iterator[str]:
    if section.option:
        yield f"## With {section.option}\n"
    yield f"{plain(section.text)}\n"
    rows = []
    for law in section.laws:
        kinds = [KINDS[kind].plural.replace(" losses", "") for kind in law.kinds]
        where = law.frameworks if section.option else kinds
        rows.append((f"`{law.name}`", plain(law.summary), plain(law.cause), law.finding, ", ".join(where)))
    head = ("law", "what it says", "what usually breaks it", "a loss that breaks it")
    yield table((*head, "with --as" if section.option else "kinds"), rows)
    if section.not_run:
        yield NOT_RUN_TEXT
        yield table(("law", "why"), [(f"`{name}`", plain(reason)) for name, reason in section.not_run])
