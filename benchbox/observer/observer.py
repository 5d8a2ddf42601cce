"""The observer itself: which steps it looks at, and how closely."""

from __future__ import annotations

import functools
import os
import traceback
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .build_facts import testimony
from .facts import SECTIONS, RankFacts
from .hooks.steps import StepWindows
from .introspect.discovery import Surroundings, look_around
from .introspect.master_matching import matched
from .introspect.names import find_links, live_parameters, storage_of
from .introspect.tensors import local_shard
from .introspect.wrappers import optimizer_chain
from .numerics.probes import Look, can_look_at
from .state import Notebook, StepNotes, Stepping, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from torch.optim import Optimizer

    from .facts import Contract
    from .hooks.steps import Stepped


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """An observer that stumbles says so and leaves; the training goes on."""

    @functools.wraps(method)
    def careful(self: StepObserver, *args: Any) -> None:
        try:
            with torch.no_grad():
                method(self, *args)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is not the training's)
            self._problems.append(f"{method.__name__}: {_told(error)}")
            self._leave()

    return careful


def _told(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = next(iter(str(error).splitlines()), "")  # torch fills a page when it lacks an operation
    return f"{type(error).__name__}: {said} ({last.name}, line {last.lineno})"


class StepObserver:
    """Watches the first `steps` optimizer steps taken while it is installed, then removes itself.

        with StepObserver(source="command", steps=20) as observer:
            train()
        facts = observer.facts()

    The first, the middle and the last of them are looked at closely; through the step after the middle one every operation is
    seen. Between those a step costs a few Python calls. It only reads: no tensor, random state or result of the training
    changes.

    Args:
        source: session or command, as the facts will say.
        model, optimizer, schedules: the wrapped model, the outermost optimizer and the schedules. Those not given are looked
            for among the objects of the process when the first step is taken.
        contract: what was declared, for the facts to carry.
        on_done: called once, with this observer, when the steps have been seen.
    """

    def __init__(
        self,
        *,
        source: str,
        steps: int = 6,
        model: nn.Module | None = None,
        optimizer: Any = None,
        schedules: Sequence[Any] | None = None,
        contract: Contract | None = None,
        on_done: Callable[[StepObserver], None] | None = None,
    ) -> None:
        self._book = Notebook(source, contract, optimizer, Surroundings(schedules=list(schedules or ())))
        self._given = (model, optimizer, schedules)
        self._last = steps
        self._middle = (steps + 1) // 2
        self._on_done = on_done
        self._problems: list[str] = []
        self._windows = StepWindows(self)
        self._installed = False
        self._rank: tuple[int, int] | None = None
        self._testimony: RankFacts | None = None

    def __enter__(self) -> StepObserver:  # noqa: PYI034 (Self came with Python 3.11)
        self.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.remove()

    def install(self) -> None:
        """Begin to watch."""
        self._installed = True
        self._windows.install()
        self._book.calls.listen()
        self._book.forward.install()
        if isinstance(self._given[0], nn.Module):
            self._book.around.models = [self._given[0]]
            self._know_models()

    def remove(self) -> None:
        """Stop watching, in the middle of the steps or after them."""
        if self._installed:
            self._finish()
            self._leave()

    def reported(self, norm: Any, max_norm: float) -> None:
        """Of the step just taken: the gradient norm that clipping reported, and what it was to be clipped to."""
        if self._installed and self._book.steps:
            self._book.steps[-1].norm = (norm, max_norm)

    def facts(self) -> RankFacts:
        """What was seen so far. Once the observer has left it no longer changes, and the training's objects are let go."""
        return self._testimony or self._written()

    @property
    def saw_steps(self) -> int:
        return len(self._book.steps)

    @property
    def looked_closely(self) -> bool:
        """At the last step seen."""
        return bool(self._book.steps) and self._book.steps[-1].close

    @property
    def every_step_skipped(self) -> bool:
        """Steps were asked for through a gradient scaler, and none was taken."""
        return not self._book.steps and self._book.calls.scaled_steps > 0

    @property
    def saw_forward(self) -> bool:
        return self._book.forward.called

    @property
    def rank(self) -> tuple[int, int]:
        """(rank, world size); those of the process group also after its end."""
        if dist.is_available() and dist.is_initialized():
            self._rank = (dist.get_rank(), dist.get_world_size())
        return self._rank or (int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    # What StepWindows tells

    @_guarded
    def begin(self, step: int) -> None:
        self._book.operations.leave()
        if step > self._last:
            self._done()
            return
        notes = StepNotes(step=step, close=self._is_close(step))
        self._book.steps.append(notes)
        self._book.calls.listen_to_fsdp()
        norms = self._book.calls.take_norms()
        if notes.close:
            if len(norms) == 1:
                norm, max_norm, notes.clipped = norms[0]
                notes.norm = (norm, max_norm)
            notes.micro_batches, notes.called = self._book.forward.stop()
        notes.note_schedules(self._book.around.schedules)

    @_guarded
    def before(self, optimizer: Optimizer, tensors: Stepped) -> None:
        if not self._installed:
            return
        notes = self._book.steps[-1]
        stepping = self._book.stepping.get(id(optimizer)) or self._meet(optimizer)
        notes.note_rates(optimizer, tensors)
        if not notes.close:
            return
        self._link(optimizer, stepping)
        for group, _, tensor in tensors:
            look = self._book.looks.get(id(tensor))
            state = optimizer.state.get(tensor, {})
            if look is None:
                if not can_look_at(tensor):
                    continue
                look = self._book.looks[id(tensor)] = Look()
                look.first(tensor, state, group, notes.step)
            link = self._book.links.get(id(tensor))
            if link is not None and link.live is not None:
                look.against_live(tensor, link.live, first=notes.step == 1)
            look.before(optimizer, group, tensor, state)
            if tensor.grad is not None:
                self._book.sizes.count("gradient" if self._book.is_live(tensor) else "master_gradient", tensor, tensor.grad)

    @_guarded
    def after(self, optimizer: Optimizer, tensors: Stepped) -> None:
        self._book.calls.steps_taken += 1
        if not self._installed:
            return
        notes = self._book.steps[-1]
        if notes.close:
            stepping = self._book.stepping[id(optimizer)]
            for group, place, tensor in tensors:
                state = optimizer.state.get(tensor, {})
                if (look := self._book.looks.get(id(tensor))) is not None:
                    look.after(group, tensor, state, notes.step)
                stepping.note(tensor, group, place, state)
        if self._is_close(notes.step + 1):
            self._book.forward.install()
        if notes.step == self._middle < self._last:
            self._book.operations.enter()

    @_guarded
    def end(self) -> None:
        notes = self._book.steps[-1]
        if notes.close:
            places = [place for place in notes.stepped if place in self._book.looks]
            clipped = [place for place in places if self._stands_for(place) & notes.clipped]
            looks = [self._book.looks[place] for place in clipped or places]  # a script may clip only some of what it steps
            notes.stepped_norm = sum(look.gradient_squared or 0.0 for look in looks) ** 0.5

    def _stands_for(self, place: int) -> set[int]:
        link = self._book.links.get(place)
        return {place} if link is None else {place, *(covered for _, covered in link.covers)}

    # Getting to know what is there

    def _is_close(self, step: int) -> bool:
        return step in (1, self._middle, self._last)

    def _meet(self, optimizer: Optimizer) -> Stepping:
        """An optimizer steps for the first time: find what is around it."""
        model, outermost, schedules = self._given
        if model is None:
            known = [*(stepping.optimizer for stepping in self._book.stepping.values()), optimizer]
            around = look_around(known, [*self._book.around.models, *self._book.steps[-1].called])
            if schedules is not None:
                around.schedules = list(schedules)
            known_schedules = self._book.around.schedules  # first: they keep the names that they have
            known_ids = set(map(id, known_schedules))
            around.schedules = [*known_schedules, *(each for each in around.schedules if id(each) not in known_ids)]
            self._book.around = around
            self._know_models()
            chain = around.chains[-1]
            self._book.steps[-1].note_schedules(around.schedules)
        else:
            chain = optimizer_chain(outermost)
        stepping = self._book.stepping[id(optimizer)] = Stepping(optimizer, chain)
        return stepping

    def _know_models(self) -> None:
        for model in self._book.around.models:
            for name, parameter in live_parameters(model):
                self._book.live[id(parameter)] = name
                self._book.live_storages.add(storage_of(parameter))
        self._book.live_storages.discard(0)  # empty shards all "share" the null pointer
        self._book.forward.roots = {id(model) for model in self._book.around.models}

    def _link(self, optimizer: Optimizer, stepping: Stepping) -> None:
        """Which live parameter stands behind each tensor. Done at each close look: DeepSpeed fills its groups late."""
        found = list(find_links(stepping.chain, self._book.live))
        if not found:
            stepped = tensors_of(optimizer)
            if not any(self._book.is_live(tensor) for tensor in stepped):
                live = [pair for model in self._book.around.models for pair in live_parameters(model)]
                sure = [link for link in self._book.links.values() if link.live is not None]
                known = {place for link in sure for place in (id(link.stepped), *(covered for _, covered in link.covers))}
                found = list(matched(stepped, live, known))
        for link in found:
            self._book.links[id(link.stepped)] = link
        for model in self._book.around.models:
            for _, parameter in live_parameters(model):
                if parameter.grad is not None:
                    self._book.sizes.count("gradient", parameter, parameter.grad)
        self._watch_bystanders()

    def _watch_bystanders(self) -> None:
        handed = self._book.handed()
        for model in self._book.around.models:
            trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
            self._book.bystanders.look(parameter for parameter in trainable if id(parameter) not in handed)

    # Leaving

    @_guarded
    def _finish(self) -> None:
        """The last step has no successor that would compare what it left."""
        self._windows.close()
        self._watch_bystanders()
        for tensor, link in [(link.stepped, link) for link in self._book.links.values()]:
            look = self._book.looks.get(id(tensor))
            if look is not None and link.live is not None and look.steps and local_shard(link.live).numel():
                look.against_live(tensor, link.live, first=False)

    def _done(self) -> None:
        self._finish()
        self._leave()
        if self._on_done is not None:
            self._on_done(self)

    def _leave(self) -> None:
        """Take everything off that was installed, keep the facts, and let go of the training's objects."""
        self._installed = False
        self._windows.remove()
        self._book.operations.leave()
        self._book.forward.stop()
        self._book.calls.silence()
        self._testimony = self._final_testimony()
        self._book = Notebook(self._book.source, None, None, Surroundings(), steps=self._book.steps)

    def _written(self) -> RankFacts:
        for wrapper in self._windows.wrappers & self._book.stepping.keys():
            del self._book.stepping[wrapper]
        return testimony(self._book, *self.rank, tuple(self._problems))

    def _final_testimony(self) -> RankFacts:
        try:
            return self._written()
        except Exception as error:  # noqa: BLE001 (as for the hooks: whatever it is, it is not the training's)
            rank, world_size = self.rank
            problems = (*self._problems, f"writing down: {_told(error)}")
            missing = dict.fromkeys(SECTIONS, "the observer failed before it could say")
            return RankFacts(rank=rank, world_size=world_size, source=self._book.source, missing=missing, problems=problems)
