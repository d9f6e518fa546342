"""Indices drawn by weight."""

from collections import Counter

import pytest

from odb_nodes import WeightedSampler


def test_shares_follow_the_weights():
    counts = Counter(WeightedSampler([1, 0, 3, 0], 20_000, seed=2))
    assert counts[1] == counts[3] == 0
    assert counts[2] / counts[0] == pytest.approx(3, rel=0.05)


def test_an_epoch_has_an_order_of_its_own_that_comes_again():
    sampler = WeightedSampler([1.0] * 50, seed=1)
    first, again = list(sampler), list(sampler)
    sampler.set_epoch(1)
    assert first == again != list(sampler)
    assert list(WeightedSampler([1.0] * 50, seed=2)) != first


def test_without_replacement_each_comes_once_and_heavy_ones_early():
    weights = [1.0] * 500 + [50.0] * 500
    drawn = list(WeightedSampler(weights, replacement=False))
    assert sorted(drawn) == list(range(1000))
    assert sum(index >= 500 for index in drawn[:300]) > 280
    assert {*WeightedSampler([0, 1, 1, 1], 3, replacement=False)} == {1, 2, 3}


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ([1, -1], {}, "must not be negative"),
        ([0, 0], {}, "some more than 0"),
        ([], {}, "some more than 0"),
        ([1, float("nan")], {}, "one row of finite numbers"),
        ([[1]], {}, "one row of finite numbers"),
        ([0, 1], {"replacement": False}, "at most 1, the number of weights above 0"),
        ([1], {"num_samples": 0}, "`num_samples` must be in 1.."),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_named(weights, options, message):
    with pytest.raises(ValueError, match=message):
        WeightedSampler(weights, **options)
