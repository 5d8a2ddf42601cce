"""`benchbox eval` from checkpoint to report."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from benchbox.cli.app import app
from benchbox.data import open_dataset
from benchbox.data.dataset.lerobot import LeRobotDataset
from benchbox.data.loading.loader import open_samples
from benchbox.data.sample import sample_path
from benchbox.data.samples.digest import digest_datasets
from benchbox.data.text.prompt import EOS, ByteTokenizer
from benchbox.errors import ConfigurationError, DataError, RecordError
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from benchbox.report.evaluation import _row, build_evaluation_report
from benchbox.session import build_session
from benchbox.simulation import evaluate as simulation
from benchbox.simulation import responses
from benchbox.simulation.live import LiveInputs
from benchbox.simulation.processes import SimulationError
from benchbox.simulation.responses import Responses
from benchbox.simulation.rollout import run_episodes
from benchbox.spec.cell import Cell, DataSpec
from benchbox.spec.datasets import DatasetSpec
from benchbox.spec.train import CheckpointSection
from benchbox.store.files import read_json, write_json
from benchbox.trainer.checkpoint import CheckpointManager, load_policy
from tests.support.datasets import annotate, write_robot
from tests.support.foreign import write_adapted_policy
from tests.support.policy_batches import build

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

    from benchbox.registry.contracts import Batch
    from benchbox.simulation.rollout import EpisodeResult

TOY = "tests.support.toy_environment:ToyEnvironment"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of an untrained policy on the shipped dataset."""
    cell = Cell(policy="pi05", size="tiny_flow", backend="single", world_size=1, batch=1)
    session = build_session(cell, build("pi05", "tiny_flow"), [open_dataset(sample_path()).statistics])
    section = CheckpointSection(background=False)
    return CheckpointManager(tmp_path_factory.mktemp("training"), cell, section).save(session, 7)


def run_eval(checkpoint: Path, env: str, out: Path, *options: str) -> Result:
    result = CliRunner().invoke(app, ["eval", str(checkpoint), "--env", env, "--out", str(out), *options])
    if result.exception is not None:
        raise result.exception
    return result


def evaluate(checkpoint: Path, env: str, out: Path, *options: str) -> str:
    return run_eval(checkpoint, env, out, *options).stdout


def test_each_checkpoint_of_a_training_has_an_evaluation_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    """The earlier one, perhaps hours of simulation, stays without `--out`."""
    folder = tmp_path / "training" / "checkpoints"
    for steps in (3, 7):
        shutil.copytree(checkpoint, folder / f"step-{steps:08}")
    (folder / "latest").symlink_to("step-00000007")
    for given in (tmp_path / "training", folder / "step-00000003"):
        options = ["--env", TOY, "--episodes", "1", "--videos", "0", "--execute", "5"]
        result = CliRunner().invoke(app, ["eval", str(given), *options])
        assert result.exception is None, result.exception
    records = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("evaluation-*/evaluation.json")}
    assert {name.rpartition("-step-")[2]: record["checkpoint"]["name"] for name, record in records.items()} == {
        "00000003": "step-00000003",
        "00000007": "step-00000007",
    }


def test_an_evaluation_writes_its_record_videos_and_report(checkpoint: Path, tmp_path: Path) -> None:
    result = run_eval(checkpoint, TOY, tmp_path, "--episodes", "12", "--videos", "2", "--execute", "5")
    record = json.loads((tmp_path / "evaluation.json").read_text())
    assert [(episode["seed"], episode["solved"]) for episode in record["episodes"]] == [(n, n < 10) for n in range(12)]
    assert record["success_rate"]["solved"] == 10
    assert record["error"] is None
    assert record["success_rate"]["low"] == pytest.approx(0.552, abs=1e-3)
    assert (record["checkpoint"]["steps"], record["execute"], record["horizon"]) == (7, 5, 10)
    assert record["task_in_dataset"] is False
    assert result.stderr.startswith("warning: the task 'add' of the environment is none of the 2 in ")
    assert "solved 10 of 12 episodes, 83% (95% interval 55% to 95%)" in result.stdout
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == ["episode-0000.mp4", "episode-0001.mp4"]
    page = (tmp_path / "evaluation.html").read_text()
    assert "10 of 12" in page
    assert "55% to 95%" in page
    assert page.count("data:image/png;base64,") == 8
    assert "| 10 of 12 | 83% | 55% to 95% |" in (tmp_path / "evaluation.md").read_text()


