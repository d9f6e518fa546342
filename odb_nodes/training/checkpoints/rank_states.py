"""The states of all ranks in one checkpoint: as files, or in torch.distributed.checkpoint."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchdata.nodes import Stateful

from odb_nodes._support.checks import check_count
from odb_nodes._support.content import from_bytes, to_bytes
from odb_nodes.core.alignment.exchange import group_rank
from odb_nodes.core.contract.state_file import check_readable, load_state, save_state
from odb_nodes.errors import StateError, TornStateError
from odb_nodes.training.checkpoints.resharding import check_saved_between_steps, reshard

if TYPE_CHECKING:
    from odb_nodes.core.alignment.exchange.base import ProcessGroupLike

logger = logging.getLogger("odb_nodes")

PREFIX = "odb_nodes-"  # begins the names of files that `save_rank_state` writes

_FILE = re.compile(r"(.*)rank(\d+)-of-(\d+)\.pt")
_DIGEST_BYTES = hashlib.sha256().digest_size


def save_rank_state(
    state: Mapping[str, Any], folder: str | os.PathLike[str], process_group: ProcessGroupLike = None
) -> Path:
    """Write this rank's state into a checkpoint folder, atomically. Every rank calls it.

    Args:
        state: the `state_dict()` of a loader, alone or in a dict with other plain data.
        folder: the folder of the checkpoint, the same on all ranks; created if needed.
        process_group: the ranks that share the data. Default: all ranks of the job.

    Returns:
        The file.

    Raises:
        StateError: `state` holds objects other than plain data and tensors; it was taken within an
            optimizer step (`save_state` writes it anyway, if you save the gradients too); or the
            folder holds states of another number of ranks.
    """
    check_saved_between_steps(state)
    rank, world_size = group_rank(process_group)
    path = Path(folder) / rank_file(rank, world_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = {file.world_size for file in rank_file_names(path.parent) if file.prefix == PREFIX}
    if sizes - {world_size}:
        # The old files stay: until all ranks have written, they are the only whole checkpoint.
        raise StateError(
            f"`{path.parent}` holds states of {_listed(sizes - {world_size})} ranks, but this job "
            f"has {world_size}. Save into another folder."
        )
    save_state(state, path)
    return path


def load_rank_state(folder: str | os.PathLike[str], process_group: ProcessGroupLike = None) -> Any:
    """Read this rank's state from a checkpoint folder.

    If another number of ranks wrote it, the states of all of them are read and resharded: see
    `reshard`.

    Args:
        folder: the folder that `save_rank_state` wrote into.
        process_group: the ranks that share the data, as for `save_rank_state`.

    Raises:
        FileNotFoundError: the folder has no state of any rank.
        StateError: the checkpoint is incomplete or damaged, or cannot be resharded to this number
            of ranks.
    """
    rank, world_size = group_rank(process_group)
    states, is_own = saved_states(folder, rank, world_size)
    return states[0] if is_own else reshard(states, world_size)[rank]


def saved_states(
    folder: str | os.PathLike[str], rank: int, world_size: int
) -> tuple[list[Any], bool]:
    """Return ([state of this rank], True), or (states of another number of ranks, False)."""
    files = rank_files(folder, PREFIX)
    if len(files) == world_size:
        return [load_state(files[rank])], True
    log_resharding(folder, len(files), world_size)
    return [*map(load_state, files)], False


def log_resharding(folder: str | os.PathLike[str], before: int, after: int) -> None:
    """Log that the states in a folder are resharded from `before` to `after` ranks."""
    logger.info("`%s` is resharded: %d ranks have saved it, %d load it", folder, before, after)


# --- the files ------------------------------------------------------------------------------------


class RankFileName(NamedTuple):
    """The name of a rank's file, and its parts."""

    name: str
    prefix: str
    rank: int
    world_size: int


def rank_file(rank: int, world_size: int, prefix: str = PREFIX) -> str:
    """Return the name of a rank's file."""
    return f"{prefix}rank{rank:05d}-of-{world_size:05d}.pt"


