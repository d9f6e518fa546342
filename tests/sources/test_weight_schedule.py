"""Weights that change at places of an epoch."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import fewer
from torchdata.nodes import Mapper

from odb_nodes import LengthObserver, Loader, ShardedSampler, SourceMixer, StateError
from odb_nodes import WeightSchedule as Schedule
from odb_nodes.testing import assert_resumes_exactly

NAMES = ("a", "b", "c")
SCALE = {"a": 40, "b": 5, "c": 300}
PLACES = [
    (0, {"a": 6, "b": 4, "c": 0}),
    (4000, {"a": 0.1, "b": 0.1, "c": 0.8}),
    (9000, {"a": 1, "b": 0, "c": 4}),
    (15000, {"a": 1, "b": 2, "c": 1}),
]


def mixer(weights, size=20_000, **options):
    sizes = size if isinstance(size, dict) else dict.fromkeys(NAMES, size)
    nodes = {name: ShardedSampler(sizes[name], seed=1, rank=0, world_size=1) for name in NAMES}
    return SourceMixer(nodes, weights, **{"world_size": 1, **options})


def sample(scale, index):
    return scale * (1 + index % 7)


def in_tokens(weights, size=20_000, **options):
    nodes = {
        name: LengthObserver(
            Mapper(
                ShardedSampler(size, seed=1, rank=0, world_size=1),
                lambda index, name=name: sample(SCALE[name], index),
            ),
            observe=int,
        )
        for name in NAMES
    }
    return SourceMixer(nodes, weights, by="tokens", **{"world_size": 1, **options})


def shares_of(weights):
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def drawn(node, items):
    node.reset(None)
    return [next(node).source for _ in range(items)]


def test_shares_of_samples_follow_the_weights_of_each_stretch():
    sources = drawn(mixer(Schedule(PLACES), stop="first_exhausted"), 20_000)
    for (place, weights), stop in zip(PLACES, [4000, 9000, 15000, 20000], strict=True):
        counts = Counter(sources[place:stop])
        for name, share in shares_of(weights).items():
            assert abs(counts[name] - share * (stop - place)) <= 3  # items, not a hundredth


def test_shares_of_tokens_follow_the_weights_of_each_stretch():
    places = [(place * 60, weights) for place, weights in PLACES]
    node = in_tokens(Schedule(places), stop="first_exhausted")
    node.reset(None)
    counts, found = Counter(), []
    while sum(counts.values()) < 1_200_000:
        if len(found) < len(places) and sum(counts.values()) >= places[len(found)][0]:
            found.append(Counter(counts))
        one = next(node)
        counts[one.source] += one.tokens
    found.append(counts)
    for (_, weights), (before, after) in zip(places, pairwise(found), strict=True):
        total = sum(after.values()) - sum(before.values())
        for name, share in shares_of(weights).items():
            assert abs((after[name] - before[name]) / total - share) < 0.01


def test_a_ramp_has_the_shares_between_its_ends():
    places = [(0, {"a": 1, "b": 1, "c": 0}), (10_000, {"a": 0, "b": 1, "c": 3})]
    sources = drawn(mixer(Schedule(places, ramp=True), stop="first_exhausted"), 12_000)
    for start in range(0, 10_000, 1000):
        counts, middle = Counter(sources[start : start + 1000]), (start + 500) / 10_000
        for name, (first, last) in {"a": (0.5, 0), "b": (0.5, 0.25), "c": (0, 0.75)}.items():
            assert abs(counts[name] / 1000 - (first + (last - first) * middle)) < 0.004
    assert Counter(sources[10_000:]) == {"b": 500, "c": 1500}


@given(
    weights=st.lists(
        st.dictionaries(st.sampled_from(NAMES), st.integers(1, 50), min_size=1), min_size=1
    ),
    stretch=st.integers(1, 30),
    ramp=st.booleans(),
)
@fewer(5)
def test_no_source_drifts_however_often_the_weights_change(weights, stretch, ramp):
    every = [{name: one.get(name, 0) for name in NAMES} for one in weights]
    places = [(0, dict.fromkeys(NAMES, 1))]
    places += [(stretch * (at + 1), one) for at, one in enumerate(every)]
    schedule = Schedule(places, ramp)
    node = mixer(schedule, size=2000, stop="first_exhausted")
    node.reset(None)
    due, had = dict.fromkeys(NAMES, 0.0), Counter()
    for item in range(places[-1][0] + 60):
        for name, share in schedule.at(item, NAMES).items():
            due[name] += share
        had[next(node).source] += 1
        assert all(abs(had[name] - due[name]) < len(NAMES) for name in NAMES)


def test_one_place_draws_as_fixed_weights_do():
    weights = {"a": 0.5, "b": 0.25, "c": 0.25}
    fixed, scheduled = mixer(weights, 300), mixer(Schedule([(0, weights)]), 300)
    assert list(Loader(fixed)) == list(Loader(scheduled))


def test_places_count_what_all_ranks_draw():
    places = [(0, {"a": 1, "b": 1, "c": 1}), (600, {"a": 0, "b": 1, "c": 1}), (900, PLACES[3][1])]
    for ranks in (1, 2, 3):
        sources = drawn(mixer(Schedule(places), world_size=ranks), 1200 // ranks)
        assert "a" not in sources[600 // ranks : 900 // ranks]
        assert {*sources[:9]} == {*sources[-9:]} == {*NAMES}


SIZES = {"a": 50, "b": 90, "c": 20}
SHORT = [
    (0, {"a": 1, "b": 0, "c": 1}),
    (30, {"a": 0, "b": 1, "c": 0}),
    (70, {"a": 8, "b": 1, "c": 1}),
]


@pytest.mark.parametrize("ramp", [False, True])
@pytest.mark.parametrize("factor", [1, 5])  # at 5, all that is on runs out before the next place
def test_all_exhausted_yields_every_sample_once(ramp, factor):
    places = [(place * factor, weights) for place, weights in SHORT]
    node = mixer(Schedule(places, ramp), SIZES, stop="all_exhausted")
    items = list(Loader(node))
    assert len(items) == len(node)
    for name, size in SIZES.items():
        assert sorted(item for source, item in items if source == name) == list(range(size))


def test_cycle_ends_when_each_source_was_exhausted_once():
    counts = Counter(source for source, _ in Loader(mixer(Schedule(SHORT), SIZES, stop="cycle")))
    assert all(counts[name] >= size for name, size in SIZES.items())


def test_a_source_may_be_off_at_the_end_where_that_does_not_keep_an_epoch_from_ending():
    places = [(0, {"a": 1, "b": 1, "c": 1}), (30, {"a": 1, "b": 0, "c": 1})]
    items = list(Loader(mixer(Schedule(places), SIZES, stop="first_exhausted")))
    counts = Counter(source for source, _ in items)
    assert counts["b"] == 10 and counts["c"] == 20


@pytest.mark.sampled(5)
@pytest.mark.parametrize("ramp", [False, True])
@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "cycle"])
@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_every_step_resumes(by, stop, ramp, sampled):
    less = sampled(every=31, horizon=12, chain=1)
    factor = 60 if by == "tokens" else 1
    schedule = Schedule([(place * factor, weights) for place, weights in SHORT], ramp)
    make = (
        (lambda: Loader(in_tokens(schedule, 20, stop=stop)))
        if by == "tokens"
        else (lambda: Loader(mixer(schedule, SIZES, stop=stop)))
    )
    assert_resumes_exactly(make, epochs=2, **less)


def test_fixed_weights_have_the_state_that_they_had():
    node = mixer({"a": 1, "b": 2, "c": 3}, SIZES)
    node.reset(None)
    next(node)
    fields = {"sources", "samples", "tokens", "exhausted", "ended"}
    assert {*node.state_dict()} == {"version", "node", "config", *fields}
    assert {*node.state_dict()["config"]} == {"sources", "weights", "by", "stop"}


@pytest.mark.parametrize("other", [{"a": 1, "b": 1, "c": 1}, Schedule(SHORT, ramp=True)])
def test_another_schedule_is_refused(other):
    node = mixer(Schedule(SHORT), SIZES)
    node.reset(None)
    with pytest.raises(StateError, match=r"`(weights|ramp)` was .* when saved"):
        mixer(other, SIZES).reset(node.state_dict())


@pytest.mark.parametrize("change", [{"weights": {"a": -1.0, "b": 1.0, "c": 1.0}}, {"targets": {}}])
def test_a_damaged_state_is_refused(change):
    node = mixer(Schedule(SHORT), SIZES)
    node.reset(None)
    with pytest.raises(StateError, match="is damaged: .*weights"):
        mixer(Schedule(SHORT), SIZES).reset({**node.state_dict(), **change})


EQUAL = {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("places", "error", "message"),
    [
        ({0: EQUAL}, TypeError, r"`places` must be a `list` or a `tuple`.* a list of \(place"),
        ([], ValueError, "must begin at 0, but begin at none"),
        ([(5, EQUAL)], ValueError, "must begin at 0, but begin at 5"),
        ([(0, EQUAL), (9, EQUAL), (7, EQUAL)], ValueError, "must grow, but 7 comes after 9"),
        ([(0, EQUAL), (0, EQUAL)], ValueError, "must grow, but 0 comes after 0"),
        ([(0, EQUAL), (-3, EQUAL)], ValueError, r"`place` must be in 0\.\."),
        ([(0, EQUAL), (1.5, EQUAL)], TypeError, "`place` must be an integer"),
        ([(0, EQUAL, 1)], TypeError, "must hold pairs"),
        ([(0, [1, 2])], TypeError, "`weights at place 0` must be"),
        ([(0, EQUAL), (5, {"a": 1})], ValueError, r"same sources, \['a', 'b'\], but place 5"),
        ([(0, {"a": -1, "b": 1})], ValueError, r"`weights\['a'\]` at place `0` must be 0 or a pos"),
        ([(0, {"a": float("nan"), "b": 1})], ValueError, "0 or a positive number, but is nan"),
        ([(0, {"a": True, "b": 1})], ValueError, "0 or a positive number, but is True"),
        ([(0, EQUAL), (5, {"a": 0, "b": 0})], ValueError, "a weight above 0 at each place"),
        ([(0, {"a": 1, "b": 0})], ValueError, "'b' is always 0. Leave it out"),
    ],
)
def test_a_schedule_that_is_not_valid_says_why(places, error, message):
    with pytest.raises(error, match=message):
        Schedule(places)


@pytest.mark.parametrize("stop", ["all_exhausted", "cycle"])
def test_a_source_that_is_off_for_good_would_never_be_exhausted(stop):
    schedule = Schedule([(0, PLACES[1][1]), (5, PLACES[2][1])])
    with pytest.raises(ValueError, match=rf"last place .* \"{stop}\", but \['b'\] are off there"):
        mixer(schedule, stop=stop)


def test_a_schedule_of_other_sources_is_refused():
    with pytest.raises(ValueError, match=r"must have the names of `sources`, \['a', 'b', 'c'\]"):
        mixer(Schedule([(0, EQUAL)]))


def test_a_schedule_for_part_of_the_data_has_its_places_there():
    scaled = Schedule(PLACES).scaled(0.01)
    assert [place for place, _ in scaled.places] == [0, 40, 90, 150]
    assert [shares for _, shares in scaled.places] == [one for _, one in Schedule(PLACES).places]


def test_places_that_would_meet_in_a_smaller_sample_stay_apart():
    schedule = Schedule([(0, {"a": 1, "b": 0}), (400, {"a": 0, "b": 1}), (900, {"b": 1, "a": 1})])
    assert [place for place, _ in schedule.scaled(0.001).places] == [0, 1, 2]
    assert [place for place, _ in schedule.scaled(0.5).places] == [0, 200, 450]
