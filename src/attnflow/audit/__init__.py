"""Audits of real models: does an output move when an input changes that the declared order keeps from it?

A leak can come through a scan, a normalisation over the sequence, a cache or a custom kernel that no mask shows, so
the model itself is asked: inputs are changed (or gradients taken) and every module is watched.
"""

from attnflow.audit.auditor import Audit
from attnflow.audit.report import AuditReport, ModuleResult, Violation

__all__ = ["Audit", "AuditReport", "ModuleResult", "Violation", "check", "measure"]

audit = Audit()
check = audit.__call__
measure = audit.measure
