"""Tasks that a trainer weighs: as a loop of one's own weighs them, and alike after a resume."""

import os
from unittest import mock

import language_models as lm
import pytest
import torch
import torch.distributed as dist
import trainers
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from memory_faults import above, fail, never
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import Trainer

from odb_nodes import Observation, ODBDataLoader, PaddingCollate, TokenBudget, pop_step_info
from odb_nodes.integrations.huggingface import ODBTrainer, configure_trainer
from odb_nodes.integrations.huggingface.config import check_trainer
from odb_nodes.integrations.lightning import ODBCallback, ODBDataModule
from odb_nodes.training.tasks import GradNorm, PCGrad, TaskWeights

pytestmark = [
    pytest.mark.filterwarnings(trainers.OF_TRANSFORMERS),
    pytest.mark.filterwarnings(trainers.OF_LIGHTNING),
    pytest.mark.filterwarnings("ignore:the run (continues|ends) after:UserWarning"),
]

SIZE, EPOCHS, TASKS = 40, 2, ("even", "odd")


def observe(sample):
    tokens, targets = len(sample["input_ids"]), lm.targets_of(sample["labels"])
    return Observation(tokens, targets, task=TASKS[sample["id"] % 2])


def weighing(name, model):
    """The object that weighs the tasks of a model."""
    weights = TaskWeights({"even": 1.0, "odd": 3.0})
    if name == "GradNorm":
        return GradNorm(weights, model.hidden.parameters(), every=2, rate=0.1)
    return PCGrad(weights, model.parameters()) if name == "PCGrad" else weights


KINDS = ("TaskWeights", "GradNorm", "PCGrad")


def values_of(tasks):
    return dict(tasks if isinstance(tasks, TaskWeights) else tasks.weights)


def own_loop(name, accumulate):
    """The weights of the model and of the tasks after a run without a trainer."""
    model = lm.Decoder()
    tasks = weighing(name, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=trainers.LR)
    options = {"token_budget": 64, "window": 12, "round_size": 4, "seed": 42}
    options |= {"observe": observe, "tasks": TASKS, "accumulate": accumulate}
    loader = ODBDataLoader(lm.Texts(SIZE), **options)
    for _ in range(EPOCHS):
        for batch in loader:
            info = pop_step_info(batch)
            logits = model.logits(batch["input_ids"])[:, :-1].transpose(1, 2)
            losses = cross_entropy(logits, batch["labels"][:, 1:], reduction="none")
            if name == "PCGrad":
                tasks.backward(losses, info)
            else:
                if name == "GradNorm":
                    tasks.observe(losses, info)
                weights = tasks if name == "TaskWeights" else tasks.weights
                weights.loss(losses, info).backward()
            if info.ends_optimizer_step:
                if name != "PCGrad" and dist.is_initialized():
                    for parameter in model.parameters():
                        dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
                if name != "TaskWeights":
                    tasks.step()
                optimizer.step()
                optimizer.zero_grad()
    return lm.weights_of(model), values_of(tasks)


# --- the Trainer of transformers ------------------------------------------------------------------


def trainer_of(folder, name, make=ODBTrainer, model=lm.Plain, odb=(), **options):
    model = model()
    fields = {"task_weights": weighing(name, model), "observe": observe} | dict(odb)
    arguments = {"learning_rate": trainers.LR, "num_train_epochs": EPOCHS}
    arguments |= {"lr_scheduler_type": "constant"} | options
    return trainers.make_trainer(folder, kind=make, model=model, odb=fields, **arguments)


