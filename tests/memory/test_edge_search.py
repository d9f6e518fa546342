"""The search of `find_budget` on made-up devices: floors, large models, coarse and noisy peaks."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from odb_nodes.memory import ShapeTooLargeError, Trial
from odb_nodes.memory.calibration import verified_budget
from odb_nodes.memory.edge_search import EdgeSearch

MIB = 2**20
GB = 10**9


@dataclass
class Device:
    """Stands for `Trials`: its steps take what a formula says, and fail above the limit."""

    limit_bytes: int
    constant: float = GB
    token: float = 30_000.0
    square: float = 20.0
    floor: float = 0.0
    grain: int = 1  # bytes that peaks are rounded up to
    noise: float = 0.0
    fails_above: float = 1.0  # times the limit: only there a step raises
    patches_per_row: int = 0
    done: list = field(default_factory=list)

    def peak(self, rows, width):
        exact = self.constant + rows * width * (self.token + self.square * width)
        scatter = self.noise * random.Random(rows * width).uniform(-1, 1)
        noisy = max(exact, self.floor) * (1 + scatter)
        return int(-(-noisy // self.grain)) * self.grain

    def run(self, rows, width):
        peak = self.peak(rows, width)
        error = "out of memory" if peak > self.fails_above * self.limit_bytes else ""
        shape = {"rows": rows, "width": width, "patches": 0}
        fits = peak <= self.limit_bytes
        self.done.append(Trial(**shape, peak_bytes=peak, fits=fits, seconds=1.0, error=error))
        return self.done[-1]

    def most_rows(self, width):
        low, high = 0, 1
        while self.peak(high, width) <= self.limit_bytes:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.peak(middle, width) <= self.limit_bytes
            low, high = (middle, high) if fits else (low, middle)
        return low


def search(device, widths, max_trials=24):
    """Return the budget, and the edges that it is from."""
    edge_search = EdgeSearch(device, device.limit_bytes, max_trials)
    edges = edge_search.run(widths)
    assert len(device.done) <= max_trials
    return verified_budget(edge_search.model(), edges, device.limit_bytes, 0), edges


def assert_near(device, widths, budget, share=0.95):
    """Whether the budget is nearly the largest that fits, and it fits."""
    rows = {width: budget.tokens // budget.row_cost(width) for width in widths}
    most = {width: device.most_rows(width) for width in widths}
    assert all(rows[width] <= most[width] for width in widths)
    assert any(rows[width] >= int(share * most[width]) for width in widths), (rows, most)


@given(
    st.integers(6, 9),  # bytes of the model, as a power of 10
    st.floats(2, 6),  # of a token
    st.floats(2, 4.5),  # times less of a pair of tokens
    st.floats(4, 5.5),  # tokens that fit, about
    st.sampled_from([0.0, 1.2]),
    st.sampled_from([1, 512]),
    st.sampled_from([1.0, 1.1]),
    st.lists(st.integers(32, 2048), min_size=1, max_size=3, unique=True),
)
def test_it_comes_near_on_any_device(model, token, square, tokens, floor, grain, above, widths):
    device = Device(
        limit_bytes=int(10**model * 1.6 + 10 ** (token + tokens)),
        constant=10**model,
        token=10**token,
        square=10 ** (token - square),
        floor=floor * 10**model,
        grain=grain,
        fails_above=above,
    )
    widths = sorted(widths)
    assume(all(device.most_rows(width) >= 2 for width in widths))
    assert_near(device, widths, search(device, widths)[0], share=0.93)


def test_noise_costs_a_little():
    device = Device(limit_bytes=16 * GB, noise=0.01, grain=2 * MIB)
    budget, _ = search(device, [32, 256, 2048])
    for width in (32, 256, 2048):
        assert device.peak(budget.tokens // budget.row_cost(width), width) <= 1.01 * 16 * GB
    assert budget.tokens > 0.9 * (15 * GB / 30_000)


@pytest.mark.parametrize(
    ("floor", "widths"), [(20 * GB, [32, 512, 4096]), (0, [*range(100, 1100, 100)])]
)
def test_large_floors_are_left_and_many_widths_are_predicted_from_a_few(floor, widths):
    device = Device(limit_bytes=40 * GB, floor=floor)
    budget, edges = search(device, widths)
    assert_near(device, widths, budget)
    assert not floor or all(edge.is_found for edge in edges)


def test_too_few_trials_give_what_has_fitted():
    budget, edges = search(Device(limit_bytes=40 * GB), [32, 512, 4096], max_trials=6)
    assert not all(edge.is_found for edge in edges)
    for edge in edges:
        assert budget.tokens // budget.row_cost(edge.width) <= max(edge.fits, 1) or edge.is_found


def test_one_row_alone_that_fits_is_the_budget_and_one_that_does_not_is_an_error():
    budget, _ = search(Device(limit_bytes=2 * GB, square=0.0), [20_000])
    assert budget.tokens // budget.row_cost(20_000) == 1
    with pytest.raises(ShapeTooLargeError, match="a single row of 9000 tokens does not fit"):
        search(Device(limit_bytes=2 * GB), [100, 9000])


def test_rows_have_a_bound_where_memory_hardly_grows():
    device = Device(limit_bytes=10**12, constant=1e6, token=1e-3, square=0.0)
    _, edges = search(device, [64, 256])
    assert all(edge.fails is None and edge.fits > 10**6 for edge in edges)
    assert max(trial.rows * trial.width for trial in device.done) < 2**31
