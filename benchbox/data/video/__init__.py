"""Video files: decoders, key frames, copies without re-encoding."""
