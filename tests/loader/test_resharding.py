"""A run goes on with another number of ranks: each sample of the epoch once, with exact losses."""

import itertools

import pytest
import torch
from aligned_ranks import TIMEOUT_S, on_ranks
from elastic import (
    SAMPLES,
    augmented,
    ids_of,
    infos,
    job,
    make,
    resharded,
    sample,
    states_at,
    tokens_of,
    whole,
)
from gradients import LanguageModel, gradient_of, mean_loss, relative_error

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    PaddingCollate,
    ParallelProcessor,
    RankAligner,
    ShardedSampler,
    StateError,
    TokenBudget,
    WindowBucketer,
    reshard,
)
from odb_nodes.loader.resharding.pools import dealt_by_tokens

RANKS = (1, 2, 3, 4, 8)
PAIRS = [pair for pair in itertools.product(RANKS, RANKS) if pair[0] != pair[1]]

pytestmark = pytest.mark.filterwarnings("ignore")


def steps_of(ranks, sampled, every=5):
    """The steps at which to reshard: with `--exhaustive` all of them."""
    places = range(len(ranks[0][1]))
    return [*places[:: sampled(every=every).get("every", 1)]]


def check_once(parts, counts):
    """Check that the steps of the runs of an epoch have each sample once."""
    trained = sorted(index for part in parts for index in ids_of(part)[0])
    left = sorted(index for part in parts for index in ids_of(part)[1])
    assert (trained, left) == ids_of(whole(1))
    assert sorted(trained + left) == [*range(SAMPLES)]
    every = [of_rank for *_, of_rank in counts]
    assert sum(skipped.get("thirty-first", 0) for skipped, *_ in every) == 4
    assert sum(skipped.get("other", 0) for skipped, *_ in every) == 4
    assert sum(dropped for _, dropped, *_ in every) == 3
    assert sum(excluded for _, _, excluded, *_ in every) == 3
    assert sum(total for *_, total in every) == SAMPLES
    assert sum(done for *_, done, _ in every) == len(trained)


def first_steps(ranks, steps):
    return [(found[:steps], saved, counts) for found, saved, counts in ranks]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_each_sample_comes_once(before, after, sampled):
    begun = whole(before)
    for step in steps_of(begun, sampled, 13):
        rest = job(after, resharded(begun, step, after))
        check_once([first_steps(begun, step), rest], rest)
        assert len({len(found) for found, *_ in rest}) == 1
        assert all(
            info.step == step + at for found, *_ in rest for at, (info, _) in enumerate(found)
        )


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 4)])
def test_with_a_window_that_ranks_choose(before, after, sampled):
    begun = job(before, window="auto")
    for step in steps_of(begun, sampled, 7):
        rest = job(after, resharded(begun, step, after), window="auto")
        check_once([first_steps(begun, step), rest], rest)
        later = len(rest[0][0]) // 2
        resumed = job(after, states_at(rest, later), window="auto")
        assert infos(resumed) == [found[later:] for found, *_ in rest]


@pytest.mark.parametrize("chain", [(8, 6, 8, 3), (1, 4, 2), (3, 1, 8), (2, 3, 2)])
def test_in_chains(chain, sampled):
    for first, steps in (
        [(2, 2), (3, 1)] if sampled(a=1) else itertools.product(range(6), (0, 1, 2))
    ):
        parts = [job(chain[0], steps=first)]
        for world_size in chain[1:]:
            last = world_size == chain[-1] and len(parts) == len(chain) - 1
            states = resharded(parts[-1], -1, world_size)
            parts.append(job(world_size, states, steps=None if last else steps))
        check_once(parts, parts[-1])


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 2)])
def test_afterwards_a_resume_is_a_plain_one_at_every_step(before, after, sampled):
    begun = whole(before)
    for step in steps_of(begun, sampled, 13):
        rest = job(after, resharded(begun, step, after))
        for later in steps_of(rest, sampled, 5):
            resumed = job(after, states_at(rest, later))
            assert infos(resumed) == [found[later:] for found, *_ in rest]
            assert [counts for *_, counts in resumed] == [counts for *_, counts in rest]


