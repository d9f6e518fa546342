"""Compare the configuration in a state with the configuration of the node that loads the state."""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from odb_nodes._support.user_warning import warn_user
from odb_nodes.errors import StateError

Config = Mapping[str, Any]

CHANGE_REMEDY = (
    "Build the graph as it was, or load with `strict=False` if the change is meant (after "
    "`Checkpoints.load`: `loader.load_state_dict(loader.state_dict(), strict=False)`): the rest of "
    "the epoch then differs, and after a change of the order of samples it may repeat or miss "
    "some. Within an epoch, a change that a plan depends on is refused even then."
)
_CHANGE_ACCEPTED = (
    "By `strict=False` the run continues with the change: the rest of the epoch differs, and after "
    "a change of the order of samples it may repeat or miss some."
)
_LOAD_SMALLER = "To resume with a smaller budget, load with `change_budget=True`. "
_ONLY_SMALLER = "With `change_budget=True` the limits of a budget may only become smaller. "
_NO_SHAPES = (
    "With `shapes` a budget cannot become smaller within an epoch, even with `change_budget`: "
    "groups that were formed before would have more rows than their shape has now. "
)
_BUDGET_LIMITS = ("budget.tokens", "budget.max_samples", "budget.max_patches")
_NODE_OF_ALL_RANKS = "RankAligner"  # the node whose `world_size` is the job's number of ranks
_LONG_CHARACTERS = 160
_CONTEXT_CHARACTERS = 40


class Loading(NamedTuple):
    """How the present load treats differences between state and graph."""

    may_differ: bool = False  # a changed field of a configuration warns instead of raising
    smaller_budget: bool = False  # the limits of a budget may be lower than in the state
    makes_all: bool = False  # all samples are made and compared before the first batch
    leaves_epoch: bool = False  # the next epoch begins; the epoch of the state is not continued


_STRICT = Loading()
_loading: contextvars.ContextVar[Loading] = contextvars.ContextVar("loading", default=_STRICT)
loading = _loading.get


@contextlib.contextmanager
def loading_with(**changes: bool) -> Iterator[None]:
    """Change fields of `Loading` within this context."""
    token = _loading.set(_loading.get()._replace(**changes))
    try:
        yield
    finally:
        _loading.reset(token)


def check_config(node: str, saved: Config, present: Config, fixed: Collection[str] = ()) -> None:
    """Compare the configuration of a node with the configuration in its state."""
    changes = _changes(saved, present)
    if not changes:
        return
    message = _message({node: (saved, present)})
    if blocked := [name for name in changes if name in fixed]:
        raise StateError(
            f"{message}By `strict=False`, `{'`, `'.join(blocked)}` can change only between epochs: "
            "build the node as it was, or load a state that was saved after the last step of an "
            "epoch."
        )
    if not loading().may_differ:
        raise StateError(message + CHANGE_REMEDY)
    warn_user(message + _CHANGE_ACCEPTED)


def several_changes(nodes: Iterable[tuple[str, Config]], state: object) -> str | None:
    """Return the text of an error that names the changes of all nodes; `None` for 0 or 1 node.

    A reset names the changes of the first node only. Nodes of the same name are not compared.
    """
    configs = [(part["node"], part["config"]) for part in sealed_states(state)]
    present, saved = _unique(nodes), _unique(configs)
    pairs = {name: (saved[name], present[name]) for name in present if name in saved}
    changed = {name: pair for name, pair in pairs.items() if _changes(*pair)}
    return _message(changed) + CHANGE_REMEDY if len(changed) > 1 else None


def _unique(named: Iterable[tuple[str, Config]]) -> dict[str, Config]:
    """Return the configurations whose name occurs once."""
    pairs = list(named)
    counts = Counter(name for name, _ in pairs)
    return {name: config for name, config in pairs if counts[name] == 1}


def sealed_states(state: object) -> Iterator[Mapping[str, Any]]:
    """Yield each sealed state within a state, with its `node` and `config`."""
    if isinstance(state, Mapping):
        if isinstance(state.get("node"), str) and isinstance(state.get("config"), Mapping):
            yield state
        state = [*state.values()]
    for part in state if isinstance(state, (list, tuple)) else ():
        yield from sealed_states(part)


def _equal(saved: Any, present: Any) -> bool:
    """Compare as `==` does, but True is not 1."""
    return type(saved) is type(present) and bool(saved == present)


def _changes(saved: Config, present: Config) -> dict[str, str]:
    """Return a clause of an error for each changed field."""
    changes = {}
    may_shrink = loading().smaller_budget and not _has_padded_shapes(present)
    for name in sorted({*saved, *present}, key=str):
        pair = saved.get(name, "absent"), present.get(name, "absent")
        if not (_equal(*pair) or (may_shrink and _is_smaller(name, *pair))):
            saved_text, present_text = _shortened(*map(repr, pair))
            changes[name] = f"`{name}` was {saved_text} when saved, but is {present_text} now"
    return changes


def _message(changed: Mapping[str, tuple[Config, Config]]) -> str:
    parts = [f"{node}: {'; '.join(_changes(*pair).values())}" for node, pair in changed.items()]
    remedies = {_remedy(node, *pair) for node, pair in changed.items()}
    return f"the state does not fit {'. '.join(parts)}. {''.join(sorted(remedies))}"


def _remedy(node: str, saved: Config, present: Config) -> str:
    """Return the remedy for another number of ranks, or another budget; "" for other changes."""
    saved_ranks, ranks = saved.get("world_size"), present.get("world_size")
    if node == _NODE_OF_ALL_RANKS and saved_ranks != ranks:
        return (
            f"To resume with another number of ranks, take the states of all {saved_ranks}: by "
            f"`reshard(states, {ranks})`, `load_rank_state` or `Checkpoints.load`. "
        )
    limits = [(name, saved.get(name), present.get(name)) for name in _BUDGET_LIMITS]
    changed = [limit for limit in limits if not _equal(*limit[1:])]
    may_shrink = loading().smaller_budget
    if not all(_is_smaller(*limit) for limit in changed):
        return _ONLY_SMALLER if may_shrink else ""
    if changed and _has_padded_shapes(present):
        return _NO_SHAPES
    return _LOAD_SMALLER if changed and not may_shrink else ""


def _is_smaller(name: str, saved: Any, present: Any) -> bool:
    """Return whether a field is a limit of a budget that is lower now than in the state."""
    if name not in _BUDGET_LIMITS or type(present) is not int:
        return False
    return saved is None or (type(saved) is int and present < saved)


def _has_padded_shapes(config: Config) -> bool:
    return config.get("budget.shapes") is not None and config.get("budget.layout") == "padded"


def _shortened(*texts: str) -> tuple[str, ...]:
    """Return texts. Long texts are cut to the part around their first difference."""
    if max(map(len, texts)) <= _LONG_CHARACTERS:
        return texts
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    start = max(0, sum(1 for _ in alike) - _CONTEXT_CHARACTERS)
    end = start + _LONG_CHARACTERS
    return tuple(
        f"{'...' * (start > 0)}{text[start:end]}{'...' * (end < len(text))}" for text in texts
    )
