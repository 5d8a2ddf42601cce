"""Shared building blocks of policies: modules, token sequences, families of policies, FLOP counts, published weights."""
