"""The vocabulary: labels give the layout back, and columns hold what their rows say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver.layout import AXES, RECOMPUTE, SCHEDULES, SPLIT_AXES, SWITCH_AXES, Columns, Layout, columns_of, parse_label

SIZES = [axis for axis in AXES if axis not in SWITCH_AXES]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout in words; recompute states layers only where it covers some."""
    recompute = draw(st.sampled_from(RECOMPUTE))
    return Layout(
        **{axis: draw(st.integers(1, 10**6)) for axis in SIZES},
        zero_stage=draw(st.integers(0, 3)),
        recompute=recompute,
        recompute_layers=draw(st.integers(1, 200)) if recompute == "full" else 0,
        schedule=draw(st.sampled_from(SCHEDULES)),
    )


EXAMPLES = [
    Layout(),
    Layout(tensor_parallel=8, data_parallel=4, recompute="full", recompute_layers=3),
    Layout(pipeline_parallel=4, virtual_pipeline=2, schedule="dualpipe", zero_stage=2),
    Layout(expert_parallel=4, expert_tensor_parallel=2, recompute="selective", schedule="gpipe"),
]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(layouts())
def test_a_label_gives_its_layout_back(layout: Layout) -> None:
    natural = "interleaved_1f1b" if layout.virtual_pipeline > 1 else "1f1b"
    assert Layout(**{"schedule": natural, **parse_label(layout.label)}) == layout  # type: ignore[arg-type]


def test_the_pieces_of_a_label_come_in_any_order() -> None:
    label = EXAMPLES[1].label
    readings = [parse_label("-".join(pieces)) for pieces in itertools.islice(itertools.permutations(label.split("-")), 200)]
    assert all(reading == readings[0] for reading in readings)


@pytest.mark.parametrize(
    ("label", "piece"),
    [("tp8-tp4", "tp4"), ("tp8-none-full", "full"), ("tp8-xx2", "xx2"), ("tp", "tp"), ("", ""), ("tp-8", "tp"), ("tp1.5", "tp1.5")],
)
def test_a_label_that_cannot_be_read_is_refused_with_the_piece(label: str, piece: str) -> None:
    with pytest.raises(ValueError, match=f"'{piece}'"):
        parse_label(label)


def test_columns_give_every_layout_back() -> None:
    columns = columns_of(EXAMPLES)
    assert [columns.layout(row) for row in range(len(columns))] == EXAMPLES


def test_taking_rows_takes_them_from_every_axis() -> None:
    columns = columns_of(EXAMPLES)
    for index, expected in ((np.array([2, 0]), [2, 0]), (slice(1, 3), [1, 2]), (np.array([True, False, False, True]), [0, 3])):
        taken = columns.take(index)
        assert [taken.layout(row) for row in range(len(taken))] == [EXAMPLES[row] for row in expected]


def test_columns_of_unequal_length_are_refused() -> None:
    arrays = {axis: np.ones(3, dtype=np.int64) for axis in AXES}
    with pytest.raises(ValueError, match="unequal length"):
        Columns(**{**arrays, SPLIT_AXES[0]: np.ones(2, dtype=np.int64)})
