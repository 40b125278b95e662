"""The exact top rows of every committed scenario, and the typical configurations of the field."""

from __future__ import annotations

import json

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