def test_episodes_that_ended_before_an_error_are_recorded_with_it_and_without_a_rate(checkpoint: Path, tmp_path: Path) -> None:
    """The page of an earlier evaluation does not stay beside the record."""
    (tmp_path / "evaluation.html").touch()
    failing = "tests.support.toy_environment:FailingEnvironment"
    message = "episode of seed 2, after step 0: the environment failed: ValueError: no action like 4 numbers"
    with pytest.raises(SimulationError, match=message):
        run_eval(checkpoint, failing, tmp_path, "--episodes", "4", "--videos", "0", "--environments", "1")
    record = read_json(tmp_path / "evaluation.json")
    assert record["error"] == {"type": "SimulationError", "message": message}
    assert record["success_rate"] is None
    assert [(episode["seed"], episode["solved"], episode["steps"]) for episode in record["episodes"]] == [
        (0, True, 3),
        (1, True, 4),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluation.json"]
    with pytest.raises(RecordError, match=f"evaluation.json: the evaluation did not end: {message}; evaluate again"):
        build_evaluation_report([tmp_path])


def save_untrained(name: str, root: Path, responses: str) -> Path:
    """Save a checkpoint of an untrained policy on the shipped dataset with one response in all frames, or an empty one."""
    columns = {"response": [responses] * len(open_dataset(sample_path()))} if responses else {}
    data = DataSpec(kind="lerobot", datasets=(DatasetSpec(path=str(annotate(sample_path(), root / "data", columns))),))
    cell = Cell(policy=name, size="tiny", backend="single", world_size=1, batch=1, data=data)
    session = build_session(cell, build(name, "tiny"), [open_dataset(sample_path()).statistics])
    return CheckpointManager(root / "training", cell, CheckpointSection(background=False)).save(session, 1)


@pytest.mark.parametrize("responses", ["reach", ""])
def test_a_policy_trained_on_data_with_responses_acts_on_its_own_which_the_record_and_the_page_show(
    responses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acted: list[Batch] = []

    def load(*args: Any, **options: Any) -> Any:
        """Load the policy, whose head then finds the bytes of one text most likely, and then the end."""
        policy = load_policy(*args, **options)
        ids = cycle([*ByteTokenizer(300).encode("<b>up"), EOS])
        policy.token_head = lambda _: lambda hidden, predict: torch.full((len(hidden), 1), next(ids))
        select = policy.select_actions
        policy.select_actions = lambda batch: acted.append(batch) or select(batch)
        return policy

    monkeypatch.setattr(simulation, "load_policy", load)
    saved = save_untrained("pi05", tmp_path, responses)
    result = run_eval(saved, TOY, tmp_path / "evaluation", "--episodes", "1", "--videos", "1", "--execute", "1")
    assert "acts without one" not in result.stderr
    assert len(acted) > 1, "an equal response is recorded once"
    assert [bool(batch["response_mask"].any()) for batch in acted] == [bool(responses)] * len(acted)
    episode = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())["episodes"][0]
    assert episode["responses"] == ([{"step": 0, "text": "<b>up"}] if responses else [])
    page = (tmp_path / "evaluation" / "evaluation.html").read_text()
    assert ("from action 1: <q>&lt;b&gt;up</q>" in page) == bool(responses)


def test_a_policy_that_reads_responses_and_writes_none_acts_without_one_and_a_warning_says_so(tmp_path: Path) -> None:
    saved = save_untrained("pi07_low_level", tmp_path, "reach")
    result = run_eval(saved, TOY, tmp_path / "evaluation", "--episodes", "1", "--videos", "0")
    assert "and acts without one: it reads them and writes none\n" in result.stderr
    assert json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())["episodes"][0]["responses"] == []


