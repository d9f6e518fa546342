"""Choose the collate function that makes the batches of a budget."""

from __future__ import annotations

from odb_nodes.collate.packed_collate import PackedCollate
from odb_nodes.collate.padding_collate import PaddingCollate
from odb_nodes.collate.protocol import Collate
from odb_nodes.planning import TokenBudget

_OF_THE_BUDGET = ("pad_to_multiple_of", "shapes", "max_samples")


def collate_for(budget: TokenBudget | None, collate_fn: Collate | None) -> Collate:
    """Return `collate_fn`, or by default the collate function for the groups of a budget."""
    if budget is None:
        return collate_fn or PaddingCollate()
    packed = budget.layout == "packed"
    kind: type[PaddingCollate] | type[PackedCollate] = PackedCollate if packed else PaddingCollate
    if collate_fn is None:
        return kind.of(budget)
    if not isinstance(collate_fn, (PaddingCollate, PackedCollate)):
        return collate_fn
    name = type(collate_fn).__name__
    if not isinstance(collate_fn, kind):
        raise ValueError(
            f'`collate_fn` must be for groups of layout "{budget.layout}", which the budget has, '
            f"but is a `{name}` instead. {_remedy(collate_fn, kind)}"
        )
    for field, expected in vars(kind.of(budget)).items():
        given = getattr(collate_fn, field)
        if field in _OF_THE_BUDGET and given != expected:
            raise ValueError(
                f"`{field}` of `collate_fn` must be that of the budget, {_shown(expected)}, but is "
                f"{_shown(given)} instead. Use `{name}.of(budget, ...)`."
            )
    return collate_fn


def _remedy(collate_fn: Collate, kind: type) -> str:
    if type(collate_fn) in (PaddingCollate, PackedCollate):
        return f"Leave it out, use `{kind.__name__}.of(budget)`, or choose the other layout."
    if kind is PackedCollate:  # for images, say
        return 'Take `layout="padded"`: only `PackedCollate` packs, and it packs text alone.'
    return 'Take `layout="packed"`, or derive it from `PaddingCollate`.'


def _shown(value: object) -> str:
    return f"a ladder of {len(value)} shapes" if isinstance(value, tuple) else repr(value)
