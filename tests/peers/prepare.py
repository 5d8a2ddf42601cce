"""Write weights and a batch that both sides of a comparison on a GPU read: `python -m tests.peers.prepare PEER BATCH FOLDER`.

The weights are on the GPU while they are made, if there is one; the process holds its memory until it ends.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from benchbox_policies._layers.weights.export import published_state_dict
from safetensors.torch import save_file

from tests.parity.pi import lerobot_batch, lerobot_sizes
from tests.peers.policies import GPU_PEERS, batch_of, build_rounded_peer


def main(name: str, batch: str, directory: str) -> None:
    folder = Path(directory)
    peer = replace(GPU_PEERS[name], batch=int(batch))
    policy = build_rounded_peer(peer, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    state = {key: tensor.bfloat16().cpu() for key, tensor in published_state_dict(policy).items()}
    (folder / "weights").mkdir(parents=True)
    save_file(state, folder / "weights" / "model.safetensors")
    save_file(lerobot_batch(batch_of(policy, peer)), folder / "batch.safetensors")
    (folder / "request.json").write_text(json.dumps(lerobot_sizes(peer.policy, policy) | {"parameters": parameters}))


if __name__ == "__main__":
    main(*sys.argv[1:])
