"""`policy: path/to/folder` and `policy: hf:path/to/config` in a matrix or training file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchbox.errors import ConfigurationError
from benchbox.launch.fingerprint import policy_sha256
from benchbox.registry.policies import build_policy, policy_entry
from benchbox.spec import load_matrix
from benchbox.spec.train import load_train
from tests.support.foreign import FOLDER

MATRIX = "name: trial\nsize: tiny\nworld_size: 2\nbatch: 1\nbackend: ddp\ndata: synthetic\n"


@pytest.fixture
def project(tmp_path):
    """A folder with a matrix and a policy of one's own beside it."""
    shutil.copytree(FOLDER, tmp_path / "models" / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def load(project, text, **overrides):
    path = project / "matrix.yaml"
    path.write_text(MATRIX + text)
    return load_matrix(path, overrides)


def refused(project, text, **overrides):
    with pytest.raises(ConfigurationError) as caught:
        load(project, text, **overrides)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    "text",
    [
        "policy: models/mine\n",
        "policy: ./models/mine\n",
        "axes: {policy: [models/mine, pi0]}\n",
        "axes: {kinds: [{policy: models/mine, seed: 1}, {policy: pi0, seed: 2}]}\n",
        "policy: pi0\ninclude: [{policy: models/mine}]\n",
    ],
)
def test_a_folder_is_named_by_a_path_relative_to_the_matrix(project, text, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    matrix = load(project, text)
    cells = {cell.policy: cell for cell in matrix.cells()}
    assert cells["mine"].attention == "native"
    assert "pi0" not in cells or cells["pi0"].attention == "sdpa"
    assert matrix.policy_dirs == ((project / "models" / "mine").resolve(),)
    assert type(build_policy("mine", "tiny", _axes(cells["mine"]), matrix.policy_dirs).module).__name__ == "Speller"


def _axes(cell):
    from benchbox.registry.contracts import Axes

    return Axes(attention=cell.attention)


def test_the_id_of_a_cell_does_not_depend_on_where_the_folder_lies(project, tmp_path_factory):
    moved = tmp_path_factory.mktemp("moved")
    shutil.move(project / "models", moved / "models")
    (project / "models").mkdir()
    (here,) = load(moved, "policy: models/mine\n").cells()
    shutil.move(moved / "models" / "mine", project / "models" / "mine")
    (there,) = load(project, "policy: models/mine\n").cells()
    assert here.cell_id == there.cell_id


def test_on_the_command_line_a_path_is_relative_to_the_working_directory(project, monkeypatch):
    monkeypatch.chdir(project / "models")
    (cell,) = load(project, "policy: pi0\n", policy="./mine").cells()
    assert cell.policy == "mine"


def test_what_is_no_policy_is_refused_at_its_place(project):
    (project / "models" / "half").mkdir()
    (project / "models" / "half" / "policy.py").touch()
    (missing,) = refused(project, "policy: models/gone\n")
    assert f"{project}/matrix.yaml:7:9: models/gone is not a policy: there is no such folder" in missing
    (half,) = refused(project, "axes: {policy: [models/half]}\n")
    assert f"{project}/matrix.yaml:7:17: models/half is not a policy: it lacks presets.yaml" in half


def test_a_file_is_no_policy_and_says_what_one_is(project, monkeypatch):
    """The file is named by its path, by its name beside the matrix, and by its name in the working directory."""
    (project / "mlp_policy.py").touch()
    (by_path,) = refused(project, "policy: ./mlp_policy.py\n")
    what = "a policy is a folder with policy.py and presets.yaml"
    assert f"matrix.yaml:7:9: ./mlp_policy.py is not a policy: it is a file, and {what}; it is looked for in " in by_path
    (by_name,) = refused(project, "policy: mlp_policy.py\n")
    assert f"matrix.yaml:7:9: unknown policy 'mlp_policy.py'; {project}/mlp_policy.py is a file, and {what}" in by_name
    monkeypatch.chdir(project)
    (by_option,) = refused(project, "policy: pi0\n", policy="mlp_policy.py")
    assert by_option == f"--set policy=mlp_policy.py: unknown policy 'mlp_policy.py'; mlp_policy.py is a file, and {what}"


def test_a_folder_without_a_slash_is_said_how_to_be_named(project, monkeypatch):
    (project / "models" / "matrices").mkdir()
    (beside,) = refused(project, "axes: {policy: [pi0, models]}\n")
    assert "matrix.yaml:7:22: unknown policy 'models'; write ./models: the path of a folder has a slash" in beside
    monkeypatch.chdir(project / "models")
    (here,) = refused(project, "policy: mine\n")
    assert "matrix.yaml:7:9: unknown policy 'mine'; write models/mine: the path" in here
    (option,) = refused(project, "policy: pi0\n", policy="mine")
    assert option == "--set policy=mine: unknown policy 'mine'; write ./mine: the path of a folder has a slash"


def test_a_folder_may_not_take_the_name_of_another_policy(project):
    shutil.copytree(project / "models" / "mine", project / "models" / "pi0")
    (taken,) = refused(project, "policy: models/pi0\n")
    assert "matrix.yaml:7:9: a policy named 'pi0' exists already" in taken
    assert taken.endswith("; write pi0 to use that one, or rename this folder"), "that one may be an installed copy of it"
    shutil.copytree(project / "models" / "mine", project / "mine")
    (twice,) = refused(project, "axes: {policy: [models/mine, ./mine]}\n")
    assert "matrix.yaml:7:30: a policy named 'mine' exists already" in twice
    assert twice.endswith("; write mine to use that one, or rename this folder")


def test_what_lies_beside_the_folder_hides_nothing(project):
    """Neither another policy of a bundled name, nor shared layers."""
    shutil.copytree(project / "models" / "mine", project / "models" / "pi0")
    (project / "models" / "_layers").mkdir()
    matrix = load(project, "axes: {policy: [models/mine, pi0]}\n")
    assert policy_entry("pi0", matrix.policy_dirs).folder != project / "models" / "pi0"
    assert type(build_policy("pi0", "tiny", _axes(next(c for c in matrix.cells() if c.policy == "pi0")), matrix.policy_dirs))


def test_an_attention_kernel_that_a_policy_lacks_is_refused_at_its_place(project):
    (refusal,) = refused(project, "policy: models/mine\nattention: sdpa\n")
    assert "matrix.yaml:8:12: policy mine cannot switch its attention to sdpa; write attention: native" in refusal
    (refusal,) = refused(project, "policy: pi0\nattention: native\n")
    assert "matrix.yaml:8:12: policy pi0 has no attention 'native'; one of eager, sdpa, flex" in refusal
    points = "axes:\n  points:\n  - {policy: models/mine, attention: native}\n  - {policy: pi0, attention: native}\n"
    (refusal,) = refused(project, points)
    assert "matrix.yaml:10:30: policy pi0 has no attention 'native'" in refusal


def test_a_training_file_names_policies_in_the_same_way(project):
    path = project / "train.yaml"
    path.write_text(f"{MATRIX}policy: models/mine\nsteps: 2\n")
    config = load_train(path)
    assert (config.cell.policy, config.cell.attention) == ("mine", "native")
    assert config.policy_dirs == ((project / "models" / "mine").resolve(),)
    assert type(config).from_dict(config.to_dict()).cell == config.cell
    path.write_text(f"{MATRIX}policy: models/mine\nattention: eager\nsteps: 2\n")
    with pytest.raises(ConfigurationError, match=r"train.yaml:8:12: policy mine cannot switch its attention to eager"):
        load_train(path)


def test_an_adapter_is_named_before_a_colon(project):
    (cell,) = load(project, "policy: hf:qwen3\n").cells()
    assert (cell.policy, cell.attention) == ("hf:qwen3", "sdpa")
    (unknown,) = refused(project, "policy: hg:qwen3\n")
    assert "matrix.yaml:7:9: unknown adapter 'hg' in policy 'hg:qwen3'" in unknown
    (empty,) = refused(project, "policy: 'hf:'\n")
    assert "matrix.yaml:7:9: policy 'hf:' names nothing to adapt; write hf:NAME" in empty
    (missing,) = refused(project, "policy: hf:configs/qwen\n")
    assert "matrix.yaml:7:9: configs/qwen of policy hf:configs/qwen does not exist" in missing


@pytest.mark.parametrize(
    ("policy", "hint"),
    [
        ("lerobot:pi5", "adapter lerobot has no policy 'pi5' at size tiny; did you mean 'pi05'?"),
        ("hf:gwen3", "adapter hf has no policy 'gwen3' at size tiny; did you mean 'qwen3'?"),
        ("diffusers:unet", "adapter diffusers has no policy 'unet' at size tiny; one of dit"),
    ],
)
def test_a_misspelt_name_of_an_adapter_is_refused_at_its_place(project, policy, hint):
    (refusal,) = refused(project, f"axes: {{policy: [pi0, '{policy}']}}\n")
    assert f"matrix.yaml:7:22: {hint}" in refusal
    (refusal,) = refused(project, "policy: pi0\n", policy=policy)
    assert refusal == f"--set policy={policy}: {hint}"
    path = project / "train.yaml"
    path.write_text(f"{MATRIX}policy: {policy}\nsteps: 2\n")
    with pytest.raises(ConfigurationError) as caught:
        load_train(path)
    assert str(caught.value) == f"{path}:7:9: {hint}"


def test_a_folder_is_refused_by_an_adapter_that_builds_none(project, monkeypatch):
    monkeypatch.chdir(project)
    (project / "act").mkdir()
    for source in ("act/.", "./act"):
        (refusal,) = refused(project, f"policy: lerobot:{source}\n")
        assert "matrix.yaml:7:9: adapter lerobot has no policy './act' at size tiny; did you mean 'act'?" in refusal


def test_a_model_type_that_is_known_only_when_it_is_built_passes(project):
    """Size full has every model type of transformers."""
    (cell,) = load(project, "policy: hf:olmo\n", size="full").cells()
    assert cell.policy == "hf:olmo"


def test_a_folder_of_an_adapter_without_a_slash_is_said_how_to_be_named(project, monkeypatch):
    monkeypatch.chdir(project)
    (refusal,) = refused(project, "policy: hf:models\n")
    assert (
        "matrix.yaml:7:9: adapter hf has no policy 'models' at size tiny; a folder is written with a slash: hf:./models"
        in refusal
    )


@pytest.mark.parametrize(("policy", "size"), [("hf:qwen3", "tiny"), ("hf:qwen3", "full"), ("diffusers:dit", "tiny")])
def test_a_policy_that_generates_its_batches_is_refused_on_a_dataset(project, policy, size):
    (refusal,) = refused(project, f"policy: {policy}\n", data="sample", size=size)
    assert refusal == f"--set data=sample: policy {policy} generates its batches, and reads no dataset; write data: synthetic"
    path = project / "train.yaml"
    path.write_text(MATRIX.replace("synthetic", "sample") + f"policy: {policy}\nsteps: 2\n")
    with pytest.raises(ConfigurationError, match=r"train.yaml:6:7: policy .* generates its batches"):
        load_train(path)
    assert load(project, "policy: hf:paligemma\n", data="sample")


def test_the_config_of_an_adapter_is_relative_to_the_matrix_and_part_of_the_fingerprint(project, monkeypatch):
    config = project / "configs" / "qwen" / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    monkeypatch.chdir(project)
    (cell,) = load(project, "policy: hf:configs/qwen\n").cells()
    assert cell.policy == "hf:./configs/qwen"
    first = policy_sha256(cell.policy)
    config.write_text("{ }")
    assert policy_sha256(cell.policy) != first
    assert policy_sha256("hf:qwen3") not in (first, policy_sha256(cell.policy))


def test_a_folder_has_a_fingerprint_of_all_its_files(project):
    folder = project / "models" / "mine"
    first = policy_sha256("mine", [folder])
    (folder / "helper.py").write_text("")
    assert policy_sha256("mine", [folder]) != first
    assert Path(policy_entry("mine", [folder]).folder) == folder.resolve()


def test_a_folder_of_one_policy_with_a_name_that_is_taken_is_refused(tmp_path):
    """It would be ignored: a modified copy of a bundled policy, and the bundled one measured."""
    folder = tmp_path / "pi0"
    folder.mkdir()
    (folder / "policy.py").write_text("")
    (folder / "presets.yaml").write_text("tiny: {}\n")
    with pytest.raises(ConfigurationError, match="a policy named 'pi0' exists already, in "):
        policy_entry("pi0", [folder])
    assert policy_entry("pi0", [tmp_path]).folder == folder
    bundled = policy_entry("pi0").folder
    assert policy_entry("pi0", [bundled / ".." / "pi0"]).folder.samefile(bundled), "it is that folder itself"


@pytest.mark.parametrize(
    ("presets", "problem"),
    [
        ("tiny: {}\ntiny: {}\n", ':2:1: not YAML: found duplicate key "tiny"'),
        ("tiny: !!int few\n", ": not YAML: invalid literal for int() with base 10: 'few'"),
        ("- tiny\n", ":1:1: presets are a mapping of size to settings"),
    ],
)
def test_a_problem_of_presets_is_shown_in_their_file(project, presets, problem):
    file = project / "models" / "mine" / "presets.yaml"
    file.write_text(presets)
    assert any(line.startswith(f"{file.resolve()}{problem}") for line in refused(project, "policy: models/mine\n"))
