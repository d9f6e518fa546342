"""Virtual ranks: the same optimizer steps on any number of processes that host them."""

import copy
import random
import threading
import time

import pytest
import torch
from aligned_ranks import TIMEOUT_S, on_ranks
from elastic import SAMPLES, augmented, make, trained_on
from gradients import LanguageModel, mean_loss, samples_of
from torch.utils.data import IterableDataset
from torchdata.nodes import IterableWrapper
from virtual import job, steps_of

from odb_nodes import (
    JsonlSource,
    Mixing,
    ODBDataLoader,
    PackedCollate,
    PaddingCollate,
    SampleError,
    StateError,
    TokenBudget,
    WorkerOptions,
    pop_step_info,
    reshard,
)
from odb_nodes.memory import OomGuard
from odb_nodes.testing import assert_resumes_exactly


class Stream(IterableDataset):
    """Samples by their number, read one after the other; its place is an attribute."""

    def __init__(self, size=90):
        self.size, self.at = size, 0

    def __iter__(self):
        self.at = 0
        while self.at < self.size:
            self.at += 1
            yield {"input_ids": [self.at] * random.Random(self.at).randint(2, 40), "id": self.at}


class StatefulStream(Stream):
    """A stream that resumes by its own state."""

    def __iter__(self):
        while self.at < self.size:
            self.at += 1
            yield {"input_ids": [self.at] * random.Random(self.at).randint(2, 40), "id": self.at}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def of_stream(exchange, data=Stream, **options):
    given = {"token_budget": 80, "window": 8, "timeout_s": TIMEOUT_S}
    return ODBDataLoader(data(), process_group=exchange, **given | options)


def of_mixture(exchange, **options):
    sources = {name: range(1000 * at, 1000 * at + 60) for at, name in enumerate(("ocr", "vqa"))}
    given = {"process_fn": augmented, "token_budget": 80, "window": 8, "timeout_s": TIMEOUT_S}
    return ODBDataLoader(sources, process_group=exchange, **given | options)


def noisy(samples):
    """A collate function that draws from the global generators."""
    batch = PaddingCollate()(samples)
    batch["noise"] = torch.rand(2)
    return batch


SHARES = {"ocr": 1, "vqa": 3}
CASES = {
    "plain": {},
    "accumulate": {"accumulate": 3},
    "window auto": {"window": "auto"},
    "augmented": {"process_fn": augmented, "exclude": None},
    "threads": {
        "process_fn": augmented,
        "exclude": None,
        "workers": WorkerOptions(num_workers=2, method="thread"),
    },
    "packed": {"token_budget": TokenBudget(80, layout="packed", oversize="drop")},
    "stop": {"uneven": "stop"},
    "dearest first": {"dearest_first": 2},
    "not exact": {"loss_scaling": "approx"},
    "unweighted": {"loss_scaling": "none"},
    "mixture": {"make": of_mixture},
    "mixture by tokens": {"make": of_mixture, "weights": Mixing(weights=SHARES, by="tokens")},
    "iterable": {"make": of_stream},
    "stateful iterable": {"make": of_stream, "data": StatefulStream},
    "payload": {"state": "payload"},
}


@pytest.mark.parametrize("case", CASES)
def test_all_numbers_of_processes_take_the_same_steps(case):
    options = CASES[case]
    expected = steps_of(job(4, None, epochs=2, **options))
    assert {key[2] for key in expected} == {0, 1, 2, 3}
    for processes in (4, 2, 1):
        assert steps_of(job(processes, epochs=2, **options)) == expected


