"""The backend that is observed: registered recognisers claim live objects, whichever backend was requested."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from benchbox.backends import observe as observe_module
from benchbox.backends.accelerators import device_of
from benchbox.backends.observe import Observed, _stepped_numel, observe
from benchbox.errors import ConfigurationError, MismatchError
from benchbox.registry.backends import BUILT_IN_BACKENDS, BackendInfo
from benchbox.worker.expected import check_backend
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from collections.abc import Callable


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def recognise_wrapper(model: nn.Module, optimizers: list[Any]) -> str | None:
    return f"wrapped, stepped by {type(optimizers[-1]).__name__}" if isinstance(model, Wrapper) else None


def claim_all(model: nn.Module, optimizers: list[Any]) -> str | None:
    return "mine"


def fail(model: nn.Module, optimizers: list[Any]) -> str | None:
    raise AttributeError("no such attribute")


def return_true(model: nn.Module, optimizers: list[Any]) -> Any:
    return True


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Register backends, each by the name of its recogniser in this module."""
    module = __name__

    def register(*recognisers: Callable) -> None:
        added = {
            function.__name__: BackendInfo(
                name=function.__name__, summary="", target="x:Y", recognise=f"{module}:{function.__name__}"
            )
            for function in recognisers
        }
        functions = {function.__name__: function for function in recognisers}
        monkeypatch.setattr(observe_module, "backends", lambda: BUILT_IN_BACKENDS | added)
        monkeypatch.setattr(BackendInfo, "load_recogniser", lambda info: functions[info.name])

    return register


def look_at(model: nn.Module) -> Observed:
    return observe(model, torch.optim.SGD(model.parameters()), torch.device("cpu"))


def test_without_a_claim_the_built_in_backend_is_observed(register) -> None:
    register(recognise_wrapper)
    observed = look_at(nn.Linear(2, 1))
    assert (observed.backend, observed.sharding) == ("single", None)


def test_frozen_parameters_count_among_all_and_empty_ones_of_zero_3_with_their_whole_size() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(3, 1))
    model[1].requires_grad_(False)
    partitioned: Any = model[0].weight
    partitioned.data, partitioned.ds_numel = torch.empty(0), 2
    observed = look_at(model)
    assert (observed.trainable_numel, observed.total_numel) == (3, 7)


def test_the_device_of_a_process_without_ranks_has_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    devices = {"cuda": "cuda:3", "cuda:1": "cuda:1", "cpu": "cpu", "cpu:0": "cpu"}
    accelerators: list[Any] = [SimpleNamespace(device=torch.device(device)) for device in devices]
    assert [str(device_of(accelerator)) for accelerator in accelerators] == list(devices.values())


def test_a_claimed_set_up_is_the_backend_that_claims_it(register) -> None:
    """The record keeps the structure that the observer identified."""
    register(recognise_wrapper)
    observed = look_at(Wrapper(nn.Linear(2, 1)))
    assert (observed.backend, observed.sharding) == ("recognise_wrapper", "wrapped, stepped by SGD (structure: single)")


def test_a_set_up_that_two_backends_claim_is_refused_by_name(register) -> None:
    register(recognise_wrapper, claim_all)
    with pytest.raises(MismatchError, match=r"recognise_wrapper: wrapped, stepped by SGD; claim_all: mine"):
        look_at(Wrapper(nn.Linear(2, 1)))


def test_a_cell_of_a_built_in_backend_that_another_claims_is_a_mismatch(register) -> None:
    """A recogniser that claims too much is found by the first cell of another backend, and named."""
    register(claim_all)
    observed = look_at(nn.Linear(2, 1))
    with pytest.raises(MismatchError, match=r"requested backend single, observed claim_all: .*structure: single"):
        check_backend(tiny_cell(backend="single", world_size=1), observed)


@pytest.mark.parametrize(
    ("recogniser", "message"),
    [
        (fail, r"backend fail: .*:fail failed on Linear: AttributeError: no such attribute; it must return None"),
        (return_true, r"backend return_true: .*:return_true returned True for Linear; it must return a description or None"),
    ],
)
def test_a_recogniser_that_fails_is_named(register, recogniser: Callable, message: str) -> None:
    register(recogniser)
    with pytest.raises(ConfigurationError, match=message):
        look_at(nn.Linear(2, 1))


def test_of_a_sharded_parameter_the_optimizer_holds_the_part_of_this_rank() -> None:
    """A DTensor has the size of the whole, and steps its local tensor."""

    class DTensor(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return torch.zeros(3)

    sharded = torch.zeros(12).as_subclass(DTensor)
    chain = [SimpleNamespace(param_groups=[{"params": [sharded, torch.zeros(5)]}])]
    assert _stepped_numel(chain) == 3 + 5
