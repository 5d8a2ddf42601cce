"""Samples as rows of the batch table: of a dataset, a mixture, or generated."""
