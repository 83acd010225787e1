"""Diagnosis of unhealthy runs from their records."""

from rl_metrics.doctor.diagnosing import diagnose
from rl_metrics.doctor.diagnosis import Cause, Diagnosis, DoctorReport, NoFinding

__all__ = ["Cause", "Diagnosis", "DoctorReport", "NoFinding", "diagnose"]