@pytest.mark.parametrize("world_size", [1, 3])
def test_as_many_ranks_as_before_get_their_states_as_they_are(world_size):
    for step in (0, 3, len(whole(world_size)[0][0])):
        states = states_at(whole(world_size), step)
        found = reshard(states[::-1], world_size)
        assert found == states
        assert all(one is not state for one, state in zip(found, states, strict=True))


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2)])
def test_later_epochs_are_those_of_a_run_of_as_many_ranks(before, after):
    expected = infos(job(after, epochs=2))
    for step in (2, len(whole(before)[0][0])):
        rest = job(after, resharded(whole(before), step, after), epochs=2)
        second = [[one for one in found if one[0].epoch == 1] for found, *_ in rest]
        assert second == [[one for one in found if one[0].epoch == 1] for found in expected]


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4)])
def test_between_optimizer_steps_alone(before, after, sampled):
    begun = job(before, accumulate=3)
    within = [not info.ends_optimizer_step for info, _ in begun[0][0]]
    assert any(within) and not all(within)
    for step in steps_of(begun, sampled, 1):
        if step and not begun[0][0][step - 1][0].ends_optimizer_step:
            with pytest.raises(
                StateError, match=rf"at step {step} of epoch 0, within an optimizer"
            ):
                resharded(begun, step, after)
        else:
            rest = job(after, resharded(begun, step, after), accumulate=3)
            check_once([first_steps(begun, step), rest], rest)


def test_samples_are_the_same_on_other_ranks():
    seen = {}

    def watched(exchange, **options):
        def collate(samples):
            for one in samples:
                seen.setdefault(one["id"], set()).add(tuple(one["input_ids"]))
            return {"id": torch.tensor([one["id"] for one in samples])}

        return make(exchange, process_fn=augmented, collate_fn=collate, **options)

    begun = job(3, make=watched)
    for world_size in (1, 2, 4):
        job(world_size, resharded(begun, 2, world_size), make=watched)
    assert len(seen) == SAMPLES - 3
    assert all(len(contents) == 1 for contents in seen.values())


@pytest.mark.parametrize(("before", "after", "accumulate"), [(2, 3, 1), (4, 1, 2), (3, 4, 2)])
def test_the_gradient_is_that_of_one_process(before, after, accumulate):
    options = {"process_fn": tokens_of, "accumulate": accumulate, "exclude": None}
    begun = job(before, steps=2 * accumulate, **options)
    rest = job(after, resharded(begun, -1, after), **options)
    assert {index for part in (begun, rest) for index in ids_of(part)[0]} == {*range(SAMPLES)}
    model = LanguageModel()
    steps = zip(*(found for found, *_ in rest), strict=True)
    ids = []
    model.zero_grad()
    for of_ranks in steps:
        for info, own in of_ranks:
            if own:
                loss = mean_loss(model, PaddingCollate()([tokens_of(index) for index in own]))
                (loss * info.loss_scale / after).backward()
            ids += own
        if of_ranks[0][0].ends_optimizer_step:
            found = gradient_of(model)
            model.zero_grad()
            mean_loss(model, PaddingCollate()([tokens_of(index) for index in ids])).backward()
            assert relative_error(found, gradient_of(model)) < 1e-12
            assert of_ranks[0][0].optimizer_samples == len(ids)
            ids = []
            model.zero_grad()
    assert not ids


@pytest.mark.parametrize(
    "options",
    [
        {"token_budget": TokenBudget(80, layout="packed", oversize="drop")},
        {"round_size": 2, "window": 4},
        {"dearest_first": 2},
        {"shuffle": False},
    ],
    ids=["packed", "small", "dearest", "in order"],
)
def test_however_groups_are_formed(options):
    begun = job(4, **options)
    for step in range(0, len(begun[0][1]), 5):
        rest = job(3, resharded(begun, step, 3), **options)
        check_once([first_steps(begun, step), rest], rest)


