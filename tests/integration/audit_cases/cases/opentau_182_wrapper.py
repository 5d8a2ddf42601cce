"""OpenTau#182: masters behind a wrapper that is no `Optimizer`.

It steps and clears like one, but `Accelerator.prepare` looks for the class and hands it back untouched. So nothing holds it
back between the micro-batches of an accumulation window: it steps on each of them, and clears what should have been summed.
Repair: make the wrapper a subclass of `torch.optim.Optimizer`.
"""

from accelerate import Accelerator

from tests.support.tiny_training import Masters, Policy, batches, loss_of

RULES = ("BXP402",)
ALSO = ("BXP403",)
RANKS = 1


class LooksLikeAnOptimizer:
    def __init__(self, masters: Masters) -> None:
        self.masters = masters
        self.param_groups = masters.param_groups

    def step(self) -> None:
        self.masters.copy_gradients()
        self.masters.inner.step()
        self.masters.round_into_live()

    def zero_grad(self) -> None:
        self.masters.zero_grad()


def main(repaired: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    policy = Policy()
    masters = Masters(policy.parameters(), lr=1e-3)
    policy, optimizer = accelerator.prepare(policy, masters if repaired else LooksLikeAnOptimizer(masters))
    for batch in batches(16):
        with accelerator.accumulate(policy):
            accelerator.backward(loss_of(policy, batch))
            optimizer.step()
            optimizer.zero_grad()
