"""What several test files share: the worked example of the field, and the command line in this process."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from planner.cli import planner
from planner.cli.terminal import run
from planner.request import Request, make_scenario
from planner.scenario import Scenario


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def command() -> Callable[..., Outcome]:
    """Runs ``planner`` with arguments."""

    def call(*arguments: str) -> Outcome:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
            run(planner, list(arguments))
        return Outcome(int(left.value.code or 0), out.getvalue(), err.getvalue())

    return call


@pytest.fixture(scope="session")
def worked_example() -> Scenario:
    """70B on 2,048 H100, 1.4T tokens, 1,024 sequences of 4,096."""
    return make_scenario(
        Request(model="70b", num_gpus=2048, seq_len=4096, global_batch_size=1024, training_tokens=1.4e12), name="worked-example"
    )
