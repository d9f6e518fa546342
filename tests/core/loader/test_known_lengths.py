"""Loaders that plan whole epochs, since the lengths of their samples are known."""

import logging
import os
import random
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from aligned_ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from ledgers import check_ledger
from refusals import refuses
from sampling import fewer
from toys import Stream

from odb_nodes import (
    JsonlSource,
    Ledger,
    Observation,
    ODBDataLoader,
    PackedCollate,
    PeerError,
    SampleError,
    ShardedSampler,
    Skipped,
    SourceItem,
    StateError,
    TokenBudget,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.core.nodes.planned_groups import PlannedGroups
from odb_nodes.core.sample import data_of
from odb_nodes.testing import assert_resumes_exactly

SIZE, BUDGET = 60, 120
LENGTHS = np.random.default_rng(4).integers(2, 50, SIZE).tolist()


class Rows:
    """Texts of some lengths; a third of the labels is masked."""

    def __init__(self, lengths=LENGTHS):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, row):
        length = self.lengths[row]
        labels = [-100 if (row + place) % 3 == 0 else place for place in range(length)]
        return {"input_ids": [row + 1] * length, "labels": labels, "id": row}


class Frame(Rows):
    """Has rows by number, but looks like a table of pandas."""

    __module__ = "pandas.core.frame"


def add_noise(sample):
    return {**sample, "noise": random.random()}


def skip_some(sample):
    return Skipped("seventh", "of seven.") if sample["id"] % 7 == 3 else sample


def loader_of(dataset=None, lengths=LENGTHS, **options):
    dataset = Rows() if dataset is None else dataset
    return ODBDataLoader(dataset, **{"token_budget": BUDGET, "lengths": lengths, **options})


def is_planned(loader):
    return all(isinstance(graph.bucketer, PlannedGroups) for graph in loader._graphs)


def ids(loader):
    return [batch["id"].tolist() for batch in loader]


def plain(batch):
    """A batch as plain data, with what is said of its step."""
    info = pop_step_info(batch)
    return {**{name: value.tolist() for name, value in batch.items()}, "info": str(info)}


def numbers(groups):
    return sorted(sum(groups, []))


# --- when it is done ------------------------------------------------------------------------------


def test_lengths_that_are_given_plan_the_epoch():
    with loader_of() as loader:
        assert is_planned(loader)
        first, second = ids(loader), ids(loader)
    assert numbers(first) == numbers(second) == [*range(SIZE)]
    assert first != second
    with loader_of(lengths=False) as other:
        assert not is_planned(other)
        assert len(ids(other)) >= len(first)
    assert not is_planned(ODBDataLoader(Rows(), token_budget=BUDGET))


def test_hardly_anything_is_padding_in_one_epoch_of_known_lengths():
    lengths = np.random.default_rng(0).integers(2, 50, 1_000).tolist()
    loader = loader_of(Rows(lengths), lengths, token_budget=512)
    infos = [*map(pop_step_info, loader)]
    tokens = [sum(column) for column in zip(*map(_tokens, infos), strict=True)]
    assert 1 - tokens[0] / tokens[1] < 0.03


def _tokens(info):
    return info.local_tokens, info.local_padded_tokens


test_what_does_not_go_with_known_lengths_is_refused_by_name = refuses(
    [
        ({"dataset": {"a": Rows()}}, "given for a dict of datasets"),
        ({"dataset": Stream([{"input_ids": [1]}])}, "given for a dataset without a length"),
        ({"dataset": ShardedSampler(SIZE, rank=0, world_size=1)}, "for a dataset without a"),
        ({"sampler": [2, 1]}, "given with a `sampler`"),
        ({"sharded": True}, "given with `sharded=True`"),
        ({"diversity": 0.1}, "given with `diversity`"),
        ({"state": "payload"}, 'given with `state="payload"`'),
        ({"token_budget": TokenBudget(99, max_patches=9)}, "given with `max_patches`"),
        (
            {"token_budget": TokenBudget(99, shapes=3, row_sizes=2, oversize="drop")},
            "given with a number as `row_sizes`",
        ),
        ({"lengths": LENGTHS[1:]}, "`lengths` must have an integer for each of the 60 rows"),
        ({"lengths": "no such column"}, "`lengths` must name a column or a file"),
        ({"lengths": [0, *LENGTHS[1:]]}, "`lengths` must be in 1"),
        ({"weights": {"a": 1}}, "`weights` must be None"),
    ],
    call=lambda options: loader_of(**options),
    error=ValueError,
)

