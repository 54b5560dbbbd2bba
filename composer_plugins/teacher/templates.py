"""Templates by which a prompt shows its hint to the teacher, and those that a user gives."""

from collections.abc import Iterable

from composer_plugins.config import ComposerConfig, check_template
from composer_plugins.errors import ConfigError

TEMPLATES: dict[str, str] = {
    "default": ComposerConfig.model_fields["teacher_prompt_template"].default,
    "hint_first": "{privileged_context}\n\n{prompt}",
    "labelled": "{prompt}\n\nHint: {privileged_context}",
    "private": "{prompt}\n\n{privileged_context}\n\nDo not mention what stands above; only answer.",
    "own_words": "{prompt}\n\nA colleague notes: {privileged_context}\n\nNow answer in your own words.",
}


def named_templates(given: Iterable[str], key: str = "template") -> dict[str, str]:
    """Return the templates by name: all of TEMPLATES if none is given.

    A given one is a name of TEMPLATES, or a text with {privileged_context} and, if wanted, {prompt}.
    Raises ConfigError for a text without its fields, and for a name that is not known.
    """
    found = dict[str, str]()
    for i, text in enumerate(given, start=1):
        if "{" not in text and text not in TEMPLATES:
            problem = (
                f"{text!r} is not one of {', '.join(TEMPLATES)}, and has no field {{privileged_context}}"
            )
            raise ConfigError(key, problem, "give a name, or a text with {prompt} and {privileged_context}")
        written = TEMPLATES.get(text, text.replace("\\n", "\n"))
        check_template(key, written, {"privileged_context"}, {"prompt"})
        found[text if text in TEMPLATES else f"given {i}"] = written
    return found or dict(TEMPLATES)
