import pytest

from odb_nodes.planning import round_steps


@pytest.mark.parametrize(
    ("world_size", "round_size", "accumulate", "steps"),
    [
        (2, 32, 1, [4, 8, 16, 32, 32]),
        (64, 20, 1, [4, 8, 16, 20, 20]),
        (2, 2, 1, [2, 2, 2, 2, 2]),
        (2, 32, 3, [6, 9, 18, 33, 33]),
        (2, 4, 8, [8, 8, 8, 8, 8]),
        (1, 32, 1, [1, 2, 4, 4, 4]),
        (1, 32, 3, [3, 3, 6, 6, 6]),
        (1, 2, 1, [1, 2, 2, 2, 2]),
    ],
)
def test_rounds_grow_in_whole_optimizer_steps(world_size, round_size, accumulate, steps):
    options = {"world_size": world_size, "round_size": round_size, "accumulate": accumulate}
    assert [round_steps(number, **options) for number in range(5)] == steps
    assert round_steps(10**6, **options) == steps[-1]
