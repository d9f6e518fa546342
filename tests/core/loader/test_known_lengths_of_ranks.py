"""Loaders of known lengths, some of which are wrong, on real ranks."""

import json

import numpy as np
import pytest
from aligned_ranks import on_ranks
from rank_jobs import RankJob, run_ranks

from odb_nodes import ODBDataLoader, pop_step_info

pytestmark = pytest.mark.slow

SIZE = 120
TOLD = np.random.default_rng(4).integers(2, 50, SIZE).tolist()

BODY = """
import warnings
from itertools import islice
from pathlib import Path

warnings.simplefilter("ignore")
folder, how = Path(sys.argv[1]), sys.argv[2]
told, lengths = json.loads((folder / "lengths.json").read_text())


class Rows:
    def __len__(self):
        return len(lengths)

    def __getitem__(self, row):
        labels = [-100 if (row + place) % 3 == 0 else place for place in range(lengths[row])]
        return {"input_ids": [row + 1] * lengths[row], "labels": labels, "id": row}


def noisy(sample):
    return {**sample, "noise": random.random()}


def described(batch):
    info = pop_step_info(batch)
    totals = [info.all_samples_this_step, info.all_targets, info.optimizer_targets]
    totals += [info.micro_step, info.micro_steps]
    supervised = int((batch["labels"][:, 1:] != -100).sum())
    content = [batch["input_ids"].tolist(), batch["noise"].tolist()]
    return [info.step, info.is_filler, [*info.keys], totals, supervised, info.loss_scale, content]


workers = WorkerOptions(num_workers=2, start_method="fork")
loader = ODBDataLoader(
    Rows(), token_budget=120, lengths=told, process_fn=noisy, accumulate=2, round_size=5,
    timeout_s=60.0, workers=workers,
)
state = folder / f"state-{how.partition('-')[2]}-{rank}.pt"
if how == "whole":
    found = [[described(batch) for batch in loader] for _ in range(2)]
elif how.startswith("begin"):
    batches = iter(loader)
    found = [described(next(batches)) for _ in range(int(how.partition("-")[2]))]
    torch.save(loader.state_dict(), state)
    print(json.dumps(found), flush=True)
    time.sleep(600)
else:
    loader.load_state_dict(torch.load(state, weights_only=True))
    found = [[described(batch) for batch in loader] for _ in range(2)]
loader.close()
r.finish(found)
"""


def keys_of_rank(rank):
    """The samples that a rank has where all lengths are right."""

    class Rows:
        def __len__(self):
            return SIZE

        def __getitem__(self, row):
            return {"input_ids": [1] * TOLD[row], "id": row}

    def run(exchange):
        loader = ODBDataLoader(
            Rows(),
            token_budget=120,
            lengths=TOLD,
            process_group=exchange,
            accumulate=2,
            round_size=5,
        )
        return [key for batch in loader for key in pop_step_info(batch).keys]

    return {*on_ranks(2, run)[rank]}


def write_lengths(folder, kind):
    rng = np.random.default_rng(0)
    of_rank = keys_of_rank(1)
    lengths = {
        "on one rank": [
            2 * length if row in of_rank else length for row, length in enumerate(TOLD)
        ],
        "too long on one rank": [
            max(1, length // 3) if row in of_rank else length for row, length in enumerate(TOLD)
        ],
        "of another dataset": rng.permutation(TOLD).tolist(),
        "none": TOLD,
    }[kind]
    (folder / "lengths.json").write_text(json.dumps([TOLD, lengths]))
    return lengths


def check_epoch(ranks, lengths):
    """Equal steps, each sample once over both ranks, exact totals; return who filled how often."""
    assert len(ranks[0]) == len(ranks[1])
    seen = []
    optimizer_targets = {}
    for step, steps in enumerate(zip(*ranks, strict=True)):
        numbers, fills, keys, totals, supervised, _, _ = zip(*steps, strict=True)
        assert {*numbers} == {step}
        assert totals[0] == totals[1]
        samples, targets, of_optimizer_step, micro_step, micro_steps = totals[0]
        real = [count for count, fill in zip(supervised, fills, strict=True) if not fill]
        assert targets == sum(real)
        assert samples == sum(map(len, keys))
        seen += sum(keys, [])
        optimizer_targets.setdefault(step - micro_step, []).append(targets)
        if micro_step == micro_steps - 1:
            assert sum(optimizer_targets[step - micro_step]) == of_optimizer_step
        for of_rank in keys:
            cost = len(of_rank) * max((lengths[key] for key in of_rank), default=0)
            assert len(of_rank) <= 1 or cost <= 120
    assert sorted(seen) == [*range(len(lengths))]
    return [sum(step[1] for step in rank) for rank in ranks]


@pytest.mark.parametrize("kind", ["on one rank", "too long on one rank", "of another dataset"])
def test_two_ranks_train_on_each_sample_once_though_lengths_lie(kind, tmp_path):
    lengths = write_lengths(tmp_path, kind)
    epochs = run_ranks(tmp_path, BODY, 2, tmp_path, "whole", timeout_s=240)
    for epoch in zip(*epochs, strict=True):
        check_epoch(epoch, lengths)


@pytest.mark.parametrize("steps", [4, 22])
def test_two_ranks_that_are_killed_resume_with_the_same_batches(steps, tmp_path):
    lengths = write_lengths(tmp_path, "on one rank")
    whole = run_ranks(tmp_path, BODY, 2, tmp_path, "whole", timeout_s=240)
    check_epoch([epochs[0] for epochs in whole], lengths)
    with RankJob(tmp_path, BODY, 2, tmp_path, f"begin-{steps}") as job:
        begun = [json.loads(program.line()) for program in job.ranks]
        job.kill()
    rest = run_ranks(tmp_path, BODY, 2, tmp_path, f"resume-{steps}", timeout_s=240)
    for rank in range(2):
        assert begun[rank] + rest[rank][0] == whole[rank][0]
        assert rest[rank][1] == whole[rank][1]
