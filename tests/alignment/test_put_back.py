"""Planned samples that go back into the pool, of a source without keys: what states hold then."""

import pytest
from aligned_ranks import epoch_of, ids_of, shard
from torch.utils.data import IterableDataset
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    IterableSource,
    LengthObserver,
    Loader,
    Observation,
    ODBDataLoader,
    ParallelProcessor,
    RankAligner,
    WindowBucketer,
)

SAMPLES = 120
PLACE = 15  # within the third round; what goes back is older there than what waits
CHANGES = {
    "more excluded": [{"exclude": range(40, 110, 7)}],
    "a lower budget": [{"tokens": 40}],
    "one after the other": [{"tokens": 40}, {"tokens": 40, "exclude": range(40, 110, 7)}],
}


def observe(sample):
    return Observation(len(sample["input_ids"]), key=sample["id"])


def loader_of(make_source, tokens=60, exclude=None):
    source = LengthObserver(make_source(shard(0, SAMPLES)), observe)
    bucketer = WindowBucketer(source, tokens, 6, exclude=exclude)
    return Loader(RankAligner(bucketer, round_size=8))


def resumed(make_source, state, **changes):
    loader = loader_of(make_source, **changes)
    loader.load_state_dict(state, change_budget=True)
    return epoch_of(loader)


def processed(samples):
    """A source that processes only the samples that a restore asks for."""
    return ParallelProcessor(IterableSource(samples), dict)


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("make_source", [IterableWrapper, processed])
def test_a_run_resumes_exactly_after_planned_samples_went_back(make_source, changes):
    (steps, states), done = epoch_of(loader_of(make_source)), []
    for options in changes:
        done, state = [*done, *ids_of(steps[:PLACE])], states[PLACE]
        steps, states = resumed(make_source, state, **options)
        gone = {*options.get("exclude", ())} - {*done}
        assert sorted([*done, *ids_of(steps)]) == sorted({*range(SAMPLES)} - gone)
    for at in range(1, len(states)):
        assert resumed(make_source, states[at], **changes[-1])[0] == steps[at:], at


class Numbers(IterableDataset):
    def __iter__(self):
        yield from ({"input_ids": [n] * (n % 7 + 1)} for n in range(80))


def test_a_rank_that_fills_with_a_sample_of_another_restores_without_keys():
    """Whose number in the epoch is one of the other rank."""

    def make():
        odd = range(1, 80, 2)  # all that the second rank has
        options = {"token_budget": 16, "window": 8, "round_size": 4, "virtual_ranks": 2}
        return ODBDataLoader(Numbers(), exclude=odd, num_workers=0, **options)

    states, found = [], []
    for batch in (loader := make()):
        found.append(batch["input_ids"].tolist())
        states.append(loader.state_dict())
    for step in range(1, len(found), 3):
        resumed = make()
        resumed.load_state_dict(states[step - 1])
        assert [batch["input_ids"].tolist() for batch in resumed] == found[step:]
