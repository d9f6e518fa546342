"""Files and mixtures go on with another number of ranks: each sample once, in the same shares."""

import gzip
import itertools
import json
import random
import re
from collections import Counter

import pytest
from aligned_ranks import TIMEOUT_S, on_ranks
from elastic import job, resharded, states_at

from odb_nodes import (
    JsonlSource,
    Mixing,
    ODBDataLoader,
    StateError,
    TokenBudget,
    WeightSchedule,
    WorkerOptions,
    reshard,
)
from odb_nodes.contract.state import add_digest

pytestmark = pytest.mark.filterwarnings("ignore")

RECORDS = 150
SIZES = {"a": 120, "b": 40, "c": 61}
EQUAL = {"a": 1, "b": 1, "c": 1}
OFFSETS = {"a": 0, "b": 1000, "c": 2000}


def text(index):
    return {"input_ids": [1] * random.Random(index).randint(2, 40), "id": index}


@pytest.fixture
def files(tmp_path):
    """Files of records, one of them empty, with empty lines between."""
    rng = random.Random(0)
    cuts = [0, 47, 47, 48, RECORDS]
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        lines = [
            json.dumps(text(index)) + "\n" * rng.choice([1, 1, 2]) for index in range(start, stop)
        ]
        (tmp_path / f"{number}.jsonl").write_text("".join(lines))
    return tmp_path


def read(path, **source_options):
    """What makes a loader of the records of files."""

    def make(exchange, **options):
        source = JsonlSource(path, exchange.rank, exchange.world_size, **source_options)
        given = {"token_budget": 90, "window": 12, "round_size": 8, "timeout_s": TIMEOUT_S}
        return ODBDataLoader(source, process_group=exchange, **given | options)

    return make


def mixed(path=None, **mixing):
    """What makes a loader of three sources."""

    def make(exchange, **options):
        datasets = {
            name: [text(OFFSETS[name] + index) for index in range(size)]
            for name, size in SIZES.items()
        }
        if path is not None:
            datasets["c"] = JsonlSource(path, exchange.rank, exchange.world_size)
        weights = (
            Mixing(weights={"a": 4, "b": 1, "c": 2}, **mixing) if "weights" not in options else {}
        )
        given = {"token_budget": 90, "window": 12, "round_size": 8, "timeout_s": TIMEOUT_S}
        given |= {"weights": weights, "workers": WorkerOptions(chunk_size=5)}
        return ODBDataLoader(datasets, process_group=exchange, **given | options)

    return make


def check_rest(begun, step, world_size, make, expected=None, **options):
    """Check that no sample comes twice, and `expected` once; return the rest."""
    rest = job(world_size, resharded(begun, step, world_size), make=make, **options)
    before = [index for found, *_ in begun for _, ids in found[:step] for index in ids]
    after = [index for found, *_ in rest for _, ids in found for index in ids]
    assert max(Counter(before + after).values()) == 1
    if expected is not None:
        assert sorted(before + after) == [*expected]
    return rest


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_of_files_each_record_comes_once(files, before, after, shuffle, sampled):
    make = read(files, shuffle=shuffle)
    begun = job(before, make=make)
    for step in range(0, len(begun[0][1]), sampled(every=7).get("every", 1)):
        check_rest(begun, step, after, make, range(RECORDS))


def test_of_files_in_a_chain_and_in_the_next_epoch(files):
    make = read(files)
    first = job(3, make=make, steps=3)
    second = job(2, resharded(first, -1, 2), make=make, steps=2)
    third = job(4, resharded(second, -1, 4), make=make, epochs=2)
    of_epoch = [
        index
        for part in (first, second, third)
        for found, *_ in part
        for info, ids in found
        for index in ids
        if info.epoch == 0
    ]
    assert sorted(of_epoch) == [*range(RECORDS)]
    plain = job(4, make=make, epochs=2)
    for (found, *_), (expected, *_) in zip(third, plain, strict=True):
        assert [one for one in found if one[0].epoch] == [one for one in expected if one[0].epoch]
    assert sum(counts[-1] for *_, counts in job(2, resharded(first, -1, 2), make=make)) == RECORDS


