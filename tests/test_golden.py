"""The exact top rows of every committed scenario, and the typical configurations of the field."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.golden import renew

EXPECTED = json.loads(renew.GOLDEN.read_text())


def test_every_scenario_has_golden_rows() -> None:
    assert sorted(EXPECTED) == renew.scenario_names()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_search_gives_the_golden_rows(name: str) -> None:
    result = renew.run(name)
    assert renew.golden_rows(result) == EXPECTED[name]
    if name in renew.TYPICAL:  # a layout that people run is found feasible
        assert "fits" in renew.typical_line(name, result)


def test_the_committed_sweep_is_what_the_command_gives(tmp_path: Path) -> None:
    renew.sweep_into(tmp_path, "--jobs", "1")
    fresh, committed = (pd.read_csv(folder / "sweep.csv") for folder in (tmp_path, renew.RESULTS / renew.SWEEP))
    exact = ["num_gpus", "layout", "verdict", "space", "survivors", "fastest_num_gpus", "pareto"]
    pd.testing.assert_frame_equal(fresh[exact], committed[exact])
    close = ["step_seconds", "mfu", "memory_gib", "total_days", "cost_usd", "scaling_efficiency"]
    pd.testing.assert_frame_equal(fresh[close], committed[close], rtol=1e-6)
