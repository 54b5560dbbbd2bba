"""What a teacher makes of its hint, measured before the hint channel trains on it.

The hint channel moves the policy to the policy that has read a hint. Where that teacher is not right more
often, where its chat template cuts the hint off, or where it talks about the hint, training gets worse.

    from composer_plugins.teacher import Subject, advice, measure

    subject = Subject.of_files("my-model", "rows.jsonl", "my_rewards:exact_match")
    found = list(measure(subject, {"default": "{prompt}\\n\\n{privileged_context}"}))
    advice(found)

The command `composer-plugins teacher` prints the same as a table.
"""

from composer_plugins.teacher.advising import Advice, advice
from composer_plugins.teacher.measuring import Measured, measure
from composer_plugins.teacher.subject import Subject
from composer_plugins.teacher.templates import TEMPLATES, named_templates

__all__ = ["TEMPLATES", "Advice", "Measured", "Subject", "advice", "measure", "named_templates"]