def test_samples_that_are_excluded_later_are_counted_once():
    begun = job(3, steps=4)
    rest = job(2, resharded(begun, -1, 2), exclude=[7, 8, 90, *range(100, 110)])
    trained, left = ids_of([*begun, *rest])
    assert sorted(trained + left) == [*range(SAMPLES)]
    assert {*range(100, 110)} - {*ids_of(begun)[0]} <= {*left}


@pytest.mark.parametrize("steps", [0, 1, 15])
def test_groups_are_under_a_budget_that_is_lowered_at_once(steps):
    begun = job(3, steps=max(steps, 1))
    states = resharded(begun, steps, 2)

    def run(exchange):
        loader = make(exchange, token_budget=TokenBudget(50, oversize="drop"))
        loader.load_state_dict(states[exchange.rank], change_budget=True)
        return [batch["input_ids"].numel() for batch in loader]

    assert max(max(sizes) for sizes in on_ranks(2, run)) <= 50


def test_of_composed_nodes():
    def composed(exchange, **_):
        rank, ranks = exchange.rank, exchange.world_size
        indices = ShardedSampler(SAMPLES, seed=3, rank=rank, world_size=ranks)
        texts = ParallelProcessor(indices, sample, rank=rank, world_size=ranks)
        groups = WindowBucketer(LengthObserver(texts), TokenBudget(80, oversize="drop"), 16)
        aligned = RankAligner(groups, exchange, 8, timeout_s=TIMEOUT_S)
        return _Counts(Loader(GroupCollator(aligned, rank=rank)), groups)

    begun = job(3, make=composed)
    for step in range(0, len(begun[0][1]), 4):
        rest = job(2, resharded(begun, step, 2), make=composed)
        trained = sorted(ids_of(first_steps(begun, step))[0] + ids_of(rest)[0])
        assert trained == ids_of(begun)[0]
        assert len(trained) == SAMPLES - 8 - 3


class _Counts:
    """A `Loader` with the counts of an `ODBDataLoader`."""

    samples_done = num_samples = 0

    def __init__(self, loader, groups):
        self._loader, self._groups = loader, groups

    def __iter__(self):
        return iter(self._loader)

    def __getattr__(self, name):
        return getattr(self._groups if name.endswith("_samples") else self._loader, name)


def test_uneven_stop_ends_with_the_first_rank_and_counts_the_rest():
    begun = job(3, uneven="stop")
    refused = 0
    for step in range(len(begun[0][1])):
        try:
            states = resharded(begun, step, 2)
        except StateError as error:
            assert "last round" in str(error)
            refused += 1
            continue
        rest = job(2, states, uneven="stop")
        trained, left = ids_of([*first_steps(begun, step), *rest])
        assert len({*trained, *left}) == len(trained + left)
        assert not rest or len(trained) > SAMPLES // 2
    assert 0 < refused < 10


def test_uneven_join_goes_on_as_long_as_no_rank_has_ended():
    begun = job(3, uneven="join")
    shortest = min(len(found) for found, *_ in begun)
    for step in range(0, shortest, 2):
        ended = any(saved[step]["root"]["source"]["last"] for _, saved, _ in begun)
        if ended:
            with pytest.raises(StateError, match="once a rank has ended"):
                resharded(begun, step, 2)
            break
        rest = job(2, resharded(begun, step, 2), uneven="join")
        check_once([first_steps(begun, step), rest], rest)


def test_samples_are_dealt_to_as_many_and_as_long():
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 1000, (1000,), generator=rng).numpy()
    for ranks in (1, 3, 7):
        owners = dealt_by_tokens(tokens, ranks)
        shares = [tokens[owners == rank] for rank in range(ranks)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert max(one.sum() for one in shares) - min(one.sum() for one in shares) <= 1000