@pytest.mark.parametrize("case", CASES)
def test_a_run_moves_between_numbers_of_processes(case, sampled):
    options, accumulate = CASES[case], CASES[case].get("accumulate", 1)
    expected = steps_of(job(4, epochs=2, **options))
    last = max(step for epoch, step, _ in expected if epoch == 0)
    places = sorted({1, 4, 5, last // 2, last})
    for at in places[:: sampled(every=4).get("every", 1)]:
        at -= at % accumulate
        found, states, processes = {}, None, 2
        for then in (4, 1, 2):
            taken = job(processes, states=states, steps=max(1, at // 3) * accumulate, **options)
            found |= steps_of(taken)
            states = [saved[-1] for _, saved in taken]
            random.Random(at).shuffle(states)
            states, processes = reshard(states, then), then
        found |= steps_of(job(processes, states=states, epochs=2, **options))
        assert found == {key: one for key, one in expected.items() if key in found}
        assert found.keys() == expected.keys()


def test_each_sample_comes_once():
    (only,) = job(1)
    assert sorted(index for _, ids in only[0] for index in ids) == trained_on()


@pytest.mark.parametrize("hosted", [1, 2, 4])
def test_the_mean_gradient_of_a_step_is_that_of_all_its_tokens(hosted):
    samples, fresh = samples_of(0, 60), LanguageModel()

    def gradients(exchange):
        loader = ODBDataLoader(
            samples,
            token_budget=60,
            window=8,
            process_group=exchange,
            virtual_ranks=4,
            accumulate=2,
            timeout_s=TIMEOUT_S,
        )
        model, found = copy.deepcopy(fresh), []
        for batch in loader:
            info = pop_step_info(batch)
            (mean_loss(model, batch) * info.loss_scale).backward()
            if info.ends_optimizer_step:
                assert info.micro_steps == info.micro_step + 1
                found.append(torch.cat([one.grad.flatten() for one in model.parameters()]))
                model.zero_grad()
        return found, model

    ranks = on_ranks(4 // hosted, gradients)
    steps = [*zip(*(found for found, _ in ranks), strict=True)]
    means = [torch.stack(of_ranks).mean(0) for of_ranks in steps]
    (reference,) = job(
        1,
        make=lambda exchange, **options: ODBDataLoader(
            samples, token_budget=60, window=8, process_group=exchange, accumulate=2, **options
        ),
    )
    by_id = {sample["id"]: sample for sample in samples}
    number, batch, model = 0, [], fresh
    for info, ids in reference[0]:
        batch += [by_id[index] for index in ids]
        if info.ends_optimizer_step:
            mean_loss(model, PaddingCollate()([{**one} for one in batch])).backward()
            expected = torch.cat([one.grad.flatten() for one in model.parameters()])
            assert torch.allclose(means[number], expected, rtol=0, atol=1e-12)
            model.zero_grad()
            number, batch = number + 1, []
    assert number == len(means)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2},
        pytest.param({"num_workers": 2, "prefetch": 3}, marks=pytest.mark.slow),
    ],
)
def test_a_state_of_any_batch_resumes_exactly(options, sampled):
    def build():
        given = {"process_fn": augmented, "token_budget": 60, "window": 6, "round_size": 8}
        return ODBDataLoader(range(60), virtual_ranks=3, **given | options)

    assert_resumes_exactly(build, epochs=2, **sampled(every=5, horizon=12, chain=1))


def test_random_collate_functions_draw_the_same_numbers():
    def noise(exchange, **options):
        loader = of_stream(exchange, virtual_ranks=4, collate_fn=noisy, **options)
        torch.manual_seed(5)
        found = {}
        for batch in loader:
            info = pop_step_info(batch)
            step, number = divmod(info.step, info.batches_per_step)
            rank = number if exchange is None else exchange.rank * info.batches_per_step + number
            found[step, rank] = batch["noise"].tolist()
        loader.close()
        return found, torch.rand(1).item()

    alone, own = noise(None)
    torch.manual_seed(5)
    assert own == torch.rand(1).item()  # the trainer's generator was left as it was
    ahead, _ = noise(None, num_workers=1, prefetch=2)
    assert alone == ahead
    assert len({str(one) for one in alone.values()}) == len(alone)
    ranks = on_ranks(2, lambda exchange: noise(exchange)[0])
    assert ranks[0] | ranks[1] == alone


def test_records_of_files_are_shared_by_virtual_ranks(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f'{{"input_ids": {[1] * (n % 9 + 1)}}}\n' for n in range(50)))

    def lengths(exchange):
        loader = ODBDataLoader(
            JsonlSource(path, rank=0, world_size=1),
            token_budget=30,
            window=8,
            virtual_ranks=4,
            process_group=exchange,
            timeout_s=TIMEOUT_S,
        )
        return [key for batch in loader for key in pop_step_info(batch).keys]

    for processes in (1, 2):
        keys = [key for of_rank in on_ranks(processes, lengths) for key in of_rank]
        assert len(keys) == len({*keys}) == 50


def test_counts_are_those_of_all_hosted_ranks():
    loader = make(None, virtual_ranks=3)
    for batch in loader:
        info = pop_step_info(batch)
    assert loader.num_samples == SAMPLES
    assert loader.skipped_samples == {"thirty-first": 4, "other": 4}
    assert (loader.dropped_samples, loader.excluded_samples) == (3, 3)
    assert loader.samples_done == len(trained_on())
    assert (loader.accumulate, info.micro_steps, info.world_size) == (3, 3, 1)
    assert info.ends_epoch


def test_only_the_last_batch_ends_the_epoch():
    (only,) = job(1)
    assert [info.ends_epoch for info, _ in only[0]] == [False] * (len(only[0]) - 1) + [True]


def test_leaving_within_a_step_begins_the_next_epoch():
    loader, whole = make(None, virtual_ranks=3), make(None, virtual_ranks=3)
    pop_step_info(next(iter(loader)))
    found = [pop_step_info(batch).keys for batch in loader]
    list(whole)
    assert found == [pop_step_info(batch).keys for batch in whole]


def test_the_state_of_an_epoch_that_was_left_is_rehosted():
    loader = make(None, virtual_ranks=4)
    next(iter(loader))
    loader.set_epoch(3)
    states = reshard([loader.state_dict()], 2)
    found = steps_of(job(2, states=states))
    fresh = make(None, virtual_ranks=4)
    fresh.set_epoch(3)
    (expected,) = job(1, states=[fresh.state_dict()])
    assert found == steps_of([expected])


def test_no_thread_outlives_a_step():
    loader = make(None, virtual_ranks=4, num_workers=2)
    before = threading.active_count()
    for _ in zip(range(3), loader, strict=False):
        pass
    loader.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
    assert not [one for one in threading.enumerate() if one.name == "odb_nodes-virtual"]


def test_virtual_ranks_share_workers_and_what_is_in_flight():
    workers = WorkerOptions(num_workers=8, in_flight_samples=400, in_flight_bytes=100 << 20)
    loader = make(None, virtual_ranks=4, workers=workers)
    shares = [graph.samples.runner._options for graph in loader._graphs]
    for name in ("num_workers", "in_flight_samples", "in_flight_bytes"):
        assert sum(getattr(share, name) for share in shares) == getattr(workers, name)


def failing(index):
    if index == 77:
        raise OSError("disk")
    return {"input_ids": [1] * (index % 9 + 2)}


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_an_error_of_one_virtual_rank_is_raised_as_it_is(options):
    loader = make(None, virtual_ranks=4, process_fn=failing, exclude=None, **options)
    start = time.monotonic()
    with pytest.raises(SampleError, match="disk"):
        list(loader)
    assert time.monotonic() - start < 10
    state = loader.state_dict()
    again = make(None, virtual_ranks=4, process_fn=failing, exclude=None)
    again.load_state_dict(state)
    with pytest.raises(SampleError, match="disk"):
        list(again)


def test_an_error_reaches_all_processes():
    def run(exchange):
        loader = make(exchange, virtual_ranks=4, process_fn=failing, exclude=None)
        with pytest.raises(Exception, match="disk") as raised:
            list(loader)
        return type(raised.value).__name__

    start = time.monotonic()
    assert sorted(on_ranks(2, run)) == ["PeerError", "SampleError"]
    assert time.monotonic() - start < TIMEOUT_S


def test_a_state_that_does_not_fit_fails_on_all_processes():
    states = [saved[3] for _, saved in job(2)]

    def run(exchange):
        options = {"seed": 9} if exchange.rank else {}
        loader = make(exchange, virtual_ranks=4, **options)
        loader.load_state_dict(states[exchange.rank])
        with pytest.raises(StateError, match="seed"):
            next(iter(loader))

    on_ranks(2, run)


def test_processes_go_on_from_the_same_batch_of_a_step():
    states = [saved[2 + process] for process, (_, saved) in enumerate(job(2))]

    def run(exchange):
        loader = make(exchange, virtual_ranks=4)
        loader.load_state_dict(states[exchange.rank])
        with pytest.raises(StateError, match="are out` is 0 on rank 0, 1, 1 on rank 2, 3"):
            next(iter(loader))

    on_ranks(2, run)


class Interrupting:
    """A sample that raises Ctrl-C in whatever thread makes it."""

    def __call__(self, index):
        if index == 77:
            raise KeyboardInterrupt
        return {"input_ids": [1] * (index % 9 + 2)}


def test_an_interrupt_in_any_graph_ends_the_step():
    loader = make(None, virtual_ranks=4, process_fn=Interrupting(), exclude=None)
    with pytest.raises(KeyboardInterrupt):
        list(loader)
    assert loader.state_dict()


def test_a_step_that_is_out_in_part_must_stay_the_same():
    (only,) = job(1, 4, steps=9)
    state = next(
        saved for info, saved in zip(only[0], only[1][1:], strict=False) if info[0].step == 13
    )
    key = next(key for info, _ in only[0] if info.step == 15 for key in info.keys)
    loader = make(None, virtual_ranks=4, exclude=[7, 8, 90, key])
    loader.load_state_dict(state)
    with pytest.raises(StateError, match="within"):
        list(loader)


def test_states_within_an_optimizer_step_stay_where_they_are():
    (only,) = job(1, 4, steps=4, accumulate=2)
    for at in (1, 3, 4, 6):
        with pytest.raises(StateError, match="within an optimizer step"):
            reshard([only[1][at]], 2)
    assert len(reshard([only[1][8]], 2)) == 2


def test_states_of_other_processes_are_refused():
    states = [saved[-1] for _, saved in job(2, 4, steps=2)]
    with pytest.raises(StateError, match="must divide it"):
        reshard(states, 3)
    with pytest.raises(StateError, match=r"ranks \[1\] are missing"):
        reshard(states[:1], 4)
    with pytest.raises(StateError, match="rank 0 and rank 1|of ranks"):
        reshard([states[0], states[0]], 1)
    for other in (make(None, virtual_ranks=4), make(None)):
        other.load_state_dict(states[0])
        with pytest.raises(StateError, match="virtual_ranks|VirtualRanks|world_size"):
            iter(other)


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"virtual_ranks": 0}, ValueError, "`virtual_ranks` must be in 1.."),
        ({"virtual_ranks": 2.0}, TypeError, "virtual_ranks"),
        ({"virtual_ranks": 2, "uneven": "join"}, ValueError, "uneven"),
        ({"virtual_ranks": 2, "sharded": True}, ValueError, "sharded"),
    ],
)
def test_what_cannot_be_the_same_on_all_is_refused(options, error, match):
    with pytest.raises(error, match=match):
        make(None, **options)


