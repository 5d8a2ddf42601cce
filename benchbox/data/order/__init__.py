"""Order of samples: functions of the seed and the position, the same on every rank."""
