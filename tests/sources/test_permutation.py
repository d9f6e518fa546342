import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from odb_nodes.sources.sharded_sampler import Permutation

EDGES = [1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 4096, 4097, 2**16, 10**5]


def whole(size, seed):
    return Permutation(size, seed)(np.arange(size))


@pytest.mark.parametrize("size", EDGES)
def test_it_is_a_bijection_at_the_edges_of_its_domains(size):
    assert_array_equal(np.sort(whole(size, seed=3)), np.arange(size))


@given(st.integers(1, 5000), st.integers(-(2**70), 2**70))
def test_it_is_a_bijection_for_every_size_and_seed(size, seed):
    assert_array_equal(np.sort(whole(size, seed)), np.arange(size))


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1), st.data())
def test_an_element_asked_for_alone_is_the_one_of_the_whole(size, seed, data):
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=20)), dtype=np.int64)
    kept, elements = positions.copy(), Permutation(size, seed)(positions)
    assert_array_equal(elements, whole(size, seed)[positions])
    assert elements.dtype == np.int64
    assert_array_equal(positions, kept)


@pytest.mark.parametrize("size", [10**9, 10**12, 2**40 + 1])
def test_huge_sizes_take_no_memory_and_stay_in_range(size):
    positions = np.array([0, 1, size // 2, size - 1])
    elements = Permutation(size, 1)(positions)
    assert len(set(elements.tolist())) == len(positions)
    assert ((elements >= 0) & (elements < size)).all()


@pytest.mark.parametrize(("size", "seeds"), [(13, 300), (64, 1000), (250, 1000)])
def test_every_element_is_about_equally_likely_at_every_position(size, seeds):
    """Chi-square of a table with given row and column sums; the bound is 7 standard deviations."""
    counts = np.zeros((size, size))
    for seed in range(seeds):
        counts[np.arange(size), whole(size, seed)] += 1
    expected, freedom = seeds / size, (size - 1) ** 2
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 7 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [100, 4096])
def test_neighbours_are_scattered(size):
    """Of a uniform permutation about 2 neighbours are next to each other, whatever its size."""
    close = [np.count_nonzero(np.abs(np.diff(whole(size, seed))) == 1) for seed in range(200)]
    assert 1.0 < np.mean(close) < 3.0


@pytest.mark.parametrize(
    ("size", "seed", "elements"),
    [
        (1, 0, [0]),
        (3, 0, [2, 1, 0]),
        (10, 0, [2, 5, 4, 3, 9, 1, 6, 8, 0, 7]),
        (10, 1, [8, 3, 7, 2, 6, 4, 9, 0, 5, 1]),
        (10, -1, [5, 7, 9, 6, 4, 2, 1, 3, 0, 8]),
        (256, 0, [40, 69, 34, 131, 35, 95, 191, 132, 0, 142]),
        (1000, 7, [805, 559, 495, 99, 663, 374, 27, 911, 353, 725]),
        (10**12, 0, [870782595262, 631120910047, 305440413167, 982907734423]),
    ],
)
def test_golden_seeds(size, seed, elements):
    """Saved runs depend on these: a change here is a change of `STATE_VERSION`."""
    positions = np.arange(len(elements))
    assert Permutation(size, seed)(positions).tolist() == elements
