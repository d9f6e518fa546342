"""A run goes on with another number of ranks: what the resume machine does not see of it."""

import copy
import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from aligned_ranks import TIMEOUT_S, on_ranks
from elastic import (
    ENDED_EARLY,
    LEFT_OUT,
    SAMPLES,
    ids_of,
    job,
    make,
    resharded,
    sample,
    states_at,
    trained_on,
    whole,
)
from refusals import refuses
from torch.utils.data import IterableDataset

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    Mixing,
    ODBDataLoader,
    ParallelProcessor,
    RankAligner,
    ShardedSampler,
    StateError,
    StatefulNode,
    TokenBudget,
    WindowBucketer,
    WorkerOptions,
    reshard,
)
from odb_nodes.core.contract import NodeState, SourceState
from odb_nodes.core.contract.state import add_digest, seal_whole, unseal_whole
from odb_nodes.core.loader.reshard_nodes import dealt_by_tokens

pytestmark = pytest.mark.filterwarnings(*LEFT_OUT, ENDED_EARLY)


@pytest.mark.parametrize("step", [0, 3, -1])
def test_as_many_ranks_as_before_get_their_states_as_they_are(step):
    states = states_at(whole(3), step)
    new_states = reshard(states[::-1], 3)
    assert new_states == states
    assert all(new_state is not state for new_state, state in zip(new_states, states, strict=True))


def test_groups_are_under_a_budget_that_is_lowered_at_once():
    states = resharded(job(3, steps=5), -1, 2)

    def run(exchange):
        loader = make(exchange, token_budget=TokenBudget(50, oversize="drop"))
        loader.load_state_dict(states[exchange.rank], change_budget=True)
        return [batch["input_ids"].numel() for batch in loader]

    assert max(max(sizes) for sizes in on_ranks(2, run)) <= 50


def sample_lengths():
    """The tokens of each sample; 1 for a skipped one."""
    items = map(sample, range(SAMPLES))
    return [len(item["input_ids"]) if isinstance(item, dict) else 1 for item in items]


@pytest.mark.parametrize("ranks", [(2, 3, 1), (3, 2, 2), (1, 2, 3)])
@pytest.mark.parametrize("lie", [0, 6])
def test_epochs_that_are_planned_ahead_have_each_sample_once_on_other_ranks(ranks, lie):
    lengths = sample_lengths()
    known_lengths = [
        max(1, length - lie * (index % 5 == 0)) for index, length in enumerate(lengths)
    ]
    trained, states = [], None
    for world_size, following in pairwise(ranks):
        part = job(world_size, states, steps=4, lengths=known_lengths)
        states = resharded(part, -1, following)
        trained += ids_of(part)[0]
    last_part = job(ranks[-1], states, epochs=2, lengths=known_lengths)
    trained += ids_of(last_part)[0]
    assert sorted(trained) == sorted(2 * trained_on())
    assert len({len(steps) for steps, _ in last_part}) == 1


def planned_state(state):
    """That of the `PlannedGroups` within the state of a loader."""
    while state.get("node") != "PlannedGroups":
        state = next(
            value for value in state.values() if isinstance(value, dict) and "node" in value
        )
    return state


def later_of(states):
    """(number, tokens, patches, whether it was in a group) of the samples that come later."""
    tables = [np.frombuffer(planned_state(state)["later"] or b"", "<i8") for state in states]
    return sorted(tuple(column) for table in tables for column in table.reshape(4, -1).T.tolist())


@pytest.mark.parametrize("ranks", [(2, 3, 1), (3, 1, 2)])
def test_samples_that_come_later_keep_their_lengths_on_other_ranks(ranks):
    """So none of them moves a second time."""
    lengths = sample_lengths()
    known_lengths = [max(1, length - 20 * (index % 5 == 0)) for index, length in enumerate(lengths)]
    budget, states, moved = TokenBudget(80), None, set()
    for world_size, following in pairwise(ranks):
        part = job(world_size, states, steps=4, lengths=known_lengths, token_budget=budget)
        later = later_of(states_at(part, -1))
        assert later and all(tokens == lengths[number] for number, tokens, *_ in later)
        states = resharded(part, -1, following)
        assert later_of(states) == later
        moved |= {number for number, *_ in later}
    last_part = job(ranks[-1], states, lengths=known_lengths, token_budget=budget)
    trained = [number for steps, _ in last_part for _, ids in steps for number in ids]
    assert moved & {*trained}
    ends = [planned_state(state) for state in states_at(last_part, -1)]
    unlike = sum(known != length for known, length in zip(known_lengths, lengths, strict=True))
    assert sum(end["moved"] for end in ends) <= unlike


