"""Choose the collate function that makes the batches of a budget."""

from __future__ import annotations

from odb_nodes.core.collate.packed_collate import PackedCollate
from odb_nodes.core.collate.padding_collate import PaddingCollate
from odb_nodes.core.collate.protocol import Collate
from odb_nodes.core.collate.rows import RowsCollate
from odb_nodes.core.planning import TokenBudget

_BUDGET_FIELDS = ("pad_to_multiple_of", "shapes", "max_samples")


def collate_for(budget: TokenBudget | None, collate_fn: Collate | None) -> Collate:
    """Return `collate_fn`, or by default the collate function for the groups of a budget."""
    if budget is None:
        return collate_fn or PaddingCollate()
    packed = budget.layout == "packed"
    kind: type[PaddingCollate] | type[PackedCollate] = PackedCollate if packed else PaddingCollate
    if collate_fn is None:
        return kind.of(budget)
    if isinstance(collate_fn, RowsCollate):
        collate_for(budget, collate_fn.collate_fn)  # as the rows are collated
    if not isinstance(collate_fn, (PaddingCollate, PackedCollate)):
        return collate_fn
    name = type(collate_fn).__name__
    if collate_fn.layout != budget.layout:
        raise ValueError(
            f'`collate_fn` must be for groups of layout "{budget.layout}", as the budget is, '
            f'but is a `{name}` of layout "{collate_fn.layout}" instead. Use '
            f'`layout="{collate_fn.layout}"` for the budget; or, for text, '
            f"`{kind.__name__}.of(budget)`, and for images "
            "`VisionLanguageCollate.of(budget, ...)`."
        )
    expected_collate = kind.of(budget)
    for field in _BUDGET_FIELDS:
        if not hasattr(expected_collate, field):  # `PaddingCollate` has no `max_samples`.
            continue
        expected = getattr(expected_collate, field)
        value = getattr(collate_fn, field)
        if value != expected:
            raise ValueError(
                f"`{field}` of `collate_fn` must equal the budget's, {_shown(expected)}, but is "
                f"{_shown(value)} instead. Use `{name}.of(budget, ...)`."
            )
    return collate_fn


def _shown(value: object) -> str:
    return f"a ladder of {len(value)} shapes" if isinstance(value, tuple) else repr(value)
