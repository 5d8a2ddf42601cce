"""Who shards and reduces. One `Accelerator` underneath each; what runs is read back from live objects."""
