"""Dynamic batches for the `Trainer` of transformers.

    trainer = ODBTrainer(model, args, train_dataset=dataset, odb=ODBConfig(token_budget=16384))
    trainer.train(resume_from_checkpoint=True)

`configure_trainer` gives dynamic batches to an existing trainer.
"""

from odb_nodes._support.checks import import_extra

for module in ("transformers", "accelerate"):
    import_extra(module, "hf")

from odb_nodes.integrations.huggingface.config import ODBConfig  # noqa: E402
from odb_nodes.integrations.huggingface.trainer import (  # noqa: E402
    ODBSeq2SeqTrainer,
    ODBTrainer,
    ODBTrainerMixin,
    configure_trainer,
)
from odb_nodes.integrations.learning_rate import LrScaling  # noqa: E402

__all__ = [
    "LrScaling",
    "ODBConfig",
    "ODBSeq2SeqTrainer",
    "ODBTrainer",
    "ODBTrainerMixin",
    "configure_trainer",
]
