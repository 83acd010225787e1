"""Diagnosis of unhealthy runs from their records."""

from rl_metrics.doctor.diagnosing import diagnose
from rl_metrics.doctor.diagnosis import Ailment, Cause, Diagnosis, Reading

__all__ = ["Ailment", "Cause", "Diagnosis", "Reading", "diagnose"]