def test_an_oversize_sample_that_waits_on_other_ranks_is_counted_once():
    options = {"lengths": sample_lengths(), "token_budget": TokenBudget(80)}
    begun = job(3, **options)
    for step in range(0, 16, 3):
        last_part = job(2, resharded(begun, step, 2), **options)
        ends = [planned_state(state) for state in states_at(last_part, -1)]
        assert sum(end["oversize_samples"] for end in ends) == 3


class Stream(IterableDataset):
    """Its samples have no keys that ranks share, and say of which epoch they are."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return ({"input_ids": [1 + index % 9], "id": (self.epoch, index)} for index in range(24))


@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize("after", [1, 3])
def test_a_stream_whose_states_are_from_before_its_first_item_begins_the_next_epoch(sources, after):
    def make(exchange):
        streams = {str(number): Stream() for number in range(sources)}
        data = streams if sources > 1 else Stream()
        options = {"token_budget": 9, "window": 200, "collate_fn": ids_as_tensor}
        return ODBDataLoader(data, process_group=exchange, timeout_s=TIMEOUT_S, **options)

    states = resharded(job(2, make=make), -1, after)
    last_part = job(after, states, make=make, epochs=2)
    expected = [(1, index) for index in range(24)] * sources
    assert sorted(
        tuple(place) for steps, _ in last_part for _, ids in steps for place in ids
    ) == sorted(expected)


def ids_as_tensor(samples):
    return {"id": torch.tensor([sample["id"] for sample in samples])}


def test_where_ranks_end_with_the_first_it_goes_on_until_the_last_round():
    begun = job(3, uneven="stop")
    places = range(min(len(steps) for steps, _ in begun))
    refused = []
    for step in places:
        try:
            resharded(begun, step, 2)
        except StateError as error:
            assert "last round" in str(error)
            refused.append(step)
    assert refused == [*places][len(places) - len(refused) :] and len(refused) < 10


def test_samples_are_dealt_to_as_many_and_as_long():
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 1000, (1000,), generator=rng).numpy()
    for ranks in (1, 3, 7):
        owners = dealt_by_tokens(tokens, ranks)
        shares = [tokens[owners == rank] for rank in range(ranks)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert max(share.sum() for share in shares) - min(share.sum() for share in shares) <= 1000


# --- states that cannot be resharded, and values beside the states of loaders --------------------


def states(world_size=2, **options):
    """The state of each rank after two steps."""
    return states_at(job(world_size, steps=2, **options) if options else whole(world_size), 2)


def from_(first):
    """Return a loader of other data, whose function has the same name."""

    def make_from(exchange, **options):
        def shifted(index):
            return sample(first + index)

        return make(exchange, process_fn=shifted, **options)

    return states(make=make_from)


def without_aligner():
    groups = WindowBucketer(LengthObserver(ShardedSampler(9, rank=0, world_size=1), len), 9)
    return [Loader(GroupCollator(groups)).state_dict()]


@dataclass(kw_only=True)
class PassedState(NodeState):
    source: SourceState


class Passed(StatefulNode):
    """A node of a user's own, which passes samples on."""

    STATE = PassedState

    def __init__(self, source):
        super().__init__()
        self.source = source

    def next(self):
        return next(self.source)


def over_a_node_of_ones_own(exchange):
    place = (exchange.rank, exchange.world_size)
    samples = ParallelProcessor(ShardedSampler(99, True, 0, *place), sample, seed=0)
    pool = WindowBucketer(Passed(LengthObserver(samples)), 256, 16)
    return Loader(GroupCollator(RankAligner(pool, exchange)))


