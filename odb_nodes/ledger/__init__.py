"""A record of the fate of every sample, and its audit."""

from odb_nodes.ledger.auditing import Audit, EpochAudit, audit
from odb_nodes.ledger.ledger import Ledger

__all__ = ["Audit", "EpochAudit", "Ledger", "audit"]
