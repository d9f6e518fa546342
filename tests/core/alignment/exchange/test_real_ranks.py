"""Alignment with real processes over gloo."""

import json
from itertools import chain
from pathlib import Path
from statistics import median

import pytest
import torch
from aligned_ranks import on_ranks
from elastic import trained_on
from gradients import SCALINGS
from in_process import InProcessHub
from rank_jobs import (
    epochs_of,
    free_port,
    loader_over,
    make_dataloader,
    real_ids,
    run_ranks,
    samples_of,
)
from torch.nn.functional import cross_entropy, pad
from torchdata.nodes import Mapper
from worker_functions import Program, Texts

from odb_nodes import (
    LengthObserver,
    Loader,
    ODBDataLoader,
    RankAligner,
    ShardedSampler,
    TokenBudget,
    WindowBucketer,
    pop_step_info,
)


def test_no_hang_whatever_the_seed(tmp_path, sampled):
    # Any shards, budgets and rounds; ranks of different speed; epochs that are left at any step.
    body = """
    for seed in range(0, 50, int(sys.argv[1])):
        draw = random.Random(seed)  # the same on all ranks
        sizes = [draw.choice([0, 1, draw.randrange(100)]) for _ in range(world_size)]
        sizes[draw.randrange(world_size)] += 1
        loader = r.make_loader(
            sizes[rank],
            seed=seed,
            budget=draw.randrange(30, 150),
            window=draw.randrange(1, 30),
            round_size=draw.randrange(1, 40),
            accumulate=draw.randrange(1, 4),
            read_ahead=draw.randrange(3),
        )
        for stop in draw.sample(range(20), 3):
            for step, batch in enumerate(loader):
                time.sleep(random.random() / 1000)
                if step == stop:
                    break
        r.check_epochs(sizes, r.epochs_of(loader, 1))
        loader.close()
    r.finish()
    """
    run_ranks(tmp_path, body, 4, sampled(every=5).get("every", 1), timeout_s=200)


def test_eight_ranks_on_few_cores_have_equal_steps_and_each_sample_once(tmp_path):
    body = """
    sizes = [100, 0, 37, 90, 1, 64, 100, 12]
    loader = r.make_loader(sizes[rank], round_size=4, read_ahead=2, timeout_s=150)
    next(iter(loader))  # and the epoch is left
    r.check_epochs(sizes, r.epochs_of(loader, 2))
    loader.close()
    r.finish()
    """
    run_ranks(tmp_path, body, 8, timeout_s=200)


# --- real ranks resumed from a distributed checkpoint, also by another number of ranks ------------


def test_a_distributed_checkpoint_of_another_number_of_ranks(tmp_path):
    body = """
    import torch.distributed.checkpoint as dcp
    from elastic import make
    from odb_nodes import DistributedState, pop_step_info
    loader, trained, saved_by = make(None, timeout_s=60), [], sys.argv[2]
    state = {"loader": DistributedState(loader, saved_by=int(saved_by) or None)}
    if saved_by != "0":
        dcp.load(state, checkpoint_id=sys.argv[1])
    for step, batch in enumerate(loader):
        info = pop_step_info(batch)
        trained += [] if info.is_filler else info.keys
        if step == 3 and saved_by == "0":
            break
    if saved_by == "0":
        dcp.save(state, checkpoint_id=sys.argv[1])
    r.finish(trained)
    """
    trained = run_ranks(tmp_path, body, 2, tmp_path / "checkpoint", 0)
    trained += run_ranks(tmp_path, body, 3, tmp_path / "checkpoint", 2)
    assert sorted(index for of_rank in trained for index in of_rank) == trained_on()


# --- the gradient of every optimizer step is that of one process that has the batches of all ranks-


TOLERANCE = 1e-12

GRADIENT_JOB = """
    import gradients as g
    r.finish([
        [g.compare(g.SIZES[world_size], how, scaling, accumulate) for scaling in g.SCALINGS]
        for how in ("ddp", "fsdp")
        for accumulate in (1, 3)
    ])
"""


