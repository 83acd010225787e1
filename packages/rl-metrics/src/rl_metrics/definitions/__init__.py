"""Every metric of the project: name, unit, reduction, meaning, healthy values."""
