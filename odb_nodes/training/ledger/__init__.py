"""A record of the fate of every sample, and its audit."""

from odb_nodes.training.ledger.audit_result import Audit, EpochAudit
from odb_nodes.training.ledger.auditing import audit
from odb_nodes.training.ledger.ledger import Ledger

__all__ = ["Audit", "EpochAudit", "Ledger", "audit"]
