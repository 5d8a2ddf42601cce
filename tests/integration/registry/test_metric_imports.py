"""Imports of the metrics, in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def test_entry_points_are_read_on_the_first_use_and_not_on_import_and_torch_never():
    code = (
        "import importlib.metadata, sys\n"
        "groups = []\n"
        "class Entries:\n"
        "    def select(self, *, group):\n"
        "        return groups.append(group) or ()\n"
        "importlib.metadata.entry_points = lambda **selection: Entries().select(**selection) if selection else Entries()\n"
        "import benchbox.registry.metrics, benchbox.report.columns, benchbox.spec.schema\n"
        "print('benchbox.metrics' in groups)\n"
        "benchbox.registry.metrics.metrics()\n"
        "print(groups.count('benchbox.metrics'), 'torch' in sys.modules)"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["False", "1", "False"]
