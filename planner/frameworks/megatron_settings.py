"""All rules about Megatron's own settings, which no layout expresses: what its parser refuses, and what runs and surprises."""

from __future__ import annotations

import dataclasses
import re

from planner.frameworks.bridge_keys import key_of
from planner.frameworks.config import Config, SettingRule
from planner.frameworks.megatron_batches import BATCH_RULES
from planner.frameworks.megatron_combinations import COMBINATION_RULES
from planner.frameworks.megatron_flags import flags
from planner.frameworks.megatron_traps import TRAP_RULES
from planner.scenario import Job


def in_its_words(rule: SettingRule) -> SettingRule:
    """The rule, telling a Megatron-Bridge file's reader its own keys instead of Megatron-LM's flags."""

    def finds(config: Config, job: Job) -> str:
        text = rule.finds(config, job)
        return keyed(text) if config.framework == "megatron-bridge" else text

    return dataclasses.replace(rule, finds=finds)


def keyed(text: str) -> str:
    """A text with Bridge's keys in place of Megatron's flags.

    >>> keyed("--decoder-first-pipeline-num-layers 11 of --num-layers = 46")
    'model.num_layers_in_first_pipeline_stage 11 of model.num_layers = 46'
    """
    known = flags()
    return re.sub(r"--[a-z][a-z0-9-]+", lambda found: key_of(known[found[0]].field) if found[0] in known else found[0], text)


SETTING_RULES: tuple[SettingRule, ...] = tuple(in_its_words(rule) for rule in (*BATCH_RULES, *COMBINATION_RULES, *TRAP_RULES))
