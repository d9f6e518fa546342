"""A record of what became of every sample, and its audit."""

from odb_nodes.ledger.auditing import audit
from odb_nodes.ledger.ledger import Ledger
from odb_nodes.ledger.report import Audit, EpochAudit

__all__ = ["Audit", "EpochAudit", "Ledger", "audit"]