def test_compressed_files_are_refused_within_an_epoch(tmp_path):
    with gzip.open(tmp_path / "0.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(text(index)) + "\n" for index in range(RECORDS))
    make = read(tmp_path, shuffle=False)
    begun = job(2, make=make)
    with pytest.raises(StateError, match="cannot read samples by keys"):
        resharded(begun, 3, 3)
    assert len(job(3, resharded(begun, -1, 3), make=make, epochs=2)[0][0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_of_a_mixture_each_sample_comes_once(files, by, before, after, sampled):
    make = mixed(files, by=by)
    begun = job(before, make=make)
    everything = sorted([*range(120), *range(1000, 1040), *range(RECORDS)])
    for step in range(0, len(begun[0][1]), sampled(every=7).get("every", 1)):
        rest = job(after, resharded(begun, step, after), make=make)
        parts = [found[:step] for found, *_ in begun] + [found for found, *_ in rest]
        rows = [
            (source, key)
            for found in parts
            for info, _ in found
            for source, key in zip(info.row_sources, info.keys, strict=True)
            if not info.is_filler
        ]
        assert max(Counter(rows).values()) == 1
        ids = [index for found in parts for _, of_step in found for index in of_step]
        assert sorted(ids) == everything


@pytest.mark.parametrize("after", [1, 3, 8])
def test_ranks_stand_for_as_many_samples_as_there_are_whatever_was_dropped(after):
    def make(exchange):
        datasets = {f"source {at}": range(20 * at, 20 * at + 20) for at in range(10)}
        return ODBDataLoader(
            datasets,
            token_budget=TokenBudget(90, oversize="drop"),
            window=12,
            round_size=8,
            timeout_s=TIMEOUT_S,
            process_group=exchange,
            process_fn=lambda index: {"input_ids": [1] * 200} if index % 3 == 0 else text(index),
        )

    begun = job(2, make=make)
    for step in range(1, len(begun[0][1]) - 1, 5):
        rest = job(after, resharded(begun, step, after), make=make)
        assert sum(total for *_, (*_, total) in rest) == 200


def shares_of(ranks, steps):
    counts = Counter()
    for found, *_ in ranks:
        for info, _ in found[:steps]:
            counts.update({name: one.samples for name, one in info.local_sources.items()})
    total = sum(counts.values())
    return {name: counts[name] / total for name in counts}


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_shares_go_on(by):
    make = mixed(by=by, stop="cycle")
    begun = job(4, make=make, steps=3)
    states = resharded(begun, -1, 2)
    had = [
        _find(state, "SourceMixer")["samples" if by == "samples" else "tokens"] for state in states
    ]
    before = [
        _find(state, "SourceMixer")["samples" if by == "samples" else "tokens"]
        for state in states_at(begun, -1)
    ]
    if by == "samples":  # of which some are behind the state of the mixture
        pulled = [_find(state, "WindowBucketer")["pulled"] for state in states_at(begun, -1)]
        assert sum(sum(one.values()) for one in had) == sum(pulled)
        assert sum(sum(one.values()) for one in before) < sum(pulled)
    else:
        assert {name: sum(one[name] for one in had) for name in SIZES} == {
            name: sum(one[name] for one in before) for name in SIZES
        }
    for one in had:
        assert one["a"] / sum(one.values()) == pytest.approx(4 / 7, abs=0.06)
    rest = job(2, states, make=make, steps=12)
    if by == "samples":
        assert shares_of(rest, 12)["a"] == pytest.approx(4 / 7, abs=0.08)


def _find(state, node):
    if isinstance(state, dict):
        if state.get("node") == node:
            return state
        for one in state.values():
            if (found := _find(one, node)) is not None:
                return found
    return None


def test_the_first_exhausted_source_ends_the_epoch_of_all():
    make = mixed(stop="first_exhausted")
    begun = job(3, make=make)
    for step in range(0, len(begun[0][1]), 2):
        rest = check_rest(begun, step, 2, make)
        ids = [
            index for part in (begun, rest) for found, *_ in part for _, of in found for index in of
        ]
        assert len(ids) > 100


def test_sources_that_began_again_on_some_ranks_alone_are_refused():
    make = mixed(stop="cycle")
    begun = job(3, make=make)
    outcomes = Counter()
    for step in range(len(begun[0][1])):
        try:
            resharded(begun, step, 2)
            outcomes["resharded"] += 1
        except StateError as error:
            message = r"source '[abc]'(: `ShardedSampler` has begun again on| has just begun again)"
            outcomes[re.match(message, str(error))[1][0]] += 1
    assert outcomes.pop("resharded") and outcomes


@pytest.mark.parametrize("stop", ["cycle", "first_exhausted"])
def test_a_rank_may_have_nothing_left_of_a_source_that_others_had(stop):
    def make(exchange):
        return ODBDataLoader(
            {"a": [text(index) for index in range(400)], "b": [text(1000 + at) for at in range(4)]},
            weights=Mixing(weights={"a": 30, "b": 1}, stop=stop),
            token_budget=90,
            window=12,
            timeout_s=TIMEOUT_S,
            process_group=exchange,
        )

    assert job(4, make=make, steps=3)  # where each rank has a sample of each source, it begins
    begun = job(1, make=make, steps=20)
    for step in (1, 8, 19):
        states = resharded(begun, step, 4)
        had = [_find(state, "SourceMixer")["samples"]["b"] for state in states]
        assert 0 in had and any(had)
        assert job(4, states, make=make, steps=5)


@pytest.mark.parametrize("ramp", [False, True])
def test_weights_that_change_go_on(ramp):
    schedule = WeightSchedule([(0, EQUAL), (120, {**EQUAL, "a": 6})], ramp=ramp)

    def make(exchange, **options):
        return mixed()(exchange, weights=Mixing(weights=schedule), **options)

    begun = job(3, make=make)
    everything = sorted(OFFSETS[name] + at for name, size in SIZES.items() for at in range(size))
    for step in range(0, len(begun[0][1]), 3):
        check_rest(begun, step, 2, make, everything)


def test_weights_that_were_set_go_on_once_all_ranks_draw_by_them():
    def make(exchange, **options):
        mixing = Mixing(weights={"a": 1, "b": 1, "c": 1}, settable=True)
        return mixed()(exchange, weights=mixing, prefetch=0, **options)

    def run(exchange):
        loader = make(exchange)
        saved, batches = [], iter(loader)
        for step in range(16):
            if step == 2:
                loader.set_weights({"a": 8, "b": 1, "c": 1})
            next(batches)
            saved.append(loader.state_dict())
        return None, saved, None

    begun = on_ranks(3, run)
    refused = []
    for step in range(16):
        try:
            resharded(begun, step, 2)
        except StateError as error:
            assert "set a few steps ago" in str(error)
            refused.append(step)
    # From the round in which the ranks agree on them to the first that draws by them alone.
    assert refused == list(range(4, 12))
    states = resharded(begun, -1, 2)
    rest = job(2, states, make=make, steps=8)
    shares = [info.source_shares["a"] for found, *_ in rest for info, _ in found]
    assert shares == [pytest.approx(0.8)] * len(shares)


def test_a_mixture_whose_sources_are_not_counted_is_refused():
    begun = job(2, make=mixed(), steps=3)
    states = states_at(begun, -1)
    at = _find(states[0], "ParallelProcessor")
    assert at["taken"] and sum(count for count, _ in at["taken_of"].values()) == at["taken"]
    del at["taken_of"], states[0]["digest"]
    with pytest.raises(StateError, match="the sources of only 0 are known"):
        reshard([add_digest(states[0]), states[1]], 3)
