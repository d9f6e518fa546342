"""Weights that change at places of an epoch. Resumes: "scheduled" and "ramp" of the machine."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from sampling import fewer
from torchdata.nodes import Mapper

from odb_nodes import LengthObserver, Loader, ShardedSampler, SourceMixer, StateError
from odb_nodes import WeightSchedule as Schedule

NAMES = ("a", "b", "c")
SCALE = {"a": 40, "b": 5, "c": 80}
PLACES = [
    (0, {"a": 6, "b": 4, "c": 0}),
    (400, {"a": 0.1, "b": 0.1, "c": 0.8}),
    (900, {"a": 1, "b": 0, "c": 4}),
    (1500, {"a": 1, "b": 2, "c": 1}),
]
SIZES = {"a": 50, "b": 90, "c": 20}
SHORT = [
    (0, {"a": 1, "b": 0, "c": 1}),
    (30, {"a": 0, "b": 1, "c": 0}),
    (70, {"a": 8, "b": 1, "c": 1}),
]


def mixer(weights, size=2000, **options):
    sizes = size if isinstance(size, dict) else dict.fromkeys(NAMES, size)
    nodes = {name: ShardedSampler(sizes[name], seed=1, rank=0, world_size=1) for name in NAMES}
    return SourceMixer(nodes, weights, **{"world_size": 1, **options})


def in_tokens(weights, size):
    def observed(scale):
        node = Mapper(
            ShardedSampler(size, seed=1, rank=0, world_size=1), lambda n: scale * (1 + n % 7)
        )
        return LengthObserver(node, observe=int)

    nodes = {name: observed(SCALE[name]) for name in NAMES}
    return SourceMixer(nodes, weights, by="tokens", stop="first_exhausted", world_size=1)


def shares_of(weights):
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def drawn(node, items):
    node.reset(None)
    return [next(node).source for _ in range(items)]


def test_shares_of_samples_follow_the_weights_of_each_stretch():
    sources = drawn(mixer(Schedule(PLACES), stop="first_exhausted"), 2000)
    for (place, weights), stop in zip(PLACES, [400, 900, 1500, 2000], strict=True):
        counts = Counter(sources[place:stop])
        for name, share in shares_of(weights).items():
            assert abs(counts[name] - share * (stop - place)) <= 3  # items, not a hundredth


def test_shares_of_tokens_follow_the_weights_of_each_stretch():
    places = [(place * 60, weights) for place, weights in PLACES]
    node = in_tokens(Schedule(places), 2_000)
    node.reset(None)
    counts, at_places = Counter(), []
    while counts.total() < 120_000:
        if len(at_places) < len(places) and counts.total() >= places[len(at_places)][0]:
            at_places.append(Counter(counts))
        sample = next(node)
        counts[sample.source] += sample.tokens
    for (_, weights), (before, after) in zip(places, pairwise([*at_places, counts]), strict=True):
        total = after.total() - before.total()
        for name, share in shares_of(weights).items():
            assert abs((after[name] - before[name]) / total - share) < 0.03


def test_a_ramp_has_the_shares_between_its_ends():
    places = [(0, {"a": 1, "b": 1, "c": 0}), (2000, {"a": 0, "b": 1, "c": 3})]
    sources = drawn(mixer(Schedule(places, ramp=True), stop="first_exhausted"), 2400)
    for start in range(0, 2000, 200):
        counts, middle = Counter(sources[start : start + 200]), (start + 100) / 2000
        for name, (first, last) in {"a": (0.5, 0), "b": (0.5, 0.25), "c": (0, 0.75)}.items():
            assert abs(counts[name] - 200 * (first + (last - first) * middle)) < 3
    assert Counter(sources[2000:]) == {"b": 100, "c": 300}


@given(
    weights=st.lists(
        st.dictionaries(st.sampled_from(NAMES), st.integers(1, 50), min_size=1), min_size=1
    ),
    stretch=st.integers(1, 30),
    ramp=st.booleans(),
)
@fewer(5)
def test_no_source_drifts_however_often_the_weights_change(weights, stretch, ramp):
    every = [{name: stretch_weights.get(name, 0) for name in NAMES} for stretch_weights in weights]
    places = [(0, dict.fromkeys(NAMES, 1))]
    places += [
        (stretch * (number + 1), stretch_weights) for number, stretch_weights in enumerate(every)
    ]
    schedule = Schedule(places, ramp)
    node = mixer(schedule, stop="first_exhausted")
    node.reset(None)
    due, had = dict.fromkeys(NAMES, 0.0), Counter()
    for item in range(places[-1][0] + 60):
        for name, share in schedule.at(item, NAMES).items():
            due[name] += share
        had[next(node).source] += 1
        assert all(abs(had[name] - due[name]) < len(NAMES) for name in NAMES)


def test_one_place_draws_as_fixed_weights_do():
    weights = {"a": 0.5, "b": 0.25, "c": 0.25}
    fixed, scheduled = mixer(weights, 100), mixer(Schedule([(0, weights)]), 100)
    assert list(Loader(fixed)) == list(Loader(scheduled))
    assert {*fixed.state_dict()["config"]} == {"sources", "weights", "by", "stop"}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_places_count_what_all_ranks_draw(ranks):
    places = [(0, {"a": 1, "b": 1, "c": 1}), (600, {"a": 0, "b": 1, "c": 1}), (900, PLACES[3][1])]
    sources = drawn(mixer(Schedule(places), world_size=ranks), 1200 // ranks)
    assert "a" not in sources[600 // ranks : 900 // ranks]
    assert {*sources[:9]} == {*sources[-9:]} == {*NAMES}


@pytest.mark.parametrize("ramp", [False, True])
@pytest.mark.parametrize("factor", [1, 5])  # at 5, all that is on runs out before the next place
def test_all_exhausted_yields_every_sample_once(ramp, factor):
    places = [(place * factor, weights) for place, weights in SHORT]
    node = mixer(Schedule(places, ramp), SIZES, stop="all_exhausted")
    items = list(Loader(node))
    assert len(items) == len(node)
    for name, size in SIZES.items():
        assert sorted(item for source, item in items if source == name) == list(range(size))


def test_when_an_epoch_ends_otherwise():
    counts = Counter(source for source, _ in Loader(mixer(Schedule(SHORT), SIZES, stop="cycle")))
    assert all(counts[name] >= size for name, size in SIZES.items())
    places = [(0, {"a": 1, "b": 1, "c": 1}), (30, {"a": 1, "b": 0, "c": 1})]  # off, at the end
    items = Loader(mixer(Schedule(places), SIZES, stop="first_exhausted"))
    counts = Counter(source for source, _ in items)
    assert counts["b"] == 10 and counts["c"] == 20


def test_a_schedule_for_part_of_the_data_has_its_places_there():
    scaled = Schedule(PLACES).scaled(0.1)
    assert [place for place, _ in scaled.places] == [0, 40, 90, 150]
    assert [shares for _, shares in scaled.places] == [
        shares for _, shares in Schedule(PLACES).places
    ]
    assert [place for place, _ in Schedule(PLACES).scaled(0.0001).places] == [0, 1, 2, 3]  # apart


# What it refuses.


@pytest.mark.parametrize("other", [{"a": 1, "b": 1, "c": 1}, Schedule(SHORT, ramp=True)])
def test_another_schedule_is_refused(other):
    state = mixer(Schedule(SHORT), SIZES).state_dict()
    with pytest.raises(StateError, match=r"`(weights|ramp)` was .* when saved"):
        mixer(other, SIZES).reset(state)


EQUAL = {"a": 1, "b": 1}


test_a_schedule_that_is_not_valid_says_why = refuses(
    [
        ({0: EQUAL}, TypeError, r"`places` must be a `list` or a `tuple`"),
        ([], ValueError, "must begin at 0, but begin at none"),
        ([(5, EQUAL)], ValueError, "must begin at 0, but begin at 5"),
        ([(0, EQUAL), (9, EQUAL), (7, EQUAL)], ValueError, "must grow, but 7 comes after 9"),
        ([(0, EQUAL), (0, EQUAL)], ValueError, "must grow, but 0 comes after 0"),
        ([(0, EQUAL), (-3, EQUAL)], ValueError, r"`place` must be in 0\.\."),
        ([(0, EQUAL), (1.5, EQUAL)], TypeError, "`place` must be an integer"),
        ([(0, EQUAL, 1)], TypeError, "must hold pairs"),
        ([(0, [1, 2])], TypeError, "`weights at place 0` must be"),
        ([(0, EQUAL), (5, {"a": 1})], ValueError, r"\['a', 'b'\], but place 5"),
        ([(0, {"a": -1, "b": 1})], ValueError, r"`weights\['a'\]` at place `0`"),
        ([(0, {"a": float("nan"), "b": 1})], ValueError, "0 or a positive number .*, but is nan"),
        ([(0, {"a": True, "b": 1})], ValueError, "0 or a positive number .*, but is True"),
        ([(0, {"a": 1e308, "b": 1e308})], ValueError, "but is 1e.308"),
        ([(0, {"a": 10**400, "b": 1})], ValueError, "but is 1000"),
        ([(0, EQUAL), (5, {"a": 0, "b": 0})], ValueError, "a weight above 0 at each place"),
        ([(0, {"a": 1, "b": 0})], ValueError, "'b' is always 0"),
    ],
    lambda places: Schedule(places),
)


OFF = Schedule([(0, PLACES[1][1]), (5, PLACES[2][1])])


test_a_schedule_that_does_not_fit_the_mixture_is_refused = refuses(
    [
        (OFF, "all_exhausted", r"last place .*all_exh.* \['b'\] are off"),
        (OFF, "cycle", r"last place .*cycle.* \['b'\] are off"),
        (Schedule([(0, EQUAL)]), "cycle", r"names of `sources`, \['a', 'b', 'c'\]"),
    ],
    lambda schedule, stop: mixer(schedule, stop=stop),
    error=ValueError,
)
