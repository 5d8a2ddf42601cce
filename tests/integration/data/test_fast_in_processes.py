"""Every rank trains its own FAST tokenizer: they must not differ."""

import hashlib
import subprocess
import sys

from benchbox.data.text.fast import FastTokenizer
from tests.support.action_chunks import HORIZON, VOCAB, smooth_chunks
from tests.support.processes import minimal_environment


def digest() -> str:
    """Return a digest of a newly trained tokenizer: its alphabet, merges and vocabulary."""
    tokenizer = FastTokenizer.train(smooth_chunks(), horizon=HORIZON, vocab=VOCAB)
    return hashlib.sha256(tokenizer._tokenizer.to_str().encode()).hexdigest()


def test_every_process_trains_the_same_tokenizer():
    """Hash seeds differ between processes."""
    code = "from tests.integration.data.test_fast_in_processes import digest; print(digest())"
    environment = minimal_environment(PYTHONHASHSEED="5")
    process = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert process.stdout.strip() == digest()
