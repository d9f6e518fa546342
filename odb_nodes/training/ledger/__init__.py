"""A record of the fate of every sample, and its audit."""

from odb_nodes.training.ledger.auditing import Audit, EpochAudit, audit
from odb_nodes.training.ledger.ledger import Ledger

__all__ = ["Audit", "EpochAudit", "Ledger", "audit"]
