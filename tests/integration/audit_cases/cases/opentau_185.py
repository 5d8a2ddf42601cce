"""OpenTau#185: every resume makes the masters anew from the bfloat16 weights.

`accelerator.save_state` saves the live weights and what the optimizer's `state_dict` gives: the state of the inner optimizer,
and not the masters, which are parameters of it. What they held below bfloat16's precision is gone after each resume.
Repair: a `state_dict` that holds them.
"""

import torch
from accelerate import Accelerator

from benchbox.optim import MasterWeightOptimizer
from tests.support.tiny_training import Masters, Policy, batches, loss_of

RULES = ("BXP501",)
RANKS = 1


class Trainer:
    def __init__(self, repaired: bool) -> None:
        self.accelerator = Accelerator(cpu=True)
        policy = Policy().to(torch.bfloat16)
        kind = MasterWeightOptimizer if repaired else Masters
        self.policy, self.optimizer = self.accelerator.prepare(policy, kind(policy.parameters(), lr=1e-3))

    def resume(self) -> None:
        self.accelerator.load_state("checkpoint")
        if isinstance(masters := self.optimizer.optimizer, Masters):
            for parameter, master in zip(masters.live, masters.masters, strict=True):
                master.data.copy_(parameter)

    def train(self, steps: int) -> None:
        for batch in batches(steps, torch.bfloat16):
            self.accelerator.backward(loss_of(self.policy, batch))
            self.optimizer.step()
            self.optimizer.zero_grad()


def earlier(repaired: bool) -> None:
    trainer = Trainer(repaired)
    trainer.train(6)
    trainer.accelerator.save_state("checkpoint")


def main(repaired: bool) -> None:
    trainer = Trainer(repaired)
    trainer.resume()
    trainer.train(8)
