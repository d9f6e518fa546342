"""Ranks that share the data are those of the group: here 2 (dp) of the 4 of 2 (dp) x 2 (tp)."""

import pytest
from aligned_ranks import on_ranks
from rank_jobs import epochs_of, make_dataloader, real_ids, run_ranks

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
    for group in (
        dist.new_group([0, 1]),
        DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("dp", "tp")),
        DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=names),
        DeviceMesh("cpu", [[0, 2], [1, 3]]),
    ):
        try:
            iter(r.make_dataloader(100, process_group=group))
        except ValueError as error:
            errors.append(str(error))
    r.finish(errors)
    """
    *outside, mixed, unnamed = run_ranks(tmp_path, body, 4)[2]
    assert all("`process_group` must contain this rank" in error for error in outside)
    assert len(outside) == 2 and "'dp_shard_cp' does not say" in mixed
    assert "'' does not say" in unnamed
