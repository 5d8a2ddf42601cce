"""The Python interface: what the commands do, from scripts and notebooks. Its names are attributes of `benchbox`."""
