"""If ranks run out of memory or fail, all take the same steps with equal gradients, or all end."""

import json
import time

import pytest
from rank_jobs import RankJob, run_ranks

from odb_nodes import audit

BEGIN = """
import random, sys
from pathlib import Path
from gradients import SIZES, OneProcess, gradient_of, relative_error, samples_of
from memory_faults import FailingModel, above, at_call, loss_of
from odb_nodes import Ledger, ODBDataLoader, StepMemoryError, load_rank_state, save_rank_state
from odb_nodes.training.memory import OomGuard
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

how = {"accumulate": 1, "above": 0, "share": 0.0, "place": "forward", "seed": 0, "model": "ddp"}
how |= {"on_oom": "split", "guard_above": 0.0, "limit": None} | json.loads(sys.argv[1])
sizes = SIZES[world_size]
samples = samples_of(rank, sizes[rank])
options = {"token_budget": 96, "window": 16, "sharded": True, "timeout_s": 20}
loader = ODBDataLoader(samples, accumulate=how["accumulate"], **options)
rng = random.Random(10 * how["seed"] + rank)
numbers = {n for n in range(1000) if rng.random() < how["share"]}
inner = FailingModel(above(how["above"]) if how["above"] else at_call(numbers), how["place"])
if how["model"] == "ddp":
    model = DistributedDataParallel(inner, gradient_as_bucket_view=how["seed"] % 2 == 1)
else:
    for layer in (inner.embedding, inner.hidden, inner.head, inner):
        fully_shard(layer)
    model = inner
guard = OomGuard(loader, how["on_oom"], guard_above=how["guard_above"], limit=how["limit"])
"""

TRAIN = (
    BEGIN
    + """
one_process, errors, seen, skipped, steps = OneProcess(sizes), [], [], [], []
with Ledger(sys.argv[2]) as ledger:
    for step in guard:
        step.backward(model, loss_of(model))
        ids = [samples[key]["id"] for info in step.infos for key in info.keys]
        skipped.extend(samples[out.key]["id"] for info in step.infos for out in info.left_out)
        groups = [group for of_rank in r.gathered([ids]) for group in of_rank if group]
        actual = gradient_of(model)
        expected = one_process.gradient(groups, "exact") if groups else 0 * actual
        errors.append(relative_error(actual, expected))
        for info in step.infos:
            ledger.record(info)
        seen.extend(ids)
        steps.append(loader.step)
        model.zero_grad()
counts = [guard.ooms, guard.skipped_samples]
print(json.dumps([max(errors), seen, skipped, steps, *counts]))
dist.barrier()
del model
dist.destroy_process_group()
"""
)


def train(tmp_path, world_size, **how):
    """Check a run; return how often memory ran out, and the number of skipped samples."""
    results = run_ranks(tmp_path, TRAIN, world_size, json.dumps(how), str(tmp_path / "ledger"))
    errors, seen, skipped, steps, ooms, skipped_counts = zip(*results, strict=True)
    ids = [index for of_rank in (*seen, *skipped) for index in of_rank]
    assert len(ids) == len({*ids}) == {2: 80, 4: 68}[world_size]
    assert audit(tmp_path / "ledger").ok
    assert max(errors) < 1e-12
    assert all(of_rank == steps[0] for of_rank in steps)
    assert [*skipped_counts] == [len(of_rank) for of_rank in skipped]
    return sum(ooms), sum(skipped_counts)


LIMIT = {"limit": 40, "above": 60, "guard_above": 1.0}


@pytest.mark.parametrize(
    ("world_size", "how"),
    [
        (4, {"share": 0.25, "place": "backward", "seed": 3, "accumulate": 3}),
        (2, {"above": 12, "on_oom": "skip", "seed": 1, "accumulate": 2}),
        (2, LIMIT),  # in as many parts on all ranks
        (4, {"model": "fsdp", **LIMIT}),
    ],
)
def test_any_rank_may_run_out_of_memory_or_skip_samples(tmp_path, world_size, how):
    ooms, skipped = train(tmp_path, world_size, **how)
    assert ooms > 1 or "limit" in how
    assert skipped > 3 if "on_oom" in how else skipped == 0


def ends_of(tmp_path, body, **how):
    """Return (exit code, stderr) of each of two ranks, which must end in time."""
    start_s = time.monotonic()
    with RankJob(tmp_path, body, 2, json.dumps(how), str(tmp_path / "ledger")) as job:
        results = job.results(60)
    assert time.monotonic() - start_s < 40
    return [(code, errors) for code, _, errors in results]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"above": 12}, "does not fit into memory alone"),
        ({"above": 1, "on_oom": "skip", "accumulate": 2}, "none of the last"),
    ],
)
def test_all_ranks_end_with_an_error_if_a_step_cannot_be_computed(tmp_path, how, text):
    ends = ends_of(tmp_path, TRAIN, **how)
    assert all(code and text in errors for code, errors in ends)
    assert any("StepMemoryError: step" in errors for _, errors in ends)
    if "on_oom" in how:  # at the same step
        (first, second) = (
            e.partition("StepMemoryError: ")[2].partition(" fits")[0] for _, e in ends
        )
        assert first == second