def nested():
    deep = 1
    for _ in range(2000):
        deep = {"a": deep}
    return [{"loader": state, "deep": deep} for state in states()]


def paired(first, second):
    return [{"a": a, "b": b} for a, b in zip(first, second, strict=True)]


REFUSALS = [
    (lambda: states(4)[::2], r"ranks \[1, 3\] are missing"),
    (lambda: [*states(), states_at(whole(2), 3)[0]], r"are of ranks \[0, 0, 1\]"),
    (lambda: [*states(4)[:3], states()[0]], r"of jobs of \[2, 4\] ranks"),
    (lambda: [{"step": 3}], "must hold the states of loaders"),
    (lambda: states(sharded=True), "each rank has different data"),
    (lambda: states(make=over_a_node_of_ones_own), "`Passed` cannot be resharded .*`process_fn`"),
    (lambda: states(state="payload"), 'saved with `state="payload"`'),
    (lambda: [states()[0], states_at(whole(2), 3)[1]], "`step` is 2 on rank 0, but 3 on rank 1"),
    (lambda: [states()[0], states(window=8)[1]], "different graphs: `WindowBucketer`"),
    (lambda: [from_(0)[0], from_(1)[1]], "different steps: `totals_digest`"),
    (lambda: [states()[0], states(exclude=[7, 8, 90, 229])[1]], "different steps: `excluded`"),
    (lambda: paired(states(3), states(3)[::-1]), "rank 0 has the state of a loader of rank 2"),
    (lambda: paired(states(), states(1) * 2), "only 1 ranks read different data"),
    (lambda: [states()[0], states()[1] | {"num_yielded": 1}], "digest"),
    (nested, "nested too deeply"),
    (without_aligner, "must be a `RankAligner`"),
]


test_states_that_are_not_those_of_all_ranks_of_a_run_are_refused = refuses(
    REFUSALS, lambda make: reshard(make(), 5), StateError
)


def test_an_empty_list_of_states_is_refused():
    with pytest.raises(ValueError, match="`states` must have the state of each rank"):
        reshard([], 2)


def ranks_in(state):
    """The configurations in a state that say which rank it is of."""
    for key, value in state.items():
        if key == "config" and "world_size" in value:
            yield value
        elif isinstance(value, dict):
            yield from ranks_in(value)


@pytest.mark.parametrize("options", [{}, {"virtual_ranks": 4}], ids=["ranks", "virtual"])
def test_a_damaged_rank_or_number_of_ranks_is_refused(options):
    first, second = states(**options)
    names = ("rank", "world_size")
    places = [
        (n, name) for n, config in enumerate(ranks_in(second)) for name in config if name in names
    ]
    for (place, name), value in product(places, (None, [], 1.5, 10**30)):
        damaged = copy.deepcopy(second)
        [*ranks_in(damaged)][place][name] = value
        with pytest.raises(StateError, match="digest"):
            reshard([first, damaged], 1)
        if place == 0:  # which says whose the state is, also where its digest was made again
            del damaged["digest"]
            with pytest.raises(StateError):
                reshard([first, add_digest(damaged)], 1)


# --- what is beside the loader --------------------------------------------------------------------


def beside(*data):
    return [{"loader": state, **values} for state, values in zip(states(), data, strict=True)]


def test_what_is_beside_the_loader_must_be_equal_on_all_ranks():
    nan, ones = torch.tensor([1, float("nan")]), torch.ones(3)
    new_states = reshard(beside(*[{"ema": ones, "at": nan, "best": float("nan")}] * 2), 3)
    assert [state["loader"] for state in new_states] == reshard(states(), 3)
    assert all(state["ema"].equal(ones) and state["at"] is nan for state in new_states)
    assert len(reshard(beside({"at": nan}, {"at": nan.clone()}), 3)) == 3
    for other in (torch.zeros(3), torch.tensor([1, 2.0])):
        with pytest.raises(StateError, match=r"`state\['at'\]` must be equal on all ranks"):
            reshard(beside({"at": nan}, {"at": other}), 3)


