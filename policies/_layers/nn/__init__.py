"""Modules: attention, decoder layers, norms, vision tower, projections, embeddings."""
