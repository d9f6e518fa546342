"""Ranks that share the data are those of the group: here 2 (dp) of the 4 of 2 (dp) x 2 (tp)."""

from itertools import chain
from pathlib import Path

import pytest
import torch
from aligned_ranks import on_ranks
from rank_jobs import epochs_of, make_dataloader, real_ids, run_ranks
from torch.nn.functional import cross_entropy, pad
from worker_functions import Texts

from odb_nodes import ODBDataLoader, TokenBudget, pop_step_info

SIZE = 101

FROM_A_MESH = """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["dp"]
"""
FROM_A_WHOLE_MESH = """
    names = "pp", "dp_replicate", "dp_shard", "cp"
    group = init_device_mesh("cpu", (1, 2, 1, 2), mesh_dim_names=names)
"""
FROM_NEW_GROUP = """
    groups = [dist.new_group([tp, 2 + tp]) for tp in range(2)]  # made by all ranks, in one order
    group = groups[rank % 2]
"""
JOB = """
    from torch.distributed.device_mesh import init_device_mesh
{group}
    size, num_workers = map(int, sys.argv[1:])
    with r.make_dataloader(size, num_workers=num_workers, process_group=group) as loader:
        epochs = r.epochs_of(loader)
        dist.barrier()  # rank 0 hosts the store: it waits for the group of the others
        r.finish(epochs)
"""


@pytest.mark.parametrize(
    ("group", "num_workers"),
    [(FROM_A_MESH, 1), (FROM_A_WHOLE_MESH, 0), (FROM_NEW_GROUP, 0)],
    ids=["mesh", "whole mesh", "new_group"],
)
def test_dp_ranks_share_the_data_and_tp_ranks_get_the_same(group, num_workers, tmp_path):
    alone = on_ranks(2, lambda exchange: epochs_of(make_dataloader(SIZE, process_group=exchange)))
    epochs = run_ranks(tmp_path, JOB.format(group=group), 4, SIZE, num_workers)
    assert epochs == [alone[0], alone[0], alone[1], alone[1]]
    for steps in zip(*alone, strict=True):
        assert sorted(index for rank in steps for index in real_ids(rank)) == [*range(SIZE)]


def test_a_rank_outside_of_the_group_and_a_mesh_without_meaning_are_refused(tmp_path):
    body = """
    from torch.distributed.device_mesh import DeviceMesh
    errors = []
    names = "dp_shard_cp", "tp"
    for name in "tp", "x":
        group = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=(name,))
        with r.make_dataloader(100, process_group=group) as loader:
            found = r.real_ids(r.epochs_of(loader, 1)[0])
        assert found == [*range(100)] if name == "tp" else len(found) < 50
    for group in (
        dist.new_group([0, 1]),
        DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("dp", "tp")),
        DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=names),
        DeviceMesh("cpu", [[0, 2], [1, 3]]),
        DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))["tp"],
    ):
        try:
            iter(r.make_dataloader(100, process_group=group))
        except ValueError as error:
            errors.append(str(error))
    r.finish(errors)
    """
    *outside, mixed, unnamed, of_one_model = run_ranks(tmp_path, body, 4)[2]
    assert all("`process_group` must contain this rank" in error for error in outside)
    assert len(outside) == 2 and "'dp_shard_cp' does not say" in mixed
    assert "'' does not say" in unnamed
    assert "is the dimension 'tp' of a `DeviceMesh` alone" in of_one_model


def stages():
    """Both stages of a model in a pipeline."""
    torch.manual_seed(0)
    head = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 200))
    return torch.nn.Embedding(200, 8).double(), head.double()


def micro_batched(exchange):
    """A loader of batches for 4 micro-batches each."""
    budget = TokenBudget(256, shapes=4, row_sizes=4, oversize="drop")
    return ODBDataLoader(Texts(200), token_budget=budget, window=32, process_group=exchange)


def targets_of(batch):
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return pad(labels[:, 1:], (0, 1), value=-100)


def summed_loss(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


ON_A_PIPELINE = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    sys.path.insert(0, sys.argv[1])
    import test_subgroups as t
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    place, group, schedules = mesh["pp"].get_local_rank(), mesh["pp"].get_group(), {}
    model = t.stages()[place]
    def loss(logits, targets):
        return t.summed_loss(logits, targets) / max(info.local_targets, 1) * info.loss_scale
    for batch in t.micro_batched(mesh):
        info, ids = r.pop_step_info(batch), batch["input_ids"]
        if ids.shape not in schedules:
            stage = PipelineStage(model, place, 2, torch.device("cpu"), group=group)
            schedules[ids.shape] = ScheduleGPipe(stage, 4, loss_fn=loss, scale_grads=False)
        if place:
            schedules[ids.shape].step(target=t.targets_of(batch))
        else:
            schedules[ids.shape].step(ids)
    for one in model.parameters():
        dist.all_reduce(one.grad, group=mesh["dp"].get_group())
    r.finish([len(schedules), [(one.grad / 2).flatten().tolist() for one in model.parameters()]])
"""


@pytest.mark.slow
def test_gradients_of_a_pipeline_are_those_of_one_process(tmp_path):
    model = torch.nn.Sequential(*stages())

    def batches(exchange):
        return [(pop_step_info(batch), batch) for batch in micro_batched(exchange)]

    shapes = set()
    for info, batch in chain(*on_ranks(2, batches)):
        shapes.add(batch["input_ids"].shape)
        if not info.is_filler:
            loss = summed_loss(model(batch["input_ids"]), targets_of(batch))
            (loss / info.all_targets).backward()
    assert len(shapes) > 1 and all(rows % 4 == 0 for rows, _ in shapes)
    for place, (count, grads) in enumerate(
        run_ranks(tmp_path, ON_A_PIPELINE, 4, Path(__file__).parent)
    ):
        expected = [one.grad.flatten() for one in model[place % 2].parameters()]
        assert 1 < count <= len(shapes) and len(grads) == len(expected)
        for one, other in zip(grads, expected, strict=True):
            assert (
                torch.tensor(one, dtype=torch.float64) - other
            ).abs().max() < 1e-12 * other.abs().max()
