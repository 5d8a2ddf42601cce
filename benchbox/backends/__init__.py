"""Backends: sharding and gradient reduction, each over one `Accelerator`; the one that runs is read back from live objects."""
