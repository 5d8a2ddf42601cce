"""Every rank trains its own FAST tokenizer: they must not differ."""

import hashlib
import subprocess
import sys

from benchbox.data.fast import FastTokenizer
from tests.support.action_chunks import HORIZON, VOCAB, smooth_chunks
from tests.support.processes import minimal_environment


def test_every_process_trains_the_same_tokenizer(tmp_path):
    """Hash seeds differ between processes."""
    code = """
import sys, pathlib
from tests.support.action_chunks import HORIZON, VOCAB, smooth_chunks
from benchbox.data.fast import FastTokenizer
FastTokenizer.train(smooth_chunks(), horizon=HORIZON, vocab=VOCAB).save(pathlib.Path(sys.argv[1]))
"""
    FastTokenizer.train(smooth_chunks(), horizon=HORIZON, vocab=VOCAB).save(tmp_path / "here.json")
    environment = minimal_environment(PYTHONHASHSEED="5")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there.json")], check=True, env=environment)
    here, there = (hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("here.json", "there.json"))
    assert here == there