def rank_files(folder: str | os.PathLike[str], prefix: str | None = None) -> list[Path]:
    """Return the file of each rank; raise unless the folder has all files of one checkpoint.

    prefix: of the files; `None` for any.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"`{folder}` is no folder: there is no checkpoint to load.")
    files = [file for file in rank_file_names(folder) if prefix in (file.prefix, None)]
    if not files:
        inner = sorted(path.name for path in folder.iterdir() if path.is_dir())
        remedy = ": pass the folder of a checkpoint, with a file per rank"
        if inner:
            remedy = f", but folders {inner}: pass one of them"
        raise FileNotFoundError(f"`{folder}` has no states{remedy}.")
    prefixes = sorted({file.prefix for file in files})
    if len(prefixes) > 1:
        raise StateError(
            f"`{folder}` must hold the states of one checkpoint, but has files of several kinds, "
            f"which begin with {prefixes}. Put the files of the loader into another folder."
        )
    sizes = {file.world_size for file in files}
    if len(sizes) > 1:
        raise StateError(
            f"`{folder}` was saved by {_listed(sizes)} ranks: it is two checkpoints in one. Give "
            "each checkpoint its own folder."
        )
    (world_size,) = sizes
    paths = {file.rank: folder / file.name for file in files}
    if missing := sorted({*range(world_size)} - paths.keys()):
        raise TornStateError(
            f"`{folder}` lacks the states of ranks {missing}: a rank was stopped before it had "
            "saved. Use an earlier checkpoint."
        )
    return [paths[rank] for rank in range(world_size)]


def rank_file_names(folder: Path) -> list[RankFileName]:
    """Return the names of the ranks' files in a folder; none if there is no such folder."""
    try:
        names = os.listdir(folder)
    except PermissionError:
        raise
    except OSError:  # There is no such folder, or it was just removed.
        return []
    matches = filter(None, map(_FILE.fullmatch, names))
    return [RankFileName(match[0], match[1], int(match[2]), int(match[3])) for match in matches]


def _listed(sizes: set[int]) -> str:
    return " and ".join(map(str, sorted(sizes)))


# --- torch.distributed.checkpoint -----------------------------------------------------------------


class DistributedState:
    """A loader as a `Stateful` of torch.distributed.checkpoint.

    Each rank's state is one `BytesIO` under a separate key: a shared key would give every rank the
    state of rank 0, and a nested dict would lose keys that a fresh loader lacks. `dcp.load` reads
    only keys that `state_dict` returns: to load a checkpoint of another number of ranks, pass that
    number as `saved_by`, and each rank reads the states of all of them.

        dcp.save({"model": ..., "loader": DistributedState(loader)}, checkpoint_id=folder)
        dcp.load({"model": ..., "loader": DistributedState(loader)}, checkpoint_id=folder)

    Args:
        loader: a loader, with `state_dict` and `load_state_dict`.
        process_group: the ranks that share the data. Default: all ranks of the job.
        saved_by: number of ranks that saved the checkpoint to load. Default: the present number.
    """

    def __init__(
        self,
        loader: Stateful,
        process_group: ProcessGroupLike = None,
        *,
        saved_by: int | None = None,
    ) -> None:
        self._loader = loader
        self._rank, self._world_size = group_rank(process_group)
        self._key = rank_file(self._rank, self._world_size)
        before = self._world_size if saved_by is None else check_count("saved_by", saved_by)
        self._wanted = [self._key]
        if before != self._world_size:
            self._wanted = [rank_file(rank, before) for rank in range(before)]

    def state_dict(self) -> dict[str, Any]:
        """Return the bytes of this rank's state under its key, without waiting for other ranks.

        With `saved_by`: empty bytes under the keys of all ranks that saved, for `dcp.load`.

        Raises:
            StateError: the state holds objects other than plain data and tensors.
        """
        if self._wanted != [self._key]:
            return {key: io.BytesIO() for key in self._wanted}
        data = to_bytes(self._loader.state_dict())
        check_readable(io.BytesIO(data))
        return {self._key: io.BytesIO(hashlib.sha256(data).digest() + data)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's state, resharded if another number of ranks saved it.

        Raises:
            StateError: the state is damaged, is not from `state_dict`, was not saved by `saved_by`
                ranks, or cannot be resharded. (For a missing key, and for damage that torch's
                unpickling notices, `dcp.load` raises its own error first.)
        """
        states = [_from_buffer(state_dict, key) for key in self._wanted]
        if self._wanted != [self._key]:
            states = [reshard(states, self._world_size)[self._rank]]
        self._loader.load_state_dict(states[0])
        self._wanted = [self._key]  # `dcp.save` calls `state_dict` next


def _from_buffer(state_dict: object, key: str) -> Any:
    """Return the state of one rank from the result of `DistributedState.state_dict`."""
    buffers = state_dict if isinstance(state_dict, Mapping) else {}
    buffer = buffers.get(key)
    if buffer is None and any(_FILE.fullmatch(str(name)) for name in buffers):
        raise StateError(
            f"the checkpoint has no `{key}`, but {sorted(buffers)}: it was saved by another "
            "number of ranks. Pass that number as `saved_by`."
        )
    if not isinstance(buffer, io.BytesIO):
        raise StateError(
            "the state must be the result of `DistributedState.state_dict`, bytes under "
            f"`{key}`, but is {state_dict!r:.80}."
        )
    saved = buffer.getvalue()
    digest, data = saved[:_DIGEST_BYTES], saved[_DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        raise StateError(
            f"`{key}` of the checkpoint is damaged: the digest of its {len(saved)} bytes is wrong. "
            "Use an earlier checkpoint."
        )
    return from_bytes(data)
