"""Training scripts drawn at random, with what an audit has to say about them: `python -m tests.support.random_scripts SEED`.

They combine what the scripts of the corpus do one at a time. Such scripts have shown masters that are assigned to parameters,
frozen garbage collectors and models that are cast after their last step.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field

from tests.audit_corpus.cases import OF_16_BIT_WEIGHTS, Case, clean, mistaken

# From a batch of 8 x 16 to 8 x 8.
MODELS = {
    "norm": "nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 8))",
    "attention": "nn.Sequential(nn.Unflatten(1, (2, 8)), nn.TransformerEncoderLayer(8, 2, 16), nn.Flatten(), nn.Linear(16, 8))",
    "tied": "tie(nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 8)))",
    "frozen": "freeze(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)))",
    "weight norm": "nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 32)), nn.GELU(), nn.Linear(32, 8))",
    "wrapped": "nn.DataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)))",
    "lazy": "nn.Sequential(nn.LazyLinear(32), nn.GELU(), nn.LazyLinear(8))",
}
OPTIMIZERS = (
    "SGD({}, lr=0.02, momentum=0.9, nesterov=True, foreach=True)",
    "Adam({}, lr=1e-3, weight_decay=0.1)",
    "AdamW({}, lr=1e-3, fused=True)",
    "AdamW({}, lr=torch.tensor(1e-3), foreach=False)",
    "AdamW({}, lr=1e-3, amsgrad=True)",
    "NAdam({}, lr=1e-3)",
    "RMSprop({}, lr=1e-3, centered=True)",
    "Adafactor({}, lr=1e-2)",
)
GROUPS = {
    "one": "optimizer = make(trained)",
    "two": "optimizer = make([{'params': trained[::2]}, {'params': trained[1::2], 'weight_decay': 0.0}])",
    "rebuilt": "optimizer = make(trained)\nrebuild = lambda: make(trained)",
    "reloaded": "optimizer = make(trained)\nrebuild = lambda: reload(make(trained), optimizer.state_dict())",
}
CLIPS = ("", "nn.utils.clip_grad_norm_(trained, 0.1)", "nn.utils.clip_grad_value_(trained, 0.01)")
LOOPS = {
    "": "optimizer.step()",
    "import gc; gc.freeze()": "optimizer.step()",
    "import threading": "thread = threading.Thread(target=optimizer.step); thread.start(); thread.join()",
    "torch.autograd.set_detect_anomaly(True, check_nan=False)": "optimizer.step()",
}
COPIES = ("p.data.copy_(m.data)", "p.data = m.data.bfloat16()", "p.data = m.data.to(p.dtype)")
AVERAGES = {
    "": "",
    "average = torch.optim.swa_utils.AveragedModel(model)": "average.update_parameters(model)",
    "average = copy.deepcopy(model).float()": "move(average, 0.05)",
}


@dataclass(frozen=True)
class Mistake:
    """A mistake: the rules that report it, those that may, the arrangement it needs, and the parts of a script it changes."""

    codes: str
    also: tuple[str, ...] = ()
    arrangement: str = ""
    parts: dict[str, str] = field(default_factory=dict)


MISTAKES = {
    "weights are stepped in bfloat16": Mistake("BXP101", OF_16_BIT_WEIGHTS, "float32", {"cast": "model.bfloat16()"}),
    "masters are bfloat16": Mistake("BXP101", OF_16_BIT_WEIGHTS, "masters", {"masters": "bfloat16"}),
    "weights are rounded": Mistake("BXP101", (), "float32", {"after": "for p in trained: p.data = p.data.bfloat16().float()"}),
    "masters are not copied": Mistake("BXP104", ("BXP404", "BXP301"), "masters", {"copy": "pass"}),
    "masters are old": Mistake(
        *("BXP504", ("BXP104", "BXP301"), "masters"),
        # In the order of the parameters: by their values old masters cannot be linked.
        {"before": "for p in model.parameters(): p.data = p.data * 1.5 + 1", "groups": GROUPS["one"]},
    ),
    "a copy is clipped": Mistake(
        *("BXP304", (), "float32"),
        {"before": "old = copy.deepcopy(model)", "clip": "nn.utils.clip_grad_norm_(old.parameters(), 1e-3)"},
    ),
    "gradients are clipped late": Mistake(
        "BXP304", (), "float32", {"clip": "", "after": "nn.utils.clip_grad_norm_(trained, 1e-3)"}
    ),
    "the schedule advances twice": Mistake("BXP403", ("BXP301",), "", {"after": "schedule.step()"}),
    "the average is bfloat16": Mistake(
        "BXP107", (), "float32", {"before": "average = copy.deepcopy(model).bfloat16()", "average": "move(average, 1e-4)"}
    ),
}

TEMPLATE = """\
import copy