def test_a_response_whose_end_a_tokenizer_cannot_write_is_not_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutEnd(ByteTokenizer):
        eos = None

    spec = replace(build("pi06", "tiny").batch_spec(), response_tokens=8)
    inputs = LiveInputs(dataset=open_dataset(sample_path()), spec=spec, tokenizer=None, seed=0)
    monkeypatch.setattr(LeRobotDataset, "has_text", lambda *_: True)
    assert Responses(inputs).are_generated
    assert Responses(inputs).warning is None
    monkeypatch.setattr(responses, "open_tokenizer", lambda _, vocabulary: WithoutEnd(vocabulary))
    assert not Responses(inputs).are_generated
    assert "no token that ends a text" in str(Responses(inputs).warning)


@pytest.mark.parametrize(("first_action", "acted"), [(0, 5), (-1, 4)])
def test_an_adapted_module_acts_its_chunk_from_the_current_frame_on(tmp_path: Path, first_action: int, acted: int) -> None:
    """It acts with the attention that it has; it can switch to no other, nor be built on the meta device."""
    write_adapted_policy(tmp_path / "policies", first_action)
    cell = Cell(policy="adapted", size="tiny", backend="single", world_size=1, batch=1, attention="native")
    policy = build_policy("adapted", "tiny", Axes(attention="native"), [tmp_path / "policies"])
    session = build_session(cell, policy, [open_dataset(sample_path()).statistics])
    saved = CheckpointManager(tmp_path / "training", cell, CheckpointSection(background=False)).save(session, 1)
    folders = ("--policy-dir", str(tmp_path / "policies"))
    evaluate(saved, TOY, tmp_path / "evaluation", "--episodes", "1", "--videos", "0", *folders)
    record = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert (record["horizon"], record["execute"]) == (acted, acted)
    with pytest.raises(ConfigurationError, match=f"--execute: {acted + 1} actions of a chunk of {acted}"):
        evaluate(saved, TOY, tmp_path / "refused", "--execute", str(acted + 1), *folders)


