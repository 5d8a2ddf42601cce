"""Modules of blocks as others write them, of every kind of parameter and buffer; their order comes from the preset."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import benchbox
from benchbox.registry.contracts import BatchSpec

W = 24


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(W)

    def forward(self, x):
        return x + self.body(self.norm(x))


class Mlp(Residual):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(W, 50), nn.Linear(50, W)

    def body(self, x):
        return self.down(F.gelu(self.up(x)))


class Attn(Residual):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(W, 3, batch_first=True)

    def body(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Gru(Residual):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(W, W, num_layers=2, batch_first=True)

    def body(self, x):
        return self.gru(x)[0]


class Lstm(Residual):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(W, W // 2, batch_first=True, bidirectional=True)

    def body(self, x):
        return self.lstm(x)[0]


class Conv(Residual):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(W, W, 3, padding=1, groups=2)

    def body(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Bn(Residual):
    def __init__(self):
        super().__init__()
        self.bn, self.out = nn.BatchNorm1d(W), nn.Linear(W, W, bias=False)

    def body(self, x):
        return self.out(self.bn(x.transpose(1, 2)).transpose(1, 2))


class Group(Residual):
    def __init__(self):
        super().__init__()
        self.gn, self.rms = nn.GroupNorm(3, W), nn.RMSNorm(W)

    def body(self, x):
        return self.rms(self.gn(x.transpose(1, 2)).transpose(1, 2))


class LayerScale(Residual):
    def __init__(self):
        super().__init__()
        self.out, self.gamma = nn.Linear(W, W), nn.Parameter(torch.full((W,), 0.3))

    def body(self, x):
        return self.gamma * self.out(x)


class Tied(Residual):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)
        self.b.weight = self.a.weight

    def body(self, x):
        return self.b(torch.tanh(self.a(x)))


class Unused(Residual):
    def __init__(self):
        super().__init__()
        self.out, self.spare = nn.Linear(W, W), nn.Linear(W, 3)

    def body(self, x):
        return self.out(x)


class Frozen(Residual):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(W, W)
        self.requires_grad_(False)

    def body(self, x):
        return self.out(x)


class PartFrozen(Residual):
    def __init__(self):
        super().__init__()
        self.fixed, self.out = nn.Linear(W, 40), nn.Linear(40, W)
        self.fixed.weight.requires_grad_(False)

    def body(self, x):
        return self.out(F.silu(self.fixed(x)))


class WeightNorm(Residual):
    def __init__(self):
        super().__init__()
        self.out = parametrizations.weight_norm(nn.Linear(W, W))

    def body(self, x):
        return self.out(x)


class SpectralNorm(Residual):
    def __init__(self):
        super().__init__()
        self.out = parametrizations.spectral_norm(nn.Linear(W, W))

    def body(self, x):
        return self.out(x)


class Lora(Residual):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(W, W)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Linear(W, 4, bias=False), nn.Linear(4, W, bias=False)

    def body(self, x):
        return self.base(x) + self.b(self.a(x)) * 2.0


class Drop(Residual):
    def __init__(self):
        super().__init__()
        self.out, self.drop = nn.Linear(W, W), nn.Dropout(0.2)

    def body(self, x):
        return self.drop(self.out(x))


class Positions(Residual):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, W, padding_idx=0)
        self.register_buffer("index", torch.arange(64), persistent=False)

    def body(self, x):
        return x + self.table(self.index[: x.shape[1]]).to(x.dtype)


class Noise(Residual):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(W, W)

    def body(self, x):
        return self.out(x + 0.1 * torch.randn_like(x))


class Strided(Residual):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(W, W)
        self.out.weight = nn.Parameter(torch.randn(W, W).mul_(0.1).t())

    def body(self, x):
        return self.out(x)


class Odd(Residual):
    def __init__(self):
        super().__init__()
        self.one, self.back, self.seven = nn.Linear(W, 1), nn.Linear(1, 7, bias=False), nn.Linear(7, W)

    def body(self, x):
        return self.seven(self.back(self.one(x)))


class Einsum(Residual):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, W, W // 3) * 0.1)

    def body(self, x):
        return torch.einsum("blw,hwd->blhd", x, self.weight).flatten(2)


class Lists(Residual):
    def __init__(self):
        super().__init__()
        self.many = nn.ParameterList([nn.Parameter(torch.randn(W, W) * 0.1) for _ in range(2)])
        self.named = nn.ParameterDict({"first": nn.Parameter(torch.zeros(W)), "second": nn.Parameter(torch.ones(W))})

    def body(self, x):
        for weight in self.many:
            x = x @ weight.to(x.dtype)
        return x * self.named["second"].to(x.dtype) + self.named["first"].to(x.dtype)


class Rope(Residual):
    """Rotary positions by complex numbers, as in the first Llama."""

    def __init__(self):
        super().__init__()
        self.q, self.v = nn.Linear(W, W), nn.Linear(W, W)
        angles = torch.outer(torch.arange(64).float(), 0.1 ** (torch.arange(W // 2) / (W // 2)))
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def body(self, x):
        q = torch.view_as_complex(self.q(x).float().reshape(*x.shape[:-1], -1, 2))
        q = torch.view_as_real(q * self.rotations[: x.shape[1]]).flatten(-2)
        return (q * self.v(x).float()).to(x.dtype)


class Counter(Residual):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(W, W)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(W))

    def body(self, x):
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
        return self.out(x)


class Double(Residual):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(W, W)
        self.register_buffer("offsets", torch.linspace(0, 1, W, dtype=torch.float64))

    def body(self, x):
        return self.out(x + self.offsets.to(x.dtype))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class Custom(Residual):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(W, W)

    def body(self, x):
        return Cube.apply(torch.tanh(self.out(x)))


class Experts(Residual):
    """All experts run, weighted by a router."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(W, 3)
        self.items = nn.ModuleList(nn.Sequential(nn.Linear(W, 16), nn.SiLU(), nn.Linear(16, W)) for _ in range(3))

    def body(self, x):
        weights = self.router(x).float().softmax(-1)
        return sum(weights[..., index, None].to(x.dtype) * item(x) for index, item in enumerate(self.items))