test_options_are_checked_as_ever = refuses(
    [
        ({"process_fn": 5}, "`process_fn`"),
        ({"process_fn": {"a": add_noise}}, "`process_fn`"),
        ({"observe": 5}, "`observe`"),
        ({"collate_fn": 5}, "`collate_fn`"),
        ({"shuffle": "no"}, "`shuffle`"),
        ({"seed": 0.5}, "`seed`"),
        ({"dataset": Frame()}, "`dataset` must be a dataset"),
    ],
    call=lambda options: loader_of(**options),
    error=TypeError,
)


def test_excluded_keys_of_a_source_that_is_not_there_are_warned_of():
    with pytest.warns(UserWarning, match="`exclude` has keys of source 'text'"):
        loader_of(exclude={"text": [1]})


@pytest.mark.slow
def test_a_table_of_tokens_is_planned_by_itself(tmp_path, caplog):
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [row] * length, "id": row} for row, length in enumerate(LENGTHS)]
    table = datasets.Dataset.from_list(rows)
    with caplog.at_level(logging.INFO, "odb_nodes"):
        loader = ODBDataLoader(table, token_budget=BUDGET)
    assert is_planned(loader)
    assert "list offsets of the column 'input_ids'" in caplog.text
    assert numbers(ids(loader)) == [*range(SIZE)]
    given = loader_of(rows)
    given.set_epoch(0), loader.set_epoch(0)
    assert ids(loader) == ids(given)
    for options in (
        {"lengths": False},
        {"process_fn": add_noise},
        {"observe": lambda sample: len(sample["input_ids"])},
        {"sampler": [3, 4]},
        {"diversity": 0.1},
        {"state": "payload"},
        {"sharded": True},
    ):
        assert not is_planned(ODBDataLoader(table, token_budget=BUDGET, **options)), options
    assert not is_planned(ODBDataLoader({"a": table}, token_budget=BUDGET))
    named = ODBDataLoader(
        table.add_column("n_tokens", LENGTHS), token_budget=BUDGET, lengths="n_tokens"
    )
    assert ids(named) == ids(loader_of(rows))
    # A file of JSON Lines has no lengths that are known.
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [1]}\n')
    assert not is_planned(ODBDataLoader(JsonlSource(str(path)), token_budget=BUDGET))


# --- what options do ------------------------------------------------------------------------------