def run_trainer(folder, name, resume=None, **options):
    trainer = trainer_of(folder, name, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, (lm.weights_of(trainer.model), values_of(trainer.odb.task_weights))


def test_a_trainer_that_exists_evaluates_the_mean_over_tokens(tmp_path):
    model = lm.Plain()
    args = trainers.arguments(tmp_path, max_steps=3, gradient_accumulation_steps=2)
    data = {"train_dataset": lm.Texts(SIZE), "eval_dataset": lm.Texts(7)}
    stock = Trainer(model, args, data_collator=PaddingCollate(), **data)
    trainer = configure_trainer(
        stock, token_budget=64, window=12, observe=observe, task_weights=weighing("GradNorm", model)
    )
    assert trainer is stock
    trainer.train()
    expected = lm.expected_loss(lm.weights_of(model), range(7))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_steps_that_run_out_of_memory_weigh_their_parts(tmp_path, layout):
    def weights_after(fails):
        model = fail(PerToken(), "logits", fails)
        odb = {"token_budget": TokenBudget(64, layout=layout), "on_oom": "split"}
        options = {"model": lambda: model, "odb": odb, "num_train_epochs": 1}
        trainer, (weights, _) = run_trainer(tmp_path, "TaskWeights", **options)
        return weights, sum(trainers.logs_of(trainer, "odb/ooms"))

    (whole, no_ooms), (failing, ooms) = weights_after(never), weights_after(above(30))
    assert failing == pytest.approx(whole, abs=1e-12)
    assert ooms > no_ooms == 0


class PerToken(lm.Plain):
    """Predicts each token from the one before alone, so samples may share a row."""

    def features(self, input_ids):
        return torch.tanh(self.hidden(self.embedding(input_ids)))

    def forward(self, input_ids, attention_mask=None, position_ids=None, labels=None, id=None):
        return super().forward(input_ids, id=id)


class Unlabelled(lm.Plain):
    """Returns its own loss, without `super`."""

    def forward(self, input_ids, attention_mask=None):
        return {"loss": self.logits(input_ids).mean()}


class NeedsLabels(lm.Plain):
    """Cannot be called without them."""

    def forward(self, input_ids, labels, attention_mask=None):
        return super().forward(input_ids, labels=labels)


class Masked(PaddingCollate):
    """Supervises less than the samples say."""

    def __call__(self, samples):
        batch = super().__call__(samples)
        batch["labels"][:, 1] = -100
        return batch


def of_another_model(name):
    return {"task_weights": weighing(name, lm.Plain())}


def part_of(model):
    return PCGrad(TaskWeights({"even": 1.0, "odd": 1.0}), model.head.parameters())


REFUSED = {
    "a name": ("TaskWeights", {"odb": {"task_weights": {"even": 1}}}, TypeError, r"`TaskWeights\("),
    "loss_is": ("TaskWeights", {"odb": {"loss_is": "token_mean"}}, ValueError, "`loss_is` and"),
    "skip": ("TaskWeights", {"odb": {"on_oom": "skip"}}, ValueError, '`on_oom="skip"` must'),
    "split": ("GradNorm", {"odb": {"on_oom": "split"}}, ValueError, "`GradNorm` .* `on_oom` or"),
    "auto": ("PCGrad", {"odb": {"token_budget": "auto"}}, ValueError, "`PCGrad` .* `on_oom` or"),
    "another model": ("GradNorm", {"odb": of_another_model("GradNorm")}, ValueError, "2 of 2 are"),
    "a number": (
        "TaskWeights",
        {"compute_loss_func": lambda outputs, labels, **_: outputs["logits"].sum()},
        ValueError,
        "returned a single number",
    ),
    "no logits": ("TaskWeights", {"model": Unlabelled}, ValueError, "`compute_loss_func` must be"),
    "needed": ("TaskWeights", {"model": NeedsLabels}, ValueError, "if `forward` .* `labels`"),
    "labels": ("TaskWeights", {"data_collator": Masked()}, ValueError, "supervised tokens, but"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_trainer_cannot_weigh_is_refused_by_name(tmp_path, case):
    name, options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        run_trainer(tmp_path, name, **options)


def test_projections_need_all_that_is_trained(tmp_path):
    trainer = trainer_of(tmp_path, "PCGrad")
    with pytest.raises(
        ValueError, match="all trained parameters of .* 0 of 2 are not .* 3 of 5 are missing"
    ):
        part_of(trainer.model).check_model(trainer.model)


@pytest.mark.parametrize(
    ("name", "message"),
    [("is_fsdp_enabled", "FSDP"), ("is_deepspeed_enabled", "DeepSpeed"), ("model_init", "`model_")],
)
def test_gradients_of_tasks_need_whole_parameters(tmp_path, name, message):
    trainer = trainer_of(tmp_path, "PCGrad")
    setattr(trainer, name, lambda: None)
    with pytest.raises(ValueError, match=f"`PCGrad` must not be given with {message}"):
        check_trainer(trainer, trainer.odb)


# --- Lightning ------------------------------------------------------------------------------------


class TaskModule(LightningModule):
    """Returns the loss of its tasks, as its callback weighs it."""

    def __init__(self, odb, model):
        super().__init__()
        self.odb, self.model = odb, model

    def losses_of(self, batch):
        logits = self.model(**batch)["logits"][:, :-1].transpose(1, 2)
        return cross_entropy(logits, batch["labels"][:, 1:], reduction="none")

    def training_step(self, batch, batch_idx):
        return self.odb.task_loss(self.losses_of(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=trainers.LR)


class Unweighed(TaskModule):
    def training_step(self, batch, batch_idx):
        return self.losses_of(batch).mean()


def run_lightning(name, accumulate, *callbacks, resume=None, kind=TaskModule, **options):
    model = lm.Plain()
    tasks = weighing(name, model)
    odb = ODBCallback(task_weights=tasks)
    module = kind(odb, model)
    arguments = {"max_epochs": EPOCHS, "accumulate_grad_batches": accumulate, **options}
    trainer = trainers.lightning_trainer(odb, *callbacks, **arguments)
    loader = {"token_budget": 64, "window": 12, "round_size": 4, "seed": 42, "observe": observe}
    trainer.fit(module, datamodule=ODBDataModule(lm.Texts(SIZE), **loader), ckpt_path=resume)
    return lm.weights_of(model), values_of(tasks)


class ShardedTasks(TaskModule):
    def configure_model(self):
        fully_shard(self.model)


def test_ranks_that_share_parameters_weigh_tasks(tmp_path):
    body = """
        import test_tasks
        from lightning.pytorch.strategies import ModelParallelStrategy
        seen = []
        class Kept(test_tasks.ShardedTasks):
            def on_train_end(self):
                whole = [weight.full_tensor().flatten() for weight in self.model.parameters()]
                seen.append(torch.cat(whole).tolist())
        ranks = {"strategy": ModelParallelStrategy(), "devices": 2, "kind": Kept}
        weights_of, test_tasks.lm.weights_of = test_tasks.lm.weights_of, lambda model: None
        test_tasks.run_lightning("TaskWeights", 2, **ranks)
        test_tasks.lm.weights_of = weights_of
        r.finish([*seen, test_tasks.own_loop("TaskWeights", 2)[0].tolist()])
    """
    first, second = trainers.results_of(tmp_path, body, init=False)
    assert first == second
    assert first[0] == pytest.approx(first[1], rel=1e-10)


def test_a_loss_of_lightning_that_weighs_no_tasks_is_an_error():
    with pytest.raises(RuntimeError, match="must return `callback.task_loss"):
        run_lightning("TaskWeights", 1, kind=Unweighed)
    with pytest.raises(ValueError, match="`GradNorm` must not be given with `16-mixed`"):
        run_lightning("GradNorm", 1, plugins=MixedPrecision("16-mixed", "cpu"))
    refused = pytest.raises(ValueError, match="`PCGrad` needs whole gradients .* `ModelParallel")
    try:
        with mock.patch.dict(os.environ), refused:  # Lightning makes this process a rank.
            run_lightning("PCGrad", 1, strategy=ModelParallelStrategy())
    finally:
        dist.destroy_process_group()


# --- what both keep -------------------------------------------------------------------------------


def under_transformers(folder, name, accumulate, resume=None, ranks=1):
    options = {"save_steps": 1, "gradient_accumulation_steps": accumulate}
    trainer, result = run_trainer(folder, name, resume, **options)
    if resume is None:
        logged = trainers.logs_of(trainer, "odb/weight/odd")
        assert (len({*logged}) > 1) == (name == "GradNorm") and logged
    return result, [f"{folder}/checkpoint-{step + 1}" for step in range(trainer.state.global_step)]


def under_lightning(folder, name, accumulate, resume=None, ranks=1):
    save = trainers.SaveEach(folder)
    ranks = {"strategy": "ddp", "devices": ranks} if ranks > 1 else {}
    result = run_lightning(name, accumulate, save, resume=resume, **ranks)
    return result, [f"{folder}/{number + 1}.ckpt" for number in range(save.number)]


TRAINERS = {"Transformers": under_transformers, "Lightning": under_lightning}
"""(folder, kind of weights, accumulation) -> weights of the model and tasks, and checkpoints."""


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_tasks_are_weighed_as_a_loop_does_and_resume_without_a_difference(tmp_path, trainer, name):
    train = TRAINERS[trainer]
    (weights, tasks), saved = train(tmp_path / "whole", name, 3)
    expected, expected_tasks = own_loop(name, 3)
    assert weights == pytest.approx(expected, rel=1e-12)
    assert tasks == pytest.approx(expected_tasks, rel=1e-12)
    assert (tasks == {"even": 1.0, "odd": 3.0}) == (name != "GradNorm")
    for path in (saved[2], saved[len(saved) // 2], saved[-2]):
        (resumed, resumed_tasks), _ = train(tmp_path / "again", name, 3, path)
        assert torch.equal(resumed, weights)
        assert resumed_tasks == tasks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "name"),
    [("Transformers", "TaskWeights"), ("Transformers", "PCGrad"), ("Lightning", "GradNorm")],
)
def test_two_ranks_weigh_tasks_as_a_loop_on_two_ranks_and_resume(tmp_path, trainer, name):
    body = """
        import test_tasks
        folder, trainer, name = sys.argv[1:]
        whole, saved = test_tasks.TRAINERS[trainer](folder, name, 2, ranks=2)
        resumed, _ = test_tasks.TRAINERS[trainer](folder + "/again", name, 2, saved[1], ranks=2)
        results = (test_tasks.own_loop(name, 2), whole, resumed)
        r.finish([[weights.tolist(), tasks] for weights, tasks in results])
    """
    first, second = trainers.results_of(tmp_path, body, str(tmp_path), trainer, name, init=False)
    assert first == second
    loop, whole, resumed = first
    assert resumed == whole
    assert whole[0] == pytest.approx(loop[0], rel=1e-10)
    assert whole[1] == pytest.approx(loop[1], rel=1e-12)