@dataclass(kw_only=True)
class RunState(NodeState):
    """The state of a run that a trainer saves."""

    samples: int
    loader: dict


def test_what_holds_a_loader_must_be_whole():
    runs = [seal_whole("Run", RunState(samples=9, loader=state)) for state in states()]
    new_runs = reshard(runs, 3)
    assert [unseal_whole(state, "Run", RunState).loader for state in new_runs] == reshard(
        states(), 3
    )
    with pytest.raises(StateError, match="of Run in `state` is damaged: its digest"):
        reshard([{**state, "samples": 8} for state in runs], 3)


# --- mixtures continue on another number of ranks, with their shares -----------------------------


def text(index):
    return {"input_ids": [1] * random.Random(index).randint(2, 40), "id": index}


EQUAL = {"a": 1, "b": 1, "c": 1}


def mixed(sizes=(120, 40, 61), **mixing):
    """Return a function that makes a loader of sources of these sizes."""

    def make(exchange, **options):
        datasets = {name: range(size) for name, size in zip("abc", sizes, strict=False)}
        keywords = {"token_budget": 90, "window": 12, "round_size": 8, "timeout_s": TIMEOUT_S}
        keywords |= {"weights": Mixing(**mixing), "process_fn": text}
        keywords |= {"workers": WorkerOptions(chunk_size=5)}
        return ODBDataLoader(datasets, process_group=exchange, **keywords | options)

    return make


def of_node(states, node, field):
    """The field of the first node of that name in each state."""

    def find(state):
        if isinstance(state, dict):
            if state.get("node") == node:
                return state
            return next(filter(None, map(find, state.values())), None)
        return None

    return [find(state)[field] for state in states]


@pytest.mark.parametrize("by", ["samples", "tokens"])
def test_shares_go_on(by):
    make = mixed(by=by, stop="cycle", weights={"a": 4, "b": 1, "c": 2})
    begun = job(4, make=make, steps=3)
    states = resharded(begun, -1, 2)
    counted = [Counter(counter) for counter in of_node(states, "SourceMixer", by)]
    for counter in counted:
        assert counter["a"] / counter.total() == pytest.approx(4 / 7, abs=0.06)
    if by == "samples":  # those behind the state of the mixture, too
        pulled = of_node(states_at(begun, -1), "WindowBucketer", "pulled")
        assert sum(counted, Counter()).total() == sum(pulled)
    else:
        before = of_node(states_at(begun, -1), "SourceMixer", by)
        assert sum(counted, Counter()) == sum(map(Counter, before), Counter())


@pytest.mark.parametrize("stop", ["cycle", "first_exhausted"])
def test_a_rank_may_have_nothing_left_of_a_source_that_others_had(stop):
    make = mixed((400, 4), weights={"a": 30, "b": 1}, stop=stop)
    begun = job(1, make=make, steps=20)
    for step in (1, 19):
        states = resharded(begun, step, 4)
        counts_of_b = [counts["b"] for counts in of_node(states, "SourceMixer", "samples")]
        assert 0 in counts_of_b and any(counts_of_b)
        assert all(len(steps) == 5 for steps, _ in job(4, states, make=make, steps=5))


def test_sources_that_began_again_on_some_ranks_alone_are_refused():
    begun = job(3, make=mixed(stop="cycle"))
    outcomes = []
    for step in range(0, len(begun[0][1]), 2):
        try:
            outcomes.append(bool(resharded(begun, step, 2)))
        except StateError as error:
            assert "begun again" in str(error)
            outcomes.append(False)
    assert outcomes[:3] == [True] * 3 and False in outcomes


def test_ranks_that_have_set_different_weights_are_not_resharded():
    def run(exchange):
        loader = mixed(weights=EQUAL)(exchange)
        next(iter(loader))
        loader.set_weights({**EQUAL, "a": 1 + exchange.rank})
        return loader.state_dict()

    with pytest.raises(StateError, match="`next_weights`"):
        reshard(on_ranks(2, run), 1)