def test_a_window_says_how_many_samples_are_planned_together():
    groups = ids(loader_of(window=10, shuffle=False))
    assert numbers(groups) == [*range(SIZE)]
    windows = [{number // 10 for number in group} for group in groups]
    assert all(len(window) == 1 for window in windows)
    assert [*map(min, windows)] == sorted(map(min, windows))
    assert groups != ids(loader_of(shuffle=False))


def test_without_a_shuffle_a_window_of_2048_keeps_the_order():
    lengths = np.random.default_rng(0).integers(2, 50, 2_200).tolist()
    groups = ids(loader_of(Rows(lengths), lengths, shuffle=False, token_budget=512))
    windows = [{number // 2048 for number in group} for group in groups]
    assert all(len(window) == 1 for window in windows)
    assert [*map(min, windows)] == sorted(map(min, windows))
    assert {number for window in windows for number in window} == {0, 1}
    # With a shuffle, all of the epoch are planned together.
    mixed = ids(loader_of(Rows(lengths), lengths, token_budget=512))
    assert len(mixed) < len(groups)


@pytest.mark.parametrize(
    "budget",
    [
        TokenBudget(BUDGET, layout="packed"),
        TokenBudget(BUDGET, max_samples=3),
        TokenBudget(128, shapes=4),
        TokenBudget(BUDGET, row_sizes="even"),
        TokenBudget(400, attention_tokens=50),
        TokenBudget(128, pad_to_multiple_of=16),
    ],
)
def test_batches_keep_to_any_budget(budget):
    loader, seen = loader_of(token_budget=budget), []
    for batch in loader:
        info = pop_step_info(batch)
        seen += info.keys
        lengths = [LENGTHS[key] for key in info.keys]
        assert budget.cost(lengths) <= budget.tokens
        assert budget.max_samples is None or len(lengths) <= budget.max_samples
        assert tuple(batch["input_ids"].shape) == budget.shape(lengths)
    assert sorted(seen) == [*range(SIZE)]


def test_accumulation_and_largest_first_are_kept():
    infos = [*map(pop_step_info, loader_of(accumulate=4, largest_first=4))]
    assert [info.micro_step for info in infos[:5]] == [0, 1, 2, 3, 0]
    longest = [max(LENGTHS[key] for key in info.keys) for info in infos]
    assert max(longest[:4]) == max(LENGTHS)
    by_optimizer_step = {}
    for info in infos:
        key = info.step // 4
        by_optimizer_step.setdefault(key, []).append(info)
    for steps in by_optimizer_step.values():
        targets = sum(info.local_targets for info in steps)
        assert {info.optimizer_targets for info in steps} == {targets}


def test_it_says_how_far_it_is():
    loader = loader_of()
    assert loader.num_samples == SIZE
    assert (loader.epoch, loader.step, loader.samples_done) == (0, 0, 0)
    done = 0
    for step, batch in enumerate(loader, 1):
        done += len(batch["id"])
        assert (loader.epoch, loader.step, loader.samples_done) == (0, step, done)
        assert repr(loader).endswith(f"epoch 0, step {step}: {done} of {SIZE} samples done)")
    assert done == SIZE
    assert repr(loader).startswith("ODBDataLoader(Rows, TokenBudget(tokens=120")
    assert loader.replayed_samples == 0
    with pytest.raises(TypeError, match="samples"):
        len(loader)


@pytest.mark.parametrize("options", [{}, {"process_fn": skip_some}, {"exclude": [3, 10, 11]}])
def test_the_ledger_has_one_fate_for_each_sample(options, tmp_path):
    with warnings.catch_warnings(), Ledger(tmp_path, rank=0, world_size=1) as ledger:
        warnings.simplefilter("ignore")
        loader = loader_of(**options)
        for _ in range(2):
            for batch in loader:
                ledger.record(pop_step_info(batch))
    found = check_ledger(tmp_path, SIZE)
    assert found.ok


@pytest.mark.parametrize("collate_fn", [None, lambda samples: {"id": [s["id"] for s in samples]}])
def test_samples_of_a_batch_are_made_again_only_if_somebody_loads_them(collate_fn):
    calls = []

    def process(sample):
        calls.append(sample["id"])
        return add_noise(sample)

    loader = loader_of(process_fn=process, collate_fn=collate_fn)
    collator = loader.root
    collator.keep_samples()
    batches = []
    for batch in loader:
        info = pop_step_info(batch)
        batches.append((batch, info, collator.take_samples(info)))
    assert sorted(calls) == [*range(SIZE)]
    for batch, info, samples in batches:
        assert [sample.key for sample in samples] == [*info.keys]
        assert [sample.tokens for sample in samples] == [LENGTHS[key] for key in info.keys]
        if collate_fn is None:
            again = collator.collate(samples, info)
            assert again["noise"].tolist() == batch["noise"].tolist()
            assert torch.equal(again["input_ids"], batch["input_ids"])
        parts = [
            collator.collate(samples[:1], info, 1)["id"],
            collator.collate(samples, info)["id"],
        ]
        assert [next(iter(part)) for part in parts] == [info.keys[0]] * 2
        assert [data_of(sample)["id"] for sample in samples] == [*info.keys]
    assert len(calls) == 2 * SIZE
    with pytest.raises(Exception, match="not kept"):
        collator.take_samples(info)


def test_the_trainer_may_make_the_batches():
    assert ids(loader_of(collate_in="main")) == ids(loader_of(collate_in="workers"))


@pytest.mark.parametrize("method", ["process", "thread"])
def test_the_trainer_makes_batches_that_workers_cannot_make(method):
    """A process that is not forked, and a thread that shares the generators with the trainer."""
    start_method = "spawn" if method == "process" else None
    workers = WorkerOptions(num_workers=1, method=method, start_method=start_method)
    options = {"collate_fn": lambda samples: {"id": [one["id"] for one in samples]}}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loader = loader_of(workers=workers, collate_in="workers", **options)
        loader_of(workers=workers, **options)
    why = "cannot be pickled" if method == "process" else "may draw random numbers"
    assert [why in str(one.message) for one in told] == [True]
    assert loader._graphs[0].bucketer.why_not_collated


def draws_nothing(samples):
    return {"id": [one["id"] for one in samples]}


draws_nothing.draws_random_numbers = False


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"collate_fn": draws_nothing},
        {"collate_fn": draws_nothing, "workers": WorkerOptions(num_workers=1, method="thread")},
        {"workers": WorkerOptions(num_workers=1, start_method="spawn")},
    ],
)
def test_workers_make_batches_wherever_they_can(options):
    assert not loader_of(collate_in="workers", **options)._graphs[0].bucketer.why_not_collated


def test_samples_with_keys_of_their_own_are_excluded_by_these():
    def observe(sample):
        return Observation(len(sample["input_ids"]), key=1000 + sample["id"])

    for exclude, gone in ([17], []), ([1017], [17]):
        found = numbers(ids(loader_of(observe=observe, exclude=exclude)))
        assert found == [row for row in range(SIZE) if row not in gone]


def with_source(sample):
    return SourceItem("web", sample)


def test_samples_that_processing_names_are_excluded_by_these_names_or_refused():
    """A row that is excluded is not read, so nobody would know its other name."""
    assert numbers(ids(loader_of(process_fn=with_source))) == [*range(SIZE)]
    with pytest.raises(SampleError, match=r"`process_fn` must not give .* \(source 'web', key"):
        ids(loader_of(process_fn=with_source, exclude=[17]))

    def declared(sample):
        return with_source(sample)

    declared.gives_keys = True
    for exclude, gone in ([17], []), ({"web": [17]}, [17]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a source that the loader does not know
            found = numbers(ids(loader_of(process_fn=declared, exclude=exclude)))
        assert found == [row for row in range(SIZE) if row not in gone]


def test_packed_samples_are_planned_with_what_fills_them_up():
    budget = TokenBudget(BUDGET, layout="packed")
    collate = PackedCollate(sample_multiple=16)
    loader = loader_of(token_budget=budget, collate_fn=collate)
    for _ in loader:
        pass
    assert loader._graphs[0].bucketer.save().moved == 0


CHANGES = {
    "lengths": {"lengths": [1, *LENGTHS[1:]]},
    "window": {"window": 9},
    "shuffle": {"shuffle": False},
    "seed": {"seed": 3},
    "largest_first": {"largest_first": 2},
    "budget.layout": {"token_budget": TokenBudget(BUDGET, layout="packed")},
    "budget.shapes": {"token_budget": TokenBudget(BUDGET, shapes=4)},
    "budget.row_sizes": {"token_budget": TokenBudget(BUDGET, row_sizes="even")},
    "budget.pad_to_multiple_of": {"token_budget": TokenBudget(BUDGET, pad_to_multiple_of=8)},
    "budget.attention_tokens": {"token_budget": TokenBudget(BUDGET, attention_tokens=900)},
}


@cache
def states_of_an_epoch():
    """States after the first step, and after the last one."""
    loader = loader_of()
    next(batches := iter(loader))
    middle = loader.state_dict()
    for _ in batches:
        pass
    return middle, loader.state_dict()


@pytest.mark.filterwarnings("ignore:.*(strict|differ|changed|another).*")
@pytest.mark.parametrize("field", CHANGES)
def test_what_a_plan_depends_on_may_not_change_within_an_epoch_whatever_is_asked(field):
    middle, end = states_of_an_epoch()
    other = loader_of(**CHANGES[field])
    other.load_state_dict(middle, strict=False)
    with pytest.raises(StateError, match=field):
        next(iter(other))
    other = loader_of(**CHANGES[field])
    other.load_state_dict(end, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert numbers([[*pop_step_info(batch).keys] for batch in other]) == [*range(SIZE)]


@pytest.mark.parametrize("tokens", [BUDGET // 2, 2 * BUDGET])
def test_another_budget_within_an_epoch_repeats_no_sample(tokens):
    loader = loader_of()
    seen = [key for _, batch in zip(range(4), loader, strict=False) for key in batch["id"].tolist()]
    state = loader.state_dict()
    other = loader_of(token_budget=tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.load_state_dict(state, strict=False)
        rest = ids(other)
        following = ids(other)
    assert sorted([*seen, *sum(rest, [])]) == numbers(following) == [*range(SIZE)]


# --- ranks ----------------------------------------------------------------------------------------


def steps_of_ranks(world_size, **options):
    """What each rank gets in each step: keys, and what is said of all ranks."""

    def run(exchange):
        loader = loader_of(process_group=exchange, timeout_s=20.0, **options)
        infos = [pop_step_info(batch) for batch in loader]
        return [(*info.keys,) for info in infos], [
            (info.all_samples_this_step, info.all_targets, info.optimizer_targets) for info in infos
        ]

    return on_ranks(world_size, run)


@pytest.mark.parametrize("world_size", [2, 8])
def test_ranks_share_the_steps_of_an_epoch(world_size):
    ranks = steps_of_ranks(world_size)
    keys, totals = zip(*ranks, strict=True)
    assert sorted(key for steps in keys for step in steps for key in step) == [*range(SIZE)]
    assert len({*map(len, keys)}) == 1
    assert all(rank == totals[0] for rank in totals)
    for step, (samples, *_) in zip(zip(*keys, strict=True), totals[0], strict=True):
        assert sum(map(len, step)) == samples
        assert all(step)  # No rank fills a step where lengths are what was told.


def test_virtual_ranks_of_one_process_take_the_steps_of_plain_ranks():
    (first, _), (second, _) = steps_of_ranks(2)
    loader = loader_of(virtual_ranks=2)
    assert is_planned(loader) and loader.num_samples == SIZE
    batches = [(*pop_step_info(batch).keys,) for batch in loader]
    plans = {id(graph.bucketer._plan._plan) for graph in loader._graphs}
    assert len(plans) == 1  # which is made once
    assert batches == [keys for step in zip(first, second, strict=True) for keys in step]


def test_ranks_stand_at_the_same_step_after_an_error_of_one():
    def process(sample):
        if sample["id"] == 50:
            raise ValueError("it is damaged.")
        return sample

    def run(exchange):
        loader = loader_of(process_fn=process, process_group=exchange, timeout_s=20.0)
        steps = 0
        with pytest.raises((SampleError, PeerError)):
            for _ in loader:
                steps += 1
        return steps

    assert len({*on_ranks(2, run)}) == 1


def test_lengths_that_one_rank_alone_has_are_an_error_that_names_the_option():
    def run(exchange):
        lengths = LENGTHS if exchange.rank else None
        loader = loader_of(lengths=lengths, process_group=exchange, timeout_s=20.0)
        with pytest.raises(StateError) as caught:
            next(iter(loader))
        return str(caught.value)

    (error,) = {*on_ranks(2, run)}
    difference = '`lengths` is "observed" on rank 0, "known before samples are read" on rank 1'
    assert difference in error
    assert "`PlannedGroups` is absent on rank 0" in error
    assert "`ShardedSampler` is absent on rank 1" in error


@pytest.mark.filterwarnings("ignore:.*(skipped).*")
def test_orders_are_those_of_all_ranks_and_depend_on_their_number():
    whole, shared = steps_of_ranks(1), steps_of_ranks(2)
    assert whole[0][0] != shared[0][0]
    assert numbers([*map(list, whole[0][0])]) == [*range(SIZE)]
    assert steps_of_ranks(2) == shared
    assert steps_of_ranks(2, seed=1) != shared


# --- lengths that lie -----------------------------------------------------------------------------


def check_epoch(loader, lengths, oversize="alone"):
    """Run an epoch and compare all that is said with what the batches hold.

    Returns:
        The samples that were left out.
    """
    budget, seen, left_out, infos = loader.options.budget, [], [], []
    for batch in loader:
        info = pop_step_info(batch)
        keys = batch["id"].tolist()
        assert [*info.keys] == keys
        seen += keys
        left_out += [sample.key for sample in info.left_out]
        real = [lengths[key] for key in keys]
        assert len(keys) == 1 or budget.cost(real) <= budget.tokens
        assert len(keys) <= (budget.max_samples or len(keys))
        assert not any(map(budget.is_oversize, real)) or (len(keys) == 1 and oversize == "alone")
        expected = targets_of(keys, lengths)
        if budget.layout == "padded":
            assert int((batch["labels"][:, 1:] != -100).sum()) == expected
        assert info.local_targets == info.all_targets == info.optimizer_targets == expected
        assert info.local_samples == info.all_samples_this_step == len(keys)
        assert info.local_tokens == sum(real)
        size = batch["input_ids"].numel()
        assert size == info.local_padded_tokens == budget.padded_tokens(real)
        infos.append(info)
    # What the last group left out would come with the next step, of which there is none.
    left_out += {*range(len(lengths))} - {*seen, *left_out}
    assert sorted([*seen, *left_out]) == [*range(len(lengths))]
    assert [info.step for info in infos] == [*range(len(infos))]
    assert infos[-1].ends_epoch
    return left_out


def targets_of(keys, lengths):
    return sum((key + place) % 3 != 0 for key in keys for place in range(1, lengths[key]))


KINDS_OF_LIES = {
    "one in a hundred": lambda lengths, rng: [
        int(rng.integers(1, 60)) if row % 100 == 7 else length for row, length in enumerate(lengths)
    ],
    "all": lambda lengths, rng: rng.integers(1, 60, len(lengths)).tolist(),
    "too short": lambda lengths, rng: [max(1, length // 2) for length in lengths],
    "too long": lambda lengths, rng: [2 * length for length in lengths],
    "of another dataset": lambda lengths, rng: rng.permutation(lengths).tolist(),
    "all one": lambda lengths, rng: [1] * len(lengths),
    "all oversize": lambda lengths, rng: [10_000] * len(lengths),
}


@pytest.mark.filterwarnings("ignore:.*(exceed|skipped|is supervised).*")
@given(
    lie=st.sampled_from([*KINDS_OF_LIES]),
    seed=st.integers(0, 2**16),
    size=st.integers(1, 60),
    longest=st.sampled_from([20, 59, 200]),
    oversize=st.sampled_from(["alone", "drop"]),
    fields=st.sampled_from(
        [
            {},
            {"layout": "packed"},
            {"max_samples": 3},
            {"row_sizes": "friendly"},
            {"shapes": 4},
            {"pad_to_multiple_of": 8},
        ]
    ),
)
@fewer(3)
def test_lies_break_no_budget_and_lose_no_sample(lie, seed, size, longest, oversize, fields):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, size).tolist()
    if oversize == "drop":
        lengths[0] = 5  # one at least is there
    told = KINDS_OF_LIES[lie](lengths, rng)
    budget = TokenBudget(BUDGET, oversize=oversize, **fields)
    loader = loader_of(Rows(lengths), told, token_budget=budget)
    for _ in range(2):
        left_out = check_epoch(loader, lengths, oversize)
        too_long = [row for row, length in enumerate(lengths) if budget.is_oversize(length)]
        assert sorted(left_out) == (too_long if oversize == "drop" else [])
        assert loader.oversize_samples == len(too_long)
        assert loader.dropped_samples == len(left_out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(exceed|skipped|is supervised).*")
@given(
    lie=st.sampled_from([*KINDS_OF_LIES]),
    seed=st.integers(0, 2**16),
    size=st.integers(1, 40),
    longest=st.sampled_from([59, 200]),
    layout=st.sampled_from(["padded", "packed"]),
    accumulate=st.sampled_from([1, 2]),
    round_size=st.sampled_from([1, 4, 32]),
)
@fewer(8)
def test_a_run_with_lies_resumes_exactly_at_each_step(
    lie, seed, size, longest, layout, accumulate, round_size
):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, size).tolist()
    told = KINDS_OF_LIES[lie](lengths, rng)
    budget = TokenBudget(BUDGET, layout=layout)

    def make():
        options = {"token_budget": budget, "accumulate": accumulate, "round_size": round_size}
        return loader_of(Rows(lengths), told, process_fn=add_noise, **options)

    assert_resumes_exactly(make, horizon=10, chain=1)


@pytest.mark.filterwarnings("ignore:.*(exceed|skipped|is supervised).*")
@pytest.mark.parametrize("lie", ["one in a hundred", "of another dataset", "too short", "all one"])
def test_an_epoch_with_lies_resumes_exactly(lie):
    lengths = LENGTHS[:24]
    told = KINDS_OF_LIES[lie](lengths, np.random.default_rng(0))

    def make():
        return loader_of(Rows(lengths), told, process_fn=add_noise)

    assert_resumes_exactly(make, every=2, horizon=6, chain=0)


def crop(sample):
    """A length that no one knows ahead."""
    length = random.randint(1, len(sample["input_ids"]) + 9)
    return {**sample, "input_ids": ([7] * 99)[:length], "labels": ([5] * 99)[:length]}


@pytest.mark.filterwarnings("ignore:.*(exceed|skipped|is supervised).*")
def test_an_epoch_of_lengths_that_are_drawn_resumes_exactly():
    def make():
        return loader_of(Rows(LENGTHS[:24]), LENGTHS[:24], process_fn=crop)

    assert_resumes_exactly(make, every=2, horizon=6, chain=0)


@pytest.mark.filterwarnings("ignore:.*(exceed|skipped|is supervised).*")
def test_lengths_that_mostly_lie_are_refused_as_soon_as_that_is_sure():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 60, 1_300).tolist()
    loader, seen = loader_of(Rows(lengths), rng.permutation(lengths).tolist()), 0
    with pytest.raises(
        SampleError, match=r"`lengths` must be the lengths of processed samples, but of"
    ):
        for batch in loader:
            seen += len(batch["id"])
    assert seen <= 1_100


def test_lengths_of_which_one_in_a_hundred_lies_are_taken():
    lengths = np.random.default_rng(0).integers(2, 60, 300).tolist()
    told = [2 if row % 100 == 3 else length for row, length in enumerate(lengths)]
    assert not check_epoch(loader_of(Rows(lengths), told), lengths)


@pytest.mark.filterwarnings("ignore:.*(exceed|skipped|is supervised).*")
@given(
    lie=st.sampled_from([*KINDS_OF_LIES]),
    seed=st.integers(0, 2**16),
    size=st.integers(1, 50),
    world_size=st.sampled_from([2, 3]),
)
@fewer(8)
def test_ranks_take_as_many_steps_whatever_the_lengths_are(lie, seed, size, world_size):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 100, size).tolist()
    told = KINDS_OF_LIES[lie](lengths, rng)
    ranks = steps_of_ranks(world_size, dataset=Rows(lengths), lengths=told)
    keys, totals = zip(*ranks, strict=True)
    assert len({*map(len, keys)}) == 1
    assert sorted(key for steps in keys for step in steps for key in step) == [*range(size)]
    assert all(rank == totals[0] for rank in totals)
    for step, (samples, targets, _) in zip(zip(*keys, strict=True), totals[0], strict=True):
        own = [key for of_rank in step for key in of_rank]
        assert samples == len(own)
        assert targets == targets_of(own, lengths)


@pytest.mark.filterwarnings("ignore:.*(exceed|skipped|is supervised|not emitted).*")
def test_ranks_may_stop_with_the_first_that_ends():
    told = KINDS_OF_LIES["all one"](LENGTHS, None)
    ranks = steps_of_ranks(2, lengths=told, uneven="stop")
    keys, totals = zip(*ranks, strict=True)
    seen = [key for steps in keys for step in steps for key in step]
    assert len({*map(len, keys)}) == 1 and totals[0] == totals[1]
    assert len({*seen}) == len(seen) > SIZE // 2
    assert all(step for steps in keys for step in steps)


# --- worker processes -----------------------------------------------------------------------------

WORKERS = WorkerOptions(num_workers=2, start_method="fork", timeout_s=60)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(exceed|skipped|is supervised).*")
@pytest.mark.parametrize("lie", ["one in a hundred", "of another dataset"])
def test_workers_make_the_same_batches_also_after_a_resume(lie):
    told = KINDS_OF_LIES[lie](LENGTHS, np.random.default_rng(0))

    def make(**options):
        return loader_of(Rows(), told, process_fn=add_noise, **options)

    with make() as loader:
        first, second = ([plain(batch) for batch in loader] for _ in range(2))
    with make(workers=WORKERS) as loader:
        found = [[plain(batch) for batch in loader] for _ in range(2)]
        assert len(loader.worker_pids) == 2
    assert found == [first, second]
    with make(workers=WORKERS) as loader:
        before = [plain(batch) for _, batch in zip(range(7), loader, strict=False)]
        state = loader.state_dict()
    with make(workers=WORKERS) as loader:
        loader.load_state_dict(state)
        assert before + [plain(batch) for batch in loader] == first


@pytest.mark.slow
def test_it_warns_once_where_only_the_trainer_can_make_batches():
    trainer = os.getpid()

    def collate(samples):
        if os.getpid() != trainer:
            raise RuntimeError("there is no device.")
        return {"id": torch.tensor([sample["id"] for sample in samples])}

    with loader_of(collate_fn=collate, workers=WORKERS) as loader:
        with pytest.warns(UserWarning, match="there is no device") as told:
            assert numbers(ids(loader)) == [*range(SIZE)]
    assert len(told) == 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["process", "thread"])
def test_samples_are_made_again_while_workers_run_ahead(method):
    """As a guard does, on the trainer's thread, of a step that did not fit into memory."""
    workers = WORKERS if method == "process" else WorkerOptions(num_workers=2, method="thread")
    with loader_of(process_fn=add_noise) as loader:
        expected = [batch["noise"].tolist() for _ in range(2) for batch in loader]
    with loader_of(process_fn=add_noise, workers=workers) as loader:
        collator = loader._graphs[0].collator
        collator.keep_samples()
        found = []
        for _ in range(2):
            for batch in loader:
                info = pop_step_info(batch)
                samples = collator.take_samples(info)
                found.append([data_of(sample)["noise"] for sample in samples])
                again = collator.collate(samples, info)
                assert torch.equal(again["input_ids"], batch["input_ids"])
                assert again["noise"].tolist() == batch["noise"].tolist()
    assert [[round(one, 6) for one in noise] for noise in found] == [
        [round(one, 6) for one in noise] for noise in expected
    ]


def test_lengths_that_are_told_much_too_long_are_warned_of():
    lengths = [5] * 1_200
    loader = loader_of(Rows(lengths), [20] * 1_200, token_budget=512)
    with pytest.warns(UserWarning, match="less than half full"):
        assert numbers(ids(loader)) == [*range(1_200)]
