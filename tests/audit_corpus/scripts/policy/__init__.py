"""A small policy with normalisation of its inputs."""