class Gated(Residual):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"value": nn.Linear(W, W), "gate": nn.Linear(W, W)})
        self.act = nn.PReLU(W)

    def body(self, x):
        value, gate = self.parts["value"](x), self.parts["gate"](x)
        return self.act((value * torch.sigmoid(gate)).transpose(1, 2)).transpose(1, 2)


class ChannelsLast(Residual):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(W, W, 3, padding=1).to(memory_format=torch.channels_last)

    def body(self, x):
        return self.conv(x.transpose(1, 2)[..., None])[..., 0].transpose(1, 2)


KINDS = {cls.__name__: cls for cls in Residual.__subclasses__()}


class Zoo(nn.Module):
    def __init__(self, blocks, reuse, horizon, dims, output):
        super().__init__()
        self.horizon, self.output, self.reuse = horizon, output, reuse
        self.image = nn.Conv2d(3, W, kernel_size=16, stride=16)
        self.state = nn.Linear(dims, W)
        self.queries = nn.Embedding(horizon, W)
        self.register_buffer("steps", torch.arange(horizon), persistent=False)
        self.layers = nn.ModuleList(KINDS[kind]() for kind in blocks)
        self.action_head = nn.Linear(W, dims)

    def forward(self, image, state):
        tokens = self.image(image).flatten(2).transpose(1, 2)
        queries = self.queries(self.steps).expand(len(state), -1, -1)
        x = torch.cat((tokens, self.state(state)[:, None], queries.to(tokens.dtype)), dim=1)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == self.reuse:
                x = layer(x)
        actions = self.action_head(x[:, -self.horizon :])
        if self.output == "dict":
            return {"actions": actions, "count": self.horizon}
        return (actions, None) if self.output == "tuple" else actions


def inputs(batch):
    return batch["images"][:, -1, 0].float() / 255, batch["state"][:, -1]


def build(preset, axes):
    preset = dict(preset)
    form = preset.pop("loss")

    def loss(output, batch):
        actions = output["actions"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
        squares = (actions.float() - batch["action"]).square()
        return squares.mean() if form == "scalar" else squares.mean(dim=(1, 2))

    spec = BatchSpec(
        cameras=1, image_size=(32, 32), state_dim=preset["dims"], action_dim=preset["dims"], horizon=preset["horizon"]
    )
    return benchbox.adapt(Zoo(**preset), loss=loss, batch=inputs, spec=spec)
