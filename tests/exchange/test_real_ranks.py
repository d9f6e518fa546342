"""Alignment with real processes over gloo."""

import pytest
from rank_jobs import run_ranks

SHAPES = """
    shapes = {
        2: [[40, 40], [40, 41], [30, 90], [50, 0], [0, 1]],
        4: [[40] * 4, [41, 40, 40, 40], [30, 90, 30, 30], [40, 0, 40, 40], [1, 0, 0, 0]],
    }[world_size]
"""


@pytest.mark.parametrize("world_size", [2, 4])
def test_equal_steps_and_every_sample_once(world_size, tmp_path):
    body = (
        SHAPES
        + """
    for sizes in shapes:
        for options in ({}, {"read_ahead": 3}, {"accumulate": 3}):
            loader = r.make_loader(sizes[rank], **options)
            r.check_epochs(sizes, r.epochs_of(loader))
            loader.close()
    r.finish()
    """
    )
    run_ranks(tmp_path, body, world_size)
