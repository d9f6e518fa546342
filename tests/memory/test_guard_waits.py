"""A guarded loop in which a rank fails: no other waits for it, wherever it waits."""

import json
import time

import pytest
from rank_jobs import RankJob

BEGIN = """
import sys, time
import odb_nodes.memory
from gradients import samples_of
from memory_faults import FailingModel, loss_of, never
from odb_nodes import ODBDataLoader, PaddingCollate, PeerError, StepMemoryError
from odb_nodes.memory import OomGuard
from torch import nn
from torch.nn.parallel import DistributedDataParallel

options = {"token_budget": 96, "window": 16, "sharded": True, "timeout_s": 3}
model = FailingModel(never)
"""


def ends_of(tmp_path, body):
    """(code, errors) of each of two ranks, and the seconds until the last has ended."""
    start_s = time.monotonic()
    with RankJob(tmp_path, BEGIN + body, 2) as job:
        results = job.results(60)
    return [(code, errors) for code, _, errors in results], time.monotonic() - start_s


WAITS = """
model.norm = nn.SyncBatchNorm(2)  # so that the ranks compute together, by what they know
model.eval()
odb_nodes.memory.partwise_step.runs_ahead = lambda: True  # as on a GPU
guard = OomGuard(ODBDataLoader(samples_of(rank, 40), **options), guard_above=1.0)
fails = rank == 1
for number, step in enumerate(guard):
    model.fails = lambda rows, width: fails and number == 2
    try:
        step.backward(model, loss_of(model))
        if number == 2 and {waits}:
            time.sleep(60)  # as for a kernel that waits for the other rank
        if number == 2:
            time.sleep(1.5)
    except StepMemoryError as error:
        print(error, file=sys.stderr, flush=True)
        time.sleep(8)  # its connections stay open
        os._exit(3)
    model.zero_grad()
"""


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_waits_after_the_step_is_got_out(tmp_path, waits):
    ends, seconds = ends_of(tmp_path, WAITS.replace("{waits}", str(waits)))
    assert [code for code, _ in ends] == [70 if waits else 3, 3]
    for _, text in ends:
        assert "rank 1 ran out of memory in step 2 of epoch 0" in text
    assert seconds < 40


COLLATE = """
class Collate(PaddingCollate):
    def collate_step(self, samples, info):
        if rank == 1 and info.step == 3:
            raise ValueError("as the test wants it")
        return self(samples)

loader = ODBDataLoader(samples_of(rank, 40), collate_fn=Collate(), **options | {"timeout_s": 30})
model = DistributedDataParallel(model)
try:
    for step in OomGuard(loader, guard_above={above}):
        step.backward(model, loss_of(model))
        model.zero_grad()
except (PeerError, ValueError) as error:
    print(json.dumps([type(error).__name__, str(error)]), file=sys.stderr, flush=True)
time.sleep({stays_s})  # its connections stay open
os._exit(3)
"""


@pytest.mark.parametrize("above", [0.0, 1.0])
def test_a_rank_whose_batch_fails_tells_the_others_that_wait_within_a_step(tmp_path, above):
    ends, seconds = ends_of(
        tmp_path, COLLATE.replace("{above}", str(above)).replace("{stays_s}", "0" if above else "8")
    )
    (name, text), (own_name, own_text) = (json.loads(text.splitlines()[-1]) for _, text in ends)
    assert own_name == "ValueError"
    assert "as the test wants it" in own_text
    assert name == "PeerError"
    assert "rank 1 failed in taking a batch: ValueError: as the test wants it" in text
    assert seconds < 25


IGNORED = """
model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
name = "0.weight"
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])
from odb_nodes.memory.gradients import average_gradients
whole = DistributedDataParallel(model)
for one in model.parameters():
    one.grad = one.new_full(one.shape, 1.0 + 2 * rank)
average_gradients(whole)
found = [float(one.grad.mean()) for one in model.parameters()]
print(json.dumps(found), file=sys.stderr, flush=True)
"""


def test_parameters_that_ddp_is_told_to_ignore_are_not_averaged(tmp_path):
    ends, _ = ends_of(tmp_path, IGNORED)
    assert [json.loads(text.splitlines()[-1]) for _, text in ends] == [[1.0, 2.0], [3.0, 2.0]]