def test_a_policy_acts_in_bfloat16_on_request(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record says so, and the weights that acted are in bfloat16; statistics stay in float32."""
    loaded = []
    monkeypatch.setattr(
        simulation, "load_policy", lambda *args, **options: loaded.append(load_policy(*args, **options)) or loaded[0]
    )
    evaluate(checkpoint, TOY, tmp_path, "--episodes", "1", "--videos", "0", "--dtype", "bfloat16")
    assert json.loads((tmp_path / "evaluation.json").read_text())["dtype"] == "bfloat16"
    assert {parameter.dtype for parameter in loaded[0].parameters()} == {torch.bfloat16}
    assert {buffer.dtype for name, buffer in loaded[0].named_buffers() if "normaliser" in name} == {torch.float32}


def test_the_seeds_the_limit_and_the_executed_actions_are_those_of_the_options(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An episode is solved after 3 actions more than its seed."""
    executed = []

    def run(*arguments: Any, execute: int, **options: Any) -> list[EpisodeResult]:
        executed.append(execute)
        return run_episodes(*arguments, execute=execute, **options)

    monkeypatch.setattr(simulation, "run_episodes", run)
    options = ("--seed", "7", "--episodes", "3", "--max-steps", "11", "--execute", "4", "--videos", "0")
    evaluate(checkpoint, TOY, tmp_path, *options)
    record = json.loads((tmp_path / "evaluation.json").read_text())
    episodes = [(episode["seed"], episode["solved"], episode["steps"]) for episode in record["episodes"]]
    assert episodes == [(7, True, 10), (8, True, 11), (9, False, 11)]
    assert executed == [4]


def test_averages_act_on_request_and_are_refused_where_a_checkpoint_has_none(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no averages of the weights"):
        evaluate(checkpoint, TOY, tmp_path, "--episodes", "1", "--videos", "0", "--ema")


@pytest.mark.parametrize(("policy", "size"), [("pi05", "tiny_flow"), ("pi0", "tiny")])
def test_a_prompt_is_not_written_with_statistics_that_have_changed(policy: str, size: str, tmp_path: Path) -> None:
    """A policy that reads the state in its prompt would see other numbers.

    What normalises actions, and the state that pi0 reads, is in the checkpoint.
    """
    root = tmp_path / "robot"
    robot = {"cameras": {"top": (16, 16)}, "state": 4, "action": 4}
    write_robot(root, **robot)
    data = DataSpec(kind="lerobot", datasets=(DatasetSpec(path=str(root)),), workers=0)
    cell = Cell(policy=policy, size=size, backend="single", world_size=1, batch=1, data=data)
    module = build(policy, size)
    samples = open_samples(data, module.batch_spec(), cell.seed)
    session = build_session(cell, module, samples.statistics)
    saved = CheckpointManager(
        tmp_path / "training", cell, CheckpointSection(background=False), data=digest_datasets(samples)
    ).save(session, 1)
    options = ("--episodes", "1", "--videos", "0", "--execute", "5")
    evaluate(saved, TOY, tmp_path / "before", *options)
    statistics = read_json(root / "meta/stats.json")
    doubled = {name: [2 * number for number in statistics["action"][name]] for name in ("mean", "std", "q01", "q99")}
    write_json(root / "meta/stats.json", statistics | {"action": statistics["action"] | doubled})
    evaluate(saved, TOY, tmp_path / "other actions", *options)
    shutil.rmtree(root)
    write_robot(root, **robot, scale=2.0)
    if policy == "pi0":
        evaluate(saved, TOY, tmp_path / "after", *options)
        return
    with pytest.raises(ConfigurationError) as refused:
        evaluate(saved, TOY, tmp_path / "after", *options)
    hint = "evaluate with those of the training, by which the policy reads the state in its prompt"
    assert str(refused.value) == f"{saved}: other data: {root}: the statistics of the state have changed; {hint}"
    write_json(saved / "checkpoint.json", read_json(saved / "checkpoint.json") | {"data": None, "crc32": None})
    evaluate(saved, TOY, tmp_path / "after", *options)


def test_more_actions_than_a_chunk_has_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--execute: 11 actions of a chunk of 10"):
        evaluate(checkpoint, TOY, tmp_path, "--execute", "11")


def test_a_policy_acts_in_meta_world(checkpoint: Path, tmp_path: Path) -> None:
    if find_spec("metaworld") is None:
        pytest.skip("Meta-World is not installed: the extra `sim`")
    evaluate(checkpoint, "metaworld/reach-v3", tmp_path, "--episodes", "1", "--max-steps", "10", "--videos", "1")
    record = json.loads((tmp_path / "evaluation.json").read_text())
    (episode,) = record["episodes"]
    assert record["task_in_dataset"] is True
    assert (record["task"], record["max_steps"], episode["solved"] or episode["steps"] == 10) == ("reach", 10, True)
    assert len(episode["stills"]) == 4


def test_the_extra_is_named_where_it_is_missing(checkpoint: Path, tmp_path: Path) -> None:
    if find_spec("metaworld") is not None:
        pytest.skip("Meta-World is installed")
    with pytest.raises(ConfigurationError, match="needs the extra `sim`"):
        evaluate(checkpoint, "metaworld/reach-v3", tmp_path)


def test_evaluations_of_other_weights_of_a_checkpoint_are_others(checkpoint: Path, tmp_path: Path) -> None:
    """Without `--out` no one replaces another, and reports say which weights acted."""
    given = shutil.copytree(checkpoint, tmp_path / "step-00000007")
    for options in ((), ("--dtype", "bfloat16")):
        arguments = ["eval", str(given), "--env", TOY, "--episodes", "1", "--videos", "0", *options]
        result = CliRunner().invoke(app, arguments)
        assert result.exception is None, result.exception
    folders = sorted(tmp_path.glob("evaluation-*"))
    assert [("bfloat16" in path.name, json.loads((path / "evaluation.json").read_text())["dtype"]) for path in folders] == [
        (True, "bfloat16"),
        (False, "float32"),
    ]
    assert "| step-00000007, bfloat16 |" in (folders[0] / "evaluation.md").read_text()
    assert "| step-00000007 |" in (folders[1] / "evaluation.md").read_text()
    record = json.loads((folders[1] / "evaluation.json").read_text())
    assert _row(folders[1], record | {"weights": "averages"}).name == "step-00000007, averages"
