"""DeepSpeed accumulates in bfloat16 under ZeRO-1 too, which leaves the sum on the parameters.

Configured to accumulate in float32, DeepSpeed uses another optimizer (`BF16_Optimizer`), under which bfloat16 gradients stay on
the parameters too and are summed elsewhere.
"""

from deepspeed_accumulates_in_bf16 import train

RULES = ("BXP301",)
RANKS = 2


def main(repaired: bool) -> None:
    train(1, "fp32" if repaired else None)