import torch
from checksums import print_checksums
from torch import nn

{setup}


def tie(model):
    model[2].weight = model[0].weight
    return model


def freeze(model):
    model[0].requires_grad_(False)
    return model


def reload(optimizer, state):
    optimizer.load_state_dict(copy.deepcopy(state))
    return optimizer


@torch.no_grad()
def move(average, rate):
    for a, p in zip(average.parameters(), model.parameters(), strict=True):
        a.lerp_(p.to(a.dtype), rate)


make = lambda parameters: torch.optim.{optimizer}
torch.manual_seed({seed})
model = {model}
model(torch.randn(8, 16))
{cast}
trained = live = [p for p in model.parameters() if p.requires_grad]
has_masters = {has_masters}
if has_masters:
    trained = [p.detach().clone().to(torch.{masters}).requires_grad_() for p in live]
    model.bfloat16()
rebuild = None
{groups}
{before}
losses = []
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
dtype = live[0].dtype
for step in range({steps}):
    for _ in range({accumulation}):
        batch = torch.randn(8, 16)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled={autocast}):
            output = model(batch.to(dtype))
        loss = (output.float() - batch[:, :8]).square().mean() / {accumulation}
        loss.backward()
    for p, m in zip(live, trained, strict=True):
        if has_masters:
            m.grad, p.grad = p.grad.to(m.dtype), None
    {clip}
    {step}
    if has_masters:
        for p, m in zip(live, trained, strict=True):
            {copy}
    {after}
    {average}
    if rebuild is not None and step == 5:
        optimizer = rebuild()
    elif rebuild is None:
        schedule.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print_checksums([*trained, *model.parameters()], losses)
{end}
"""


def random_script(seed: int) -> tuple[Case, str]:
    """Return a case of the corpus and the text of its script, the same for the same seed."""
    draw = random.Random(seed)
    name = draw.choice(["", *MISTAKES]) if draw.random() < 0.5 else ""
    mistake = MISTAKES[name] if name else Mistake("")
    arrangement = draw.choice(["float32", "autocast", "masters"])
    arrangement = mistake.arrangement or arrangement
    setup, before = draw.choice(list(LOOPS)), draw.choice(list(AVERAGES) if arrangement == "float32" and not name else [""])
    is_short = draw.random() < 0.3 and not name
    groups = draw.choice(list(GROUPS)) if not name else draw.choice(["one", "two"])
    parts = {
        "setup": setup,
        "optimizer": draw.choice(OPTIMIZERS).format("parameters"),
        "model": MODELS[draw.choice(list(MODELS))],
        "cast": "",
        "has_masters": str(arrangement == "masters"),
        "masters": "float32",
        "groups": GROUPS[groups],
        "before": before,
        "steps": "14" if is_short else "24",
        "accumulation": str(draw.choice([1, 1, 3])),
        "autocast": str(arrangement == "autocast"),
        "clip": draw.choice(CLIPS),
        "step": LOOPS[setup],
        "copy": draw.choice(COPIES),
        "after": "",
        "average": AVERAGES[before],
        "end": "model.half()" if is_short else "",
    }
    text = TEMPLATE.format(seed=seed, **(parts | mistake.parts))
    command = ("python", f"random_{seed}.py")
    if not name:
        also = ("BXP301",) if arrangement == "masters" else ()  # gradients of bfloat16 weights are accumulated in them
        return clean(f"random_{seed}", *command, also=also), text
    return mistaken(f"random_{seed}", name, mistake.codes, *command, also=mistake.also), text


if __name__ == "__main__":
    sys.stdout.write(random_script(int(sys.argv[1]))[1])
