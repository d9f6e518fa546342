"""Dynamic batches for the `Trainer` of Lightning.

    data = ODBDataModule(dataset, token_budget=16384)
    trainer = Trainer(callbacks=[ODBCallback()])
    trainer.fit(model, datamodule=data, ckpt_path="last")

In your own data module, return `ODBCallback.batches(loader)` from `train_dataloader`.
"""

from odb_nodes._support.checks import import_extra

import_extra("lightning.pytorch", "lightning")

from odb_nodes.integrations.lightning.callback import ODBCallback  # noqa: E402
from odb_nodes.integrations.lightning.data_module import ODBDataModule  # noqa: E402

__all__ = ["ODBCallback", "ODBDataModule"]
