"""Launches on several machines: their settings, the files by which the nodes coordinate, node 0 and the others."""
