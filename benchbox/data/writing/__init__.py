"""Datasets written: recorded, resumed, converted."""
