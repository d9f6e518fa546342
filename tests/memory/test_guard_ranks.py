"""Ranks that run out of memory: all take the same steps, with the same gradients, or end."""

import json
import time

import pytest
from rank_jobs import RankJob, run_ranks

from odb_nodes import audit

BEGIN = """
import random, sys
from gradients import SIZES, OneProcess, gradient_of, relative_error, samples_of, wrapped
from memory_faults import FailingModel, above, at_call, loss_of
from odb_nodes import Ledger, ODBDataLoader
from odb_nodes.memory import OomGuard
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

how = json.loads(sys.argv[1])
sizes = SIZES[world_size]
samples = samples_of(rank, sizes[rank])
options = {"token_budget": how["budget"], "window": 16, "sharded": True, "timeout_s": 20}
loader = ODBDataLoader(samples, accumulate=how["accumulate"], **options)
rng = random.Random(10 * how["seed"] + rank)
numbers = {n for n in range(1000) if rng.random() < how["share"]}
fails = above(how["above"]) if how["above"] else at_call(numbers)
model = FailingModel(fails, how["place"])
if how["model"] == "ddp":
    model = DistributedDataParallel(model, gradient_as_bucket_view=how["seed"] % 2 == 1)
else:
    for layer in (model.inner.embedding, model.inner.hidden, model.inner.head, model):
        fully_shard(layer)
guard = OomGuard(loader, how["on_oom"], guard_above=how["guard_above"], limit=how["limit"])
one_process, errors, seen, skipped, numbers_of_steps = OneProcess(sizes), [], [], [], []

def train(ledger):
    for step in guard:
        step.backward(model, loss_of(model))
        ids = [samples[key]["id"] for info in step.infos for key in info.keys]
        skipped.extend(samples[one.key]["id"] for info in step.infos for one in info.left_out)
        groups = [group for of_rank in r.gathered([ids]) for group in of_rank if group]
        found = gradient_of(model)
        expected = one_process.gradient(groups, "exact") if groups else 0 * found
        errors.append(relative_error(found, expected))
        for info in step.infos:
            ledger.record(info)
        seen.extend(ids)
        numbers_of_steps.append(loader.step)
        model.zero_grad()
"""

TRAIN = (
    BEGIN
    + """
with Ledger(sys.argv[2]) as ledger:
    train(ledger)
print(json.dumps({
    "errors": max(errors), "seen": seen, "skipped": skipped, "steps": numbers_of_steps,
    "ooms": guard.ooms, "split": guard.split_steps, "left": guard.skipped_samples,
}))
dist.barrier()
del model
dist.destroy_process_group()
"""
)

DEFAULTS = {
    **{"accumulate": 1, "above": 0, "share": 0.0, "place": "forward", "seed": 0, "model": "ddp"},
    **{"on_oom": "split", "guard_above": 0.0, "limit": None, "budget": 96},
}


def train(tmp_path, world_size, **how):
    """What each rank has found in an epoch; and the keys of all are checked."""
    arguments = json.dumps(DEFAULTS | how), str(tmp_path / "ledger")
    found = run_ranks(tmp_path, TRAIN, world_size, *arguments)
    ids = sorted(index for one in found for index in one["seen"] + one["skipped"])
    assert ids == sorted({*ids})
    assert len(ids) == {2: 80, 4: 68}[world_size]
    assert audit(tmp_path / "ledger").ok
    for one in found:
        assert one["errors"] < 1e-12
        assert one["steps"] == found[0]["steps"]
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_any_rank_may_run_out_of_memory(tmp_path, world_size, place, accumulate):
    found = train(
        tmp_path, world_size, share=0.25, place=place, accumulate=accumulate, seed=accumulate
    )
    assert sum(one["ooms"] for one in found) > 1
    assert all(one["skipped"] == [] for one in found)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_samples_that_do_not_fit_alone_are_left_out_on_all_ranks_alike(
    tmp_path, world_size, accumulate
):
    found = train(tmp_path, world_size, above=12, on_oom="skip", accumulate=accumulate, seed=1)
    assert sum(one["left"] for one in found) == sum(len(one["skipped"]) for one in found) > 3


@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_steps_above_a_limit_run_in_as_many_parts_on_all_ranks(tmp_path, model):
    options = {"model": model, "limit": 40, "above": 60, "guard_above": 1.0}
    found = train(tmp_path, 4, **options)
    assert all(one["ooms"] == 0 for one in found)


def ends_of(tmp_path, body, world_size, **how):
    """What each rank says in the end, and the seconds until the last has ended."""
    how = json.dumps(DEFAULTS | how)
    start_s = time.monotonic()
    with RankJob(tmp_path, body, world_size, how, str(tmp_path / "ledger")) as job:
        results = job.results(60)
    assert all(code != 0 for code, _, _ in results)
    return [errors for _, _, errors in results], time.monotonic() - start_s


def test_where_a_sample_does_not_fit_alone_all_ranks_say_so(tmp_path):
    errors, _ = ends_of(tmp_path, TRAIN, 2, above=12)
    assert "StepMemoryError: step" in errors[0] + errors[1]
    for text in errors:
        assert "does not fit into memory alone" in text


def test_where_no_sample_fits_any_more_all_ranks_end_at_the_same_step(tmp_path):
    errors, _ = ends_of(tmp_path, TRAIN, 2, above=1, on_oom="skip", accumulate=2)
    ends = [text.partition("StepMemoryError: ")[2].partition(" fits into")[0] for text in errors]
    assert ends[0] == ends[1] and "none of the last" in ends[0]


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("model", ["ddp", "fsdp"])
def test_what_cannot_be_taken_back_ends_all_ranks_and_a_resume_completes_the_epoch(
    tmp_path, model, place
):
    body = (
        BEGIN
        + """
from pathlib import Path
from odb_nodes import load_rank_state, save_rank_state
from odb_nodes.errors import StepMemoryError
folder = Path(sys.argv[2]).parent / "checkpoint"
if how["resume"]:
    loader.load_state_dict(load_rank_state(folder))
else:
    failing = iter(range(1 << 30))
    model_of = model.module if how["model"] == "ddp" else model
    model_of.fails = lambda rows, width: next(failing) == 7 and rank == 1
with Ledger(sys.argv[2]) as ledger:
    for step in guard:
        try:
            step.backward(model, loss_of(model))
        except StepMemoryError as error:
            print(str(error), file=sys.stderr, flush=True)
            os._exit(3)
        for info in step.infos:
            ledger.record(info)
        model.zero_grad()
        save_rank_state(loader.state_dict(), folder)
dist.barrier()
os._exit(0)
"""
    )
    how = {"model": model, "place": place, "guard_above": 1.0, "resume": False}
    errors, seconds = ends_of(tmp_path, body, 2, **how)
    for text in errors:
        assert "rank 1 ran out of memory in step 7 of epoch 0" in text
        assert "Resume from the last checkpoint with a budget of" in text
    assert seconds < 25
    with RankJob(
        tmp_path, body, 2, json.dumps(DEFAULTS | how | {"resume": True}), str(tmp_path / "ledger")
    ) as job:
        job.finish()
    assert audit(tmp_path / "ledger").ok
