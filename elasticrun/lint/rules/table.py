"""All rules by code."""

from __future__ import annotations

from elasticrun.lint.rules.loop_texts import LOOP_RULES
from elasticrun.lint.rules.other_texts import OTHER_RULES
from elasticrun.lint.rules.replay_texts import REPLAY_RULES
from elasticrun.lint.rules.rule import Rule
from elasticrun.lint.rules.value_texts import VALUE_RULES

RULES: dict[str, Rule] = {
    rule.code: rule for rule in (*OTHER_RULES, *REPLAY_RULES, *LOOP_RULES, *VALUE_RULES)
}
