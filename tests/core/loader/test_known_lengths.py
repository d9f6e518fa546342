"""Loaders that plan whole epochs, since the lengths of their samples are known."""

import logging
import os
import random
import time
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from aligned_ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from sampling import fewer
from toys import Stream

from odb_nodes import (
    JsonlSource,
    Observation,
    ODBDataLoader,
    PackedCollate,
    PaddingCollate,
    SampleError,
    ShardedSampler,
    SourceItem,
    StateError,
    TokenBudget,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.core.nodes import planned_groups
from odb_nodes.core.nodes.planned_groups import PlannedGroups
from odb_nodes.core.sample import data_of

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


def add_noise(sample):
    return {**sample, "noise": random.random()}


def loader_of(dataset=None, lengths=LENGTHS, **options):
    dataset = Rows() if dataset is None else dataset
    return ODBDataLoader(dataset, **{"token_budget": BUDGET, "lengths": lengths, **options})


def is_planned(loader):
    return all(isinstance(graph.bucketer, PlannedGroups) for graph in loader._graphs)


def ids(loader):
    return [batch["id"].tolist() for batch in loader]


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
    by_lengths = loader_of(rows)
    by_lengths.set_epoch(0), loader.set_epoch(0)
    assert ids(loader) == ids(by_lengths)
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
    options = {"collate_fn": lambda samples: {"id": [sample["id"] for sample in samples]}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = loader_of(workers=workers, collate_in="workers", **options)
        loader_of(workers=workers, **options)
    why = "cannot be pickled" if method == "process" else "may draw random numbers"
    assert [why in str(warning.message) for warning in caught] == [True]
    assert loader._graphs[0].bucketer.why_not_collated


def draws_nothing(samples):
    return {"id": [sample["id"] for sample in samples]}


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


def test_samples_with_observed_keys_are_excluded_by_them():
    def observe(sample):
        return Observation(len(sample["input_ids"]), key=1000 + sample["id"])

    for exclude, gone in ([17], []), ([1017], [17]):
        rows = numbers(ids(loader_of(observe=observe, exclude=exclude)))
        assert rows == [row for row in range(SIZE) if row not in gone]


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
            rows = numbers(ids(loader_of(process_fn=declared, exclude=exclude)))
        assert rows == [row for row in range(SIZE) if row not in gone]


def test_packed_plans_count_sample_multiple_padding():
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
    "budget.pad_to_multiple_of": {"token_budget": TokenBudget(BUDGET, pad_to_multiple_of=8)},
    "budget.attention_tokens": {"token_budget": TokenBudget(BUDGET, attention_tokens=900)},
    "budget.row_sizes": {"token_budget": TokenBudget(BUDGET, row_sizes="even")},
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


def test_each_field_of_a_plan_is_tested():
    of_ranks = {"rank", "world_size", "accumulate", "step_time"}
    assert {*CHANGES} == {*planned_groups._FIELDS_OF_PLAN} - of_ranks


@pytest.mark.filterwarnings("ignore:.*(strict|differ|changed|another).*")
@pytest.mark.parametrize("field", CHANGES)
def test_options_of_a_plan_may_not_change_within_an_epoch(field):
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


# --- lengths that lie -----------------------------------------------------------------------------


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
    size=st.integers(1, 50),
    world_size=st.sampled_from([2, 3]),
)
@fewer(8)
def test_ranks_take_equal_steps_with_wrong_lengths(lie, seed, size, world_size):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 100, size).tolist()
    wrong_lengths = KINDS_OF_LIES[lie](lengths, rng)
    ranks = steps_of_ranks(world_size, dataset=Rows(lengths), lengths=wrong_lengths)
    keys, totals = zip(*ranks, strict=True)
    assert len({*map(len, keys)}) == 1
    assert sorted(key for steps in keys for step in steps for key in step) == [*range(size)]
    assert all(rank == totals[0] for rank in totals)
    for step, (samples, targets, _) in zip(zip(*keys, strict=True), totals[0], strict=True):
        own = [key for of_rank in step for key in of_rank]
        assert samples == len(own)
        assert targets == targets_of(own, lengths)


# --- worker processes -----------------------------------------------------------------------------

WORKERS = WorkerOptions(num_workers=2, start_method="fork", timeout_s=60)


@pytest.mark.slow
def test_it_warns_once_where_only_the_trainer_can_make_batches():
    trainer = os.getpid()

    def collate(samples):
        if os.getpid() != trainer:
            raise RuntimeError("there is no device.")
        return {"id": torch.tensor([sample["id"] for sample in samples])}

    with loader_of(collate_fn=collate, workers=WORKERS) as loader:
        with pytest.warns(UserWarning, match="there is no device") as caught:
            assert numbers(ids(loader)) == [*range(SIZE)]
    assert len(caught) == 1


class MaskedCollate(PaddingCollate):
    """Draws a mask from its own generator, which batches made ahead use too."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def __call__(self, samples):
        batch = super().__call__(samples)
        time.sleep(0.002)  # Another thread may collate meanwhile.
        mask = torch.rand(batch["input_ids"].shape, generator=self.generator) < 0.5
        return {**batch, "mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [LENGTHS, False], ids=["lengths", "no lengths"])
@pytest.mark.parametrize("method", ["process", "thread"])
def test_a_batch_made_again_while_workers_run_ahead_equals_the_batch(method, lengths):
    """As a guard makes it, on the trainer's thread, for a step that did not fit into memory."""
    start_method = "fork" if method == "process" else None
    workers = WorkerOptions(num_workers=2, method=method, start_method=start_method)
    options = {"process_fn": add_noise, "collate_fn": MaskedCollate(), "workers": workers}
    with loader_of(lengths=lengths, **options) as loader:
        collator = loader._graphs[0].collator
        collator.keep_samples()
        for batch in loader:
            info = pop_step_info(batch)
            samples = collator.take_samples(info)
            assert [data_of(sample)["noise"] for sample in samples] == batch["noise"].tolist()
            again = collator.collate(samples, info)
            pop_step_info(again)
            assert again.keys() == batch.keys()
            assert all(torch.equal(again[name], batch[name]) for name in batch)
