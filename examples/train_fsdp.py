"""Train a tiny language model on several ranks with FSDP2, in dynamic batches; kill it, resume it.

    torchrun --nproc-per-node 4 examples/train_fsdp.py             # a few minutes on 2 cores
    torchrun --nproc-per-node 2 examples/train_fsdp.py --steps 12  # a quick look

The same as train_ddp.py, but each rank has a share of the weights and of the optimizer, and saves
it through torch.distributed.checkpoint. The loop is in data_parallel.py; this is what FSDP is asked
to do.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import LlamaForCausalLM

from data_parallel import Trainer, main


class FsdpTrainer(Trainer):
    """Every rank has a share of each weight, and of the optimizer's state for it."""

    def parallel(self, model: LlamaForCausalLM) -> LlamaForCausalLM:
        """Return the model with its decoder layers, and the rest, sharded over all ranks."""
        mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def micro_step(self, *, last: bool) -> AbstractContextManager[None]:
        """Have the ranks share gradients in the last micro-step."""
        assert isinstance(self.model, FSDPModule)  # fully_shard has changed its class
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def save(self, folder: Path) -> None:
        """Write the share of this rank."""
        dcp.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """Read the share of this rank."""
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


if __name__ == "__main__":
    main(FsdpTrainer, "train_fsdp", __doc__)
