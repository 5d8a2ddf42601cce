"""Does what no observer expects in processes that it forks, and trains as others do itself. Every warning is an error here.

Ends with exit code 5.
"""

import gc
import os
import sys
import threading
import warnings

import one_process
import torch
import torch._dynamo  # some optimizers import it, and each child would anew
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

gc.collect()
gc.freeze()  # or each child would visit all of torch when it ends, which takes a second
warnings.simplefilter("error")
torch.manual_seed(0)
calls = []
register_optimizer_step_pre_hook(lambda *_: calls.append("before"))
register_optimizer_step_post_hook(lambda *_: calls.append("after"))


class Hostile:
    """Raises whatever is asked of it."""

    def __getattr__(self, name):
        raise RuntimeError(f"do not ask for {name}")

    def __bool__(self):
        raise RuntimeError("neither")

    def __eq__(self, value):
        raise RuntimeError("incomparable")

    __hash__ = None


class Homemade:
    """No torch optimizer, and it wraps one that refers back to it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        optimizer.owner = self

    def step(self):
        self.optimizer.step()


class Signs(torch.optim.Optimizer):
    """Keeps no state, and calls its groups by names of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, {"rate": 0.01, "betas": None, "lr": "none"})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data -= group["rate"] * parameter.grad.sign()


class Tagged(torch.Tensor):
    pass


class Shy(nn.Module):
    """Holds what is no module, and will not be walked through."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_module("nothing", None)
        self.register_parameter("none", None)
        self.unused = nn.Parameter(torch.empty(0))
        self.tagged = nn.Parameter(torch.ones(4).as_subclass(Tagged))
        self.turned = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x):
        return self.inner(x) * self.tagged * self.turned.abs()

    def named_parameters(self, *arguments, **options):
        if calls and len(calls) % 3 == 0:
            raise RuntimeError("not now")
        return super().named_parameters(*arguments, **options)


def learn(name, model, optimizer, steps=6, closure=False, batch=None):
    for step in range(steps):

        def loss_of():
            optimizer.zero_grad()
            loss = model(torch.randn(2, 4) if batch is None else batch()).abs().sum()
            loss.backward()
            return loss

        loss = optimizer.step(loss_of) if closure else loss_of()
        if not closure:
            optimizer.step()
        print(name, step, loss.item().hex())


def shy():
    model = Shy()
    parameters = [*model.inner.parameters(), model.tagged, model.turned, model.unused]
    learn("shy", model, torch.optim.Adam(parameters, lr=torch.tensor(1e-3)))


def stateless():
    hostile = [Hostile() for _ in range(3)]
    model = nn.Linear(4, 4)
    learn("stateless", model, Signs(model.parameters()))
    assert len(hostile) == 3


def closure():
    model = nn.Linear(4, 4)
    learn("closure", model, torch.optim.LBFGS(model.parameters(), max_iter=2), closure=True)


def forgetful():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    homemade = Homemade(wrapped)
    for step in range(6):
        model(torch.randn(2, 4)).sum().backward()
        homemade.step()
        wrapped.state.clear()
        if step == 1:
            model[1].bias = None
            wrapped.param_groups[0]["params"].pop()
        if step == 3:
            model[0].weight = nn.Parameter(torch.ones(4, 4))
        print("forgetful", step, model[0].weight.sum().item().hex())


def sparse():
    model = nn.Embedding(8, 4, sparse=True)
    learn("sparse", model, torch.optim.SparseAdam(model.parameters()), batch=lambda: torch.randint(8, (3,)))


def away():
    model = nn.Linear(4, 4, device="meta")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for _ in range(6):
        optimizer.step()
    optimizer = torch.optim.SGD([{"params": []}], lr=0.1)
    optimizer.step()


def failing():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: 1 / 0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    for _ in range(6):
        try:
            optimizer.step()
        except ZeroDivisionError as error:
            print("failing", error)


def threaded():
    model = nn.Linear(4, 4)
    thread = threading.Thread(target=learn, args=("threaded", model, torch.optim.Adagrad(model.parameters())))
    thread.start()
    thread.join()


def orphaned():
    os.environ.clear()
    model = nn.Linear(4, 4)
    learn("orphaned", model, torch.optim.AdamW(model.parameters()), 3)
    if not os.fork():  # a child that goes on training, and leaves by the front door
        learn("grandchild", model, torch.optim.SGD(model.parameters(), lr=0.1))
        sys.exit()
    os.wait()


for number, thing in enumerate([shy, stateless, closure, forgetful, sparse, away, failing, threaded, orphaned]):
    if not os.fork():  # each meets an observer that has seen nothing yet
        thing()
        print(thing.__name__, len(calls), calls.count("before"))
        sys.exit(number)
    print(thing.__name__, "ended with", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
one_process.main()
sys.exit(5)