def test_each_process_hosts_as_many():
    def run(exchange):
        with pytest.raises(ValueError, match=r"multiple of the number of ranks \(2\)"):
            make(exchange, virtual_ranks=3)

    on_ranks(2, run)


def test_settable_weights_are_refused():
    with pytest.raises(ValueError, match="settable"):
        of_mixture(None, virtual_ranks=2, weights=Mixing(settable=True))


def test_nodes_and_what_cannot_be_copied_are_refused():
    node = IterableWrapper([{"input_ids": [1]}])
    with pytest.raises(TypeError, match="must not be a node"):
        ODBDataLoader(node, token_budget=9, virtual_ranks=2)
    stream = Stream()
    stream.lock = threading.Lock()
    with pytest.raises(TypeError, match="must be copied"):
        ODBDataLoader(stream, token_budget=9, virtual_ranks=2)


def test_a_guard_refuses_virtual_ranks():
    with pytest.raises(TypeError, match="virtual_ranks"):
        OomGuard(make(None, virtual_ranks=2))


def test_packed_batches_are_packed_for_their_rank():
    budget = TokenBudget(80, layout="packed", oversize="drop")
    loader = make(None, virtual_ranks=2, token_budget=budget, collate_fn=PackedCollate.of(budget))
    assert all(batch["input_ids"].shape[0] == 1 for batch in loader)