ENDS = (
    BEGIN
    + """
folder = Path(sys.argv[2]).parent / "checkpoint"
if how["resume"]:
    loader.load_state_dict(load_rank_state(folder))
else:
    failing = iter(range(1 << 30))
    inner.fails = lambda rows, width: next(failing) == 7 and rank == 1
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


@pytest.mark.parametrize(("model", "place"), [("ddp", "backward"), ("fsdp", "forward")])
def test_an_unguarded_step_ends_all_ranks_and_a_resume_completes_the_epoch(tmp_path, model, place):
    how = {"model": model, "place": place, "guard_above": 1.0}
    for code, errors in ends_of(tmp_path, ENDS, **how, resume=False):
        assert code == 3
        assert "rank 1 ran out of memory in step 7 of epoch 0" in errors
        assert "Resume from the last checkpoint with a budget of" in errors
    assert [code for code, _ in ends_of(tmp_path, ENDS, **how, resume=True)] == [0, 0]
    assert audit(tmp_path / "ledger").ok


FAILS = """
import sys, time
import odb_nodes.training.memory.guarded_step
from gradients import samples_of
from memory_faults import FailingModel, loss_of, never
from odb_nodes import ODBDataLoader, PaddingCollate, PeerError, StepMemoryError
from odb_nodes.training.memory import OomGuard
from torch import nn
from torch.nn.parallel import DistributedDataParallel

how, model = json.loads(sys.argv[1]), FailingModel(never)
options = {"token_budget": 96, "window": 16, "sharded": True}
"""

WAITS = (
    FAILS
    + """
model.norm = nn.SyncBatchNorm(2)  # so that the ranks compute together, by what they know
model.eval()
odb_nodes.training.memory.guarded_step.runs_ahead = lambda: True  # as on a GPU
guard = OomGuard(ODBDataLoader(samples_of(rank, 40), timeout_s=3, **options), guard_above=1.0)
# Steps 3 to 5 are one round: rank 0 has step 4 without waiting for rank 1, and raises there.
for number, step in enumerate(guard):
    model.fails = lambda rows, width: rank == 1 and number == 3
    try:
        step.backward(model, loss_of(model))
        if number == 3:
            # As for a kernel that waits for the other rank.
            time.sleep(60 if how["waits"] else 1.5)
    except StepMemoryError as error:
        print(error, file=sys.stderr, flush=True)
        time.sleep(8)  # its connections stay open
        os._exit(3)
    model.zero_grad()
"""
)


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_waits_in_a_collective_is_interrupted(tmp_path, waits):
    ends = ends_of(tmp_path, WAITS, waits=waits)
    assert [code for code, _ in ends] == [70 if waits else 3, 3]
    assert all("rank 1 ran out of memory in step 3 of epoch 0" in text for _, text in ends)


COLLATE = (
    FAILS
    + """
class Collate(PaddingCollate):
    def collate_step(self, samples, info):
        if rank == 1 and info.step == 3:
            raise ValueError("as the test wants it")
        return self(samples)

loader = ODBDataLoader(samples_of(rank, 40), collate_fn=Collate(), timeout_s=30, **options)
model = DistributedDataParallel(model)
try:
    for step in OomGuard(loader, guard_above=how["above"]):
        step.backward(model, loss_of(model))
        model.zero_grad()
except (PeerError, ValueError) as error:
    print(json.dumps([type(error).__name__, str(error)]), file=sys.stderr, flush=True)
time.sleep(0 if how["above"] else 8)  # its connections stay open
os._exit(3)
"""
)


@pytest.mark.parametrize("above", [0.0, 1.0])
def test_a_rank_whose_loader_fails_tells_the_waiting_ranks(tmp_path, above):
    ends = ends_of(tmp_path, COLLATE, above=above)
    (name, text), failed_rank = (json.loads(text.splitlines()[-1]) for _, text in ends)
    assert failed_rank[0] == "SampleError" and "as the test wants it" in failed_rank[1]
    assert name == "PeerError"
    cause = "SampleError: `collate_fn` raised ValueError: as the test wants it"
    assert f"rank 1 failed in taking a batch: {cause}" in text


IGNORED = """
from odb_nodes.training.memory.gradients import average_gradients
from torch import nn
from torch.nn.parallel import DistributedDataParallel

model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
whole = DistributedDataParallel(model)
for weight in model.parameters():
    weight.grad = weight.new_full(weight.shape, 1.0 + 2 * rank)
average_gradients(whole)
print(json.dumps([float(weight.grad.mean()) for weight in model.parameters()]))
"""


def test_parameters_that_ddp_ignores_are_not_averaged(tmp_path):
    assert run_ranks(tmp_path, IGNORED, 2) == [[1.0, 2.0], [3.0, 2.0]]
