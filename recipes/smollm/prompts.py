"""What a teacher that sees the worked answer is asked."""

from composer_plugins.columns import Prompt, hinted_prompt
from composer_plugins.config import ComposerConfig
from composer_plugins.recipes.smollm.tasks import Row

TEMPLATE = ComposerConfig.model_fields["teacher_prompt_template"].default


def prompt_with_answer(row: Row) -> Prompt:
    """Return the prompt of a row with its worked answer, as the hint channel shows it to its teacher."""
    return hinted_prompt(row["prompt"], row["privileged_context"], TEMPLATE)
