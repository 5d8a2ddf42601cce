"""Base classes of policies that share an architecture, and the losses and samplers they share."""
