"""Base of the memory models of all backends: the replay of a timeline, and the scratch memory of clipping."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from benchbox.theory.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchbox.theory.structure import CellSetup, Event, Structure, Timeline

# benchbox.optim.norm and benchbox.optim.passes
_NORM_CHUNK = 2**20  # elements that are upcast at a time on a CPU
_NORM_ROW = 2**8
_NATIVE_MIN = 2**22  # elements from which the compiled functions are used, which need no scratch memory
_NATIVE_VECTOR = 16
_FLOAT32 = 4
FLOAT64 = 8


class MemoryModel(ABC):
    """Memory of one rank over one optimizer step: `run` replays the timeline of each micro-step and gives the ledger.

    A backend says what it stores from the beginning (`_store`), what happens at the events of a timeline, and what its clip
    and its optimizer need (`_finish`).
    """

    def __init__(self, structure: Structure, timeline: Timeline, setup: CellSetup) -> None:
        self.structure, self.timeline, self.setup = structure, timeline, setup
        self.ledger = Ledger()
        self.micro_step = 0

    def run(self) -> Ledger:
        """Return the ledger of one step, after steps that created the optimizer's state and the buffers that stay."""
        ledger, setup = self.ledger, self.setup
        ledger.add("buffers", sum(self.structure.buffers.values()))
        ledger.add("batch", self.structure.batch_bytes * setup.accumulation)
        self._store()
        if setup.averages:
            ledger.add("averages", _FLOAT32 * self.stepped_numel)
        for self.micro_step in range(setup.accumulation):
            ledger.stage = "forward"
            self._begin_forward()
            for event in self.timeline.events:
                self._replay(event)
            ledger.stage = "end of backward"
            self._end_backward()
            ledger.clear("activations")
        self._finish()
        return ledger

    @property
    def is_boundary(self) -> bool:
        """True if the gradients of this micro-step are reduced."""
        return self.micro_step == self.setup.accumulation - 1

    def _replay(self, event: Event) -> None:
        match event.kind:
            case "allocate":
                self.ledger.add("activations", event.size)
            case "free":
                self.ledger.add("activations", -event.size)
            case "enter":
                self._enter(event.name)
            case "leave":
                self._leave(event.name)
            case "enter_again":
                self._enter_again(event.name)
            case "enter_backward":
                self._enter_backward(event.name)
            case "gradient":
                self._take_gradient(event.size)
            case "forward_end":
                self._end_forward()
                self.ledger.stage = "backward"
            case _:
                self._use()

    @abstractmethod
    def _store(self) -> None:
        """Add what the rank stores from step to step."""

    @property
    @abstractmethod
    def stepped_numel(self) -> int:
        """Return the elements that the optimizer of this rank steps."""

    @abstractmethod
    def _take_gradient(self, number: int) -> None:
        """Take the gradient of a parameter, which is complete."""

    @abstractmethod
    def _finish(self) -> None:
        """Clip and step."""

    def _begin_forward(self) -> None: ...  # noqa: B027 (overridden where there is something to do)

    def _enter(self, name: str) -> None: ...  # noqa: B027 (overridden where there is something to do)

    def _leave(self, name: str) -> None: ...  # noqa: B027 (overridden where there is something to do)

    def _end_forward(self) -> None: ...  # noqa: B027 (overridden where there is something to do)

    def _enter_again(self, name: str) -> None: ...  # noqa: B027 (overridden where there is something to do)

    def _enter_backward(self, name: str) -> None: ...  # noqa: B027 (overridden where there is something to do)

    def _end_backward(self) -> None: ...  # noqa: B027 (overridden where there is something to do)

    def _use(self) -> None: ...  # noqa: B027 (overridden where there is something to do)

    def numel(self, number: int) -> int:
        return self.structure.parameters[number].numel

    def _scatter(self, size: int) -> None:
        """Add what a reduce-scatter of so many bytes needs: gloo copies its input, NCCL does not.

        Under FSDP1 it does not matter: more is freed right before.
        """
        if self.setup.device == "cpu":
            self.ledger.pass_through("reduction", size)

    def _clip(self, numels: Iterable[int], *, is_bfloat16: bool) -> None:
        """Add the scratch memory of the gradient norm (`benchbox.optim.norm.squared_norm`). On a GPU it is a few numbers."""
        self.ledger.stage = "clip"
        if self.setup.device != "cpu":
            return
        numels = [numel for numel in numels if numel]
        native = sum(numel for numel in numels if numel % _NATIVE_VECTOR == 0) if is_bfloat16 else 0
        if native >= _NATIVE_MIN:
            numels = [numel for numel in numels if numel % _NATIVE_VECTOR]
        if numels:
            rows = sum(-(-numel // _NORM_ROW) for numel in numels)
            # the norms of the rows, one after another and together, in float32 and in float64
            self.ledger.pass_through("workspace", _FLOAT32 * _NORM_CHUNK + rows * (4 + 4 + 8))

    def _clip_by_deepspeed(self, size: int) -> None:
        """Add the copies in float64 of which DeepSpeed takes norms (`get_grad_norm_direct`), of one gradient at a time.

        Args:
            size: bytes of the largest.
        """
        self.ledger.stage = "clip"
        self.ledger.pass_through("workspace", size)