def errors(of_ranks, scaling):
    """Of the gradient of each optimizer step, relative to that of one process; of all ranks."""
    seen = [error for rank in of_ranks for error in rank[SCALINGS.index(scaling)]["errors"]]
    assert len(seen) >= 5 * len(of_ranks)
    return seen


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_gradient_of_ranks_is_that_of_one_process(world_size, tmp_path):
    # Under DDP and FSDP2, each with gradient accumulation of 1 and of 3.
    ranks = run_ranks(tmp_path, GRADIENT_JOB, world_size, timeout_s=240)
    for of_ranks in zip(*ranks, strict=True):
        # The mean over all supervised tokens; and of the local means, weighed by samples.
        assert max(errors(of_ranks, "exact")) <= TOLERANCE
        assert max(errors(of_ranks, "approx")) <= TOLERANCE
        exact = [rank[SCALINGS.index("exact")] for rank in of_ranks]
        assert sum(rank["masked_groups"] for rank in exact) > 0
        if world_size > 1:
            assert sum(rank["fillers"] for rank in exact) > 0
            assert any(rank["groups"] > rank["groups_alone"] for rank in exact)  # Some were split.
    alone, *others = [median(errors(of_ranks, "none")) for of_ranks in zip(*ranks, strict=True)]
    # Unscaled means give another gradient, except where there is one mean and nothing to scale.
    assert alone <= TOLERANCE if world_size == 1 else alone > 1e-3
    assert others[0] > 1e-3 and others[2] > 1e-3


# --- ranks that share the data are those of the group: here 2 (dp) of the 4 of 2 (dp) x 2 (tp) ---


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
    import test_real_ranks as t
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
        expected = [parameter.grad.flatten() for parameter in model[place % 2].parameters()]
        assert 1 < count <= len(shapes) and len(grads) == len(expected)
        for grad, other in zip(grads, expected, strict=True):
            assert (
                torch.tensor(grad, dtype=torch.float64) - other
            ).abs().max() < 1e-12 * other.abs().max()


# --- however the ranks of a job are started, they get the same groups; and what is no such job ---


TEXTS = 101  # so that one of two ranks has more than the other

TORCHRUN = """
    import torch.distributed as dist
    import rank_jobs as r
    dist.init_process_group("gloo")
    r.write_groups(sys.argv[1], int(sys.argv[2]))
"""
MULTIPROCESSING = """
    import multiprocessing
    import rank_jobs as r
    method, folder, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    context, port = multiprocessing.get_context(method), r.free_port()
    ranks = [
        context.Process(target=r.join_and_write_groups, args=(rank, 2, port, folder, size))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in ranks))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torchrun", "fork"])
def test_ranks_get_the_groups_of_ranks_on_threads_however_they_are_started(how, tmp_path):
    if how == "torchrun":
        launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2")
        launcher = (*launcher, "--master-addr=127.0.0.1", f"--master-port={free_port()}")
        program = Program(tmp_path, TORCHRUN, tmp_path, TEXTS, launcher=launcher)
    else:
        program = Program(tmp_path, MULTIPROCESSING, how, tmp_path, TEXTS)
    with program:
        code, out, errors = program.finish(200)
        assert code == 0, f"{out}\n{errors}"
    expected = on_ranks(2, lambda rank: epochs_of(make_dataloader(TEXTS, process_group=rank)))
    for rank, epochs in enumerate(expected):
        without_workers, with_two = json.loads((tmp_path / f"{rank}.json").read_text())
        assert without_workers == with_two == epochs


# --- jobs that nothing can align ------------------------------------------------------------------

LOADERS = {
    "ODBDataLoader": lambda: make_dataloader(TEXTS),
    "RankAligner": lambda: loader_over(samples_of(0, TEXTS)),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_several_ranks_without_a_process_group_are_an_error(make, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"has 2 ranks.*not initialised.*init_process_group\("):
        iter(make())


@pytest.mark.parametrize(("place", "shards", "ranks"), [(0, 3, 2), (1, 2, 2), (0, 2, 1)])
def test_a_source_of_another_rank_than_the_aligner_is_an_error(place, shards, ranks):
    texts = Texts(TEXTS)
    source = Mapper(ShardedSampler(texts, rank=place, world_size=shards), texts.__getitem__)
    bucketer = WindowBucketer(LengthObserver(source), 96, 16)
    aligner = RankAligner(bucketer, InProcessHub(2).exchange(0) if ranks == 2 else None)
    rule = rf"`ShardedSampler` is rank {place} of {shards} ranks.*is rank 0 of {ranks}"
    with pytest.raises(RuntimeError, match=rule):
        iter(Loader(aligner))
