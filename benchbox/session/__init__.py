"""THE training step. The benchmark, the audit and the trainer run this one and no other."""

from benchbox.session.build import build_session
from benchbox.session.step import Session, StepResult

__all__ = ["Session", "StepResult", "build_session"]
