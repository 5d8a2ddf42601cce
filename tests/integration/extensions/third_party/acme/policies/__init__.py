"""Policies of a third party."""
