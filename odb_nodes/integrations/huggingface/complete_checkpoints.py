"""The checkpoint that a run resumes from: the newest complete one, the same on all ranks."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.contract.state_file import load_state
from odb_nodes.errors import StateError, TornStateError
from odb_nodes.training.checkpoints.rank_states import PREFIX, rank_files


def agreed_checkpoint(args: Any, resume_from: str | bool) -> str | None:
    """Return the checkpoint to resume from, the same on all ranks; True: the last complete one."""
    checkpoint_or_error: Any = resume_from
    if args.process_index == 0:
        try:
            if isinstance(resume_from, bool):
                checkpoint_or_error = _last_complete(Path(args.output_dir))
            else:
                with suppress(FileNotFoundError):  # Each rank raises it when it loads.
                    _check_complete(Path(resume_from))
        except (OSError, StateError) as error:
            checkpoint_or_error = error
    (agreed,) = broadcast_object_list([checkpoint_or_error])
    if isinstance(agreed, Exception):
        raise agreed
    checkpoint: str | None = agreed
    return checkpoint


def warn_of_other_checkpoints(args: Any) -> None:
    """Warn of checkpoints of an earlier run, which a resume of this run could take."""
    if args.process_index or args.save_strategy == "no" or not os.path.isdir(args.output_dir):
        return
    last = get_last_checkpoint(args.output_dir)
    if last is not None:
        warn_user(
            f"`{args.output_dir}` has checkpoints of an earlier run, up to "
            f"`{os.path.basename(last)}`, but this run begins anew: `resume_from_checkpoint=True` "
            "would take the checkpoint with the highest step. Remove the old ones, or use another "
            "`output_dir`."
        )


def _last_complete(folder: Path) -> str | None:
    """Return the newest complete checkpoint, and warn of those that are skipped."""
    matches = [re.fullmatch(PREFIX_CHECKPOINT_DIR + r"-(\d+)", name) for name in os.listdir(folder)]
    torn: dict[Path, Exception] = {}
    for step in sorted((int(match[1]) for match in matches if match), reverse=True):
        checkpoint = folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        try:
            _check_complete(checkpoint)
        except (FileNotFoundError, TornStateError) as error:
            torn[checkpoint] = error
            continue
        for newer, torn_error in torn.items():
            problem = f"is not complete, and is skipped: {torn_error} Remove it."
            if not isinstance(torn_error, TornStateError):
                problem = (
                    "has no state of the batches, and is skipped: it was saved with "
                    "`save_only_model`, without dynamic batches, or until a kill."
                )
            warn_user(f"`{newer.name}` {problem} The run resumes from `{checkpoint.name}`.")
        return str(checkpoint)
    for newest, torn_error in torn.items():
        if isinstance(torn_error, TornStateError):
            raise torn_error
        return str(newest)
    return None


def _check_complete(checkpoint: Path) -> None:
    """Raise if a state of a rank, or a file of the `Trainer`, is missing or truncated."""
    for file in rank_files(checkpoint, PREFIX):
        for name, size in (load_state(file).get("files") or {}).items():
            actual = 0
            with suppress(FileNotFoundError):
                actual = (checkpoint / name).stat().st_size
            if actual < size:
                raise TornStateError(
                    f"`{name}` of `{checkpoint}` must have {size} bytes, as when it was saved, but "
                    f"has {actual}. Use an earlier checkpoint."
                )
