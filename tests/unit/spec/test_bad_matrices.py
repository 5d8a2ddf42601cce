"""Whatever is wrong with a matrix is said in lines `file:line:column: what; what to do`, all at once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchbox.audit.selection import load_suppressions
from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.recipes import recipes
from benchbox.spec import load_matrix
from benchbox.spec.threshold_section import load_thresholds
from benchbox.spec.train import load_train
from tests.support.good_matrix import GOOD

MATRICES = Path(__file__).parents[3] / "matrices"
SECOND_STEP = "the second step is the first with the state of the optimizer"
FROZEN_STEP = "steps with a frozen backbone take less memory than those of training"

# (what is appended to a good matrix of seven lines, the line it earns)
APPENDED = [
    ("polcy: x", "m.yaml:8:1: unknown key 'polcy'; did you mean 'policy'?"),
    ("name: again", "m.yaml:8:1: duplicate key 'name'; it is already at m.yaml:1:1"),
    ("3: x", "m.yaml:8:1: a key must be text, not '3'; put it in quotes"),
    ("[a]: x", "m.yaml:8:1: a key must be text, not a collection"),
    ("seed: '3'", 'm.yaml:8:7: seed must be a whole number, not "3"; take the quotes off'),
    ("seed: -1", "m.yaml:8:7: seed must be at least 0, not -1"),
    ("seed:", "m.yaml:8:1: seed must be a whole number, not null"),
    ("seed: 2020-01-01", "m.yaml:8:7: '2020-01-01' reads as a timestamp; put it in quotes"),
    ("seed: !!int x", "m.yaml:8:7: 'x' cannot be read as int"),
    ("seed: !date 3", "m.yaml:8:7: tag !date has no meaning here; remove it"),
    (
        "seed: !!python/name:os.system 3",
        "m.yaml:8:7: tag tag:yaml.org,2002:python/name:os.system has no meaning here; remove it",
    ),
    ("seed: =", "m.yaml:8:7: '=' reads as a value; put it in quotes"),
    (f"seed: 0x{'f' * 5000}", f"m.yaml:8:7: '0x{'f' * 38}' cannot be read as int"),
    ('size: "\\U0001F600"\nseed: "\\U00110000"', "m.yaml:9:8: not YAML: there is no such character; write it as itself"),
    (": 3", "m.yaml:8:1: a key is empty; write one before the colon"),
    ("cams: 1.5", "m.yaml:8:7: cams must be a whole number, not 1.5"),
    ("cams: true", "m.yaml:8:7: cams must be a whole number, not true"),
    ("accumulation: 0", "m.yaml:8:15: accumulation must be at least 1, not 0"),
    ("checkpointing: yes", 'm.yaml:8:16: checkpointing must be true or false, not "yes"; write true or false'),
    ("attention: flash", 'm.yaml:8:12: unknown attention "flash"; one of eager, flex, native, sdpa'),
    ("compile: false", "m.yaml:8:10: unknown compile false; one of blocks, model, off"),
    ("padding: short", 'm.yaml:8:10: unknown padding "short"; one of full, longest'),
    ("recipe: fp16", "m.yaml:8:9: unknown recipe 'fp16'; one of " + ", ".join(sorted(recipes()))),
    ("order: shuffle", "m.yaml:8:8: unknown order 'shuffle'; did you mean 'frame_shuffle'?"),
    ("data: {block: 0}", "m.yaml:8:15: data.block must be at least 1, not 0"),
    ("data: {buffer: many}", 'm.yaml:8:16: data.buffer must be a whole number, not "many"'),
    ("freeze: vision", "m.yaml:8:9: unknown freeze preset 'vision'; did you mean 'freeze_vision'?"),
    ("batch: 3", "m.yaml:7:3: batch is an axis and also stands at the top level, at m.yaml:8:1; keep one"),
    (
        "weights: nowhere.safetensors",
        "m.yaml:8:10: weights: nowhere.safetensors: there is no such file; name a safetensors file, or a folder of them",
    ),
    (
        "include: [{backend: ddp, batch: 4, weights: /proc/self}]",
        "m.yaml:8:45: weights: /proc/self: there are no safetensors files in it; name a safetensors file, or a folder of them",
    ),
    ("data: sampel", "m.yaml:8:7: unknown data \"sampel\"; did you mean 'sample'?"),
    ("data: {lerobot: ''}", "m.yaml:8:17: data.lerobot is empty"),
    ("data: {lerobot: nowhere}", "m.yaml:8:17: nowhere is not a LeRobot dataset: there is no such folder"),
    ("data: {lerobot: /}", "m.yaml:8:17: / is not a LeRobot dataset: there is no meta/info.json in it"),
    (
        "data: {tokenizer: nowhere}",
        "m.yaml:8:19: nowhere is not a tokenizer: there is no such file; name a tokenizer.json or its folder",
    ),
    (
        "data: {workers: 0, tokenizer: /}",
        "m.yaml:8:31: / is not a tokenizer: there is no tokenizer.json in it; name a tokenizer.json or its folder",
    ),
    ("data: {tokenizer: 3}", "m.yaml:8:19: data.tokenizer must be text, not 3; put it in quotes"),
    ("data: {tokenizer: bytes, worker: 2}", "m.yaml:8:26: unknown key 'worker'; did you mean 'workers'?"),
    ("steps: 100", "m.yaml:8:1: unknown key 'steps'; it belongs to measure: write measure.steps"),
    ("lr: 0.001", "m.yaml:8:1: unknown key 'lr'; it belongs to optim: write optim.lr"),
    (
        "measure: {memory_limit: 80000}",
        "m.yaml:8:25: memory_limit is 80000 bytes, in which no rank trains; give it with a unit, as in 40 GiB or 512 MiB",
    ),
    ("measure: {step: 3}", "m.yaml:8:11: unknown key 'step'; did you mean 'steps'?"),
    ("measure: 3", "m.yaml:8:10: measure must be a mapping, not 3"),
    ("optim: {betas: [0.9]}", "m.yaml:8:16: optim.betas must have 2 values, and has 1"),
    ("optim: {lr: .inf}", "m.yaml:8:13: optim.lr must be a finite number, not Infinity"),
    *(
        (f"optim: {{{key}: {10**20}}}", f"m.yaml:8:{11 + len(key)}: optim.{key} must be at most 1000000000, not {10**20}")
        for key in ("warmup_steps", "total_steps", "freeze_backbone_steps", "thaw_warmup_steps")
    ),
    (
        "measure: {memory_limit: 40 GiBs}",
        "m.yaml:8:25: '40 GiBs' is not an amount of memory; write it as in 40 GiB, 512 MiB, 1.5 GB, or as bytes",
    ),
    (
        "measure: {memory_limit: 1 GiB, warmup_steps: 2}",
        (
            "m.yaml:8:10: memory_limit holds during the warm-up, and warmup_steps is 2; "
            "give at least 3: the second step is the first with the state of the optimizer"
        ),
    ),
    ("optim: {schedule: cosine}", "m.yaml:8:19: unknown schedule \"cosine\"; did you mean 'warmup_cosine'?"),
    ("include: [{backend: ddp}]", "m.yaml:8:11: an included point needs batch: the top level does not say"),
    ("include: [3]", "m.yaml:8:11: include[0] must be a mapping, not 3"),
    ("exclude: [{world_size: 2}]", "m.yaml:8:1: every cell is excluded"),
    ("exclude: [{batch: 2}, {backend: ddp, batch: 8}]", "m.yaml:8:23: no cell has backend=ddp batch=8; batch is one of 1, 2"),
    ("exclude: [{backend: ddp}, {backend: zero1}]", "m.yaml:8:27: no cell has backend=zero1; backend is one of zero2, ddp"),
    ("exclude: [{backend: ddp, batch: 4}]", "m.yaml:8:11: no cell has backend=ddp batch=4; batch is one of 1, 2"),
    ("reference: {backend: zero3}", "m.yaml:8:12: no cell has backend=zero3; backend is one of zero2, ddp"),
    (
        "thresholds: [{metric: mfu}]",
        "m.yaml:8:14: demands nothing of mfu; give expect, min, max, or vs: baseline with max_regression",
    ),
    ("thresholds: [{metric: step_tim_s, max: 1}]", "m.yaml:8:23: unknown metric 'step_tim_s'; did you mean 'step_time_s'?"),
    ("thresholds: [{metric: status, expect: okay}]", "m.yaml:8:14: unknown status to expect 'okay'; did you mean 'ok'?"),
    ("thresholds: [{metric: status, max: 3}]", "m.yaml:8:14: status is a word, not a number; give expect"),
    ("thresholds: [{metric: mfu, min: 2, max: 1}]", "m.yaml:8:14: min 2.0 is above max 1.0: nothing passes"),
    ("thresholds: [{metric: mfu, max: 1, accept: {reason: r}}]", "m.yaml:8:44: thresholds[0].accept needs the key 'until'"),
    (
        "thresholds: [{metric: mfu, max: 1, accept: {reason: r, until: soon}}]",
        "m.yaml:8:63: 'soon' is no day; write it as \"2026-12-31\"",
    ),
    ("thresholds: [{metric: mfu, max: 1, where: {batch: 7}}]", "m.yaml:8:43: no cell has batch=7; batch is one of 1, 2"),
    (
        "thresholds: [{metric: mfu, max: 1, where: {batch: fastest}}]",
        "m.yaml:8:51: batch: fastest selects walks, and this matrix has none; under axes, write batch: {search: max}",
    ),
    (
        "thresholds: [{metric: step_time_s, max: 1, where: {batch: fastest}}]",
        (
            "m.yaml:8:14: step_time_s depends on the batch, and another one may be fastest; "
            "give one of global_samples_per_s, hfu, mfu"
        ),
    ),
    (
        "thresholds: [{metric: mfu, max: 1, where: {batch: slowest}}]",
        'm.yaml:8:51: thresholds[0].where.batch must be a whole number, not "slowest"',
    ),
    ("reference: {batch: fastest}", 'm.yaml:8:20: reference.batch must be a whole number, not "fastest"'),
    (
        "thresholds: [{metric: mfu, vs: baseline}]",
        "m.yaml:8:14: demands nothing of mfu; give expect, min, max, or vs: baseline with max_regression",
    ),
    (
        "thresholds: [{metric: mfu, vs: baseline, max_regression: '5'}]",
        "m.yaml:8:58: '5' is not a fraction; write 5% or 0.05",
    ),
    (
        f"thresholds: [{{metric: mfu, vs: baseline, max_regression: {'9' * 400}}}]",
        "m.yaml:8:58: is no fraction; write 5% or 0.05",
    ),
    (
        f"thresholds: [{{metric: mfu, vs: baseline, max_regression: {'9' * 400}%}}]",
        f"m.yaml:8:58: '{'9' * 400}%' is not a fraction; write 5% or 0.05",
    ),
    (
        f"measure: {{memory_limit: {'9' * 400} GiB}}",
        f"m.yaml:8:25: '{'9' * 400} GiB' is not an amount of memory; write it as in 40 GiB, 512 MiB, 1.5 GB, or as bytes",
    ),
    (
        "thresholds: [{metric: mfu, vs: baseline, max_regression: 5}]",
        "m.yaml:8:58: 5 is 500%; write 5% or 0.05, and 500% if that is meant",
    ),
    (
        "thresholds: [{metric: mfu, vs: baseline, max_regression: 1.0}]",
        "m.yaml:8:58: 1 is 100%; write 1% or 0.01, and 100% if that is meant",
    ),
    (
        "thresholds: [{metric: mfu, max_regression: 5%}]",
        "m.yaml:8:14: vs and max_regression go together; vs: baseline, max_regression: 5%",
    ),
    (
        "thresholds: [{metric: final_loss, vs: baseline, max_regression: 5%}]",
        "m.yaml:8:14: final_loss has no better direction to regress from; give expect, min or max",
    ),
    ("<<: {cams: 2}", "m.yaml:8:1: merge keys (<<) are not read; write the keys out"),
    ("cams: *four", "m.yaml:8:7: not YAML: found undefined alias 'four'"),
    ("\tcams: 1", "m.yaml:8:1: not YAML: found character '\\t' that cannot start any token; indent with spaces"),
    ("cams: \x01", "m.yaml:8:7: not YAML: unacceptable character #x0001: special characters are not allowed"),
    ("cams: &a [*a]", "m.yaml:8:7: alias to itself; write the values out"),
    ("cams: " + "[" * 60, "m.yaml:8:56: not YAML: nested deeper than 50"),
]

# (what is replaced in the good matrix, by what, the line it earns)
REPLACED = [
    ("alpha", "alpa", "m.yaml:2:9: unknown policy 'alpa'; did you mean 'alpha'?"),
    ("tiny", "tny", "m.yaml:3:7: unknown size 'tny'; did you mean 'tiny'?"),
    ("alpha\nsize: tiny", "beta\nsize: full", "m.yaml:3:7: policy beta has no size 'full'; one of tiny"),
    ("trial", "a b", "m.yaml:1:7: name \"a b\" is not a name; use letters, digits, '.', '_' and '-'"),
    ("ddp", "dpd", "m.yaml:6:20: unknown backend 'dpd'; did you mean 'ddp'?"),
    ("[1, 2]", "[]", "m.yaml:7:10: axes.batch is empty; give at least one value, or take the key out"),
    ("[1, 2]", "[1, two]", 'm.yaml:7:14: axes.batch[1] must be a whole number, not "two"'),
    ("[1, 2]", "[1]\n  compile: [bloks]", "m.yaml:8:13: unknown compile \"bloks\"; did you mean 'blocks'?"),
    ("[1, 2]", "4", "m.yaml:7:10: axes.batch must be a list, not 4"),
    ("[1, 2]", "{search: max, start: 0}", "m.yaml:7:31: axes.batch.start must be at least 1, not 0"),
    ("[1, 2]", "{search: max, star: 2}", "m.yaml:7:24: unknown key 'star'; did you mean 'start'?"),
    ("[1, 2]", "{start: 2}", "m.yaml:7:10: axes.batch needs the key 'search'"),
    (
        "[1, 2]",
        "{search: max, start: 5, at_most: 4}",
        "m.yaml:7:10: at_most 4 is below start 5: there is no batch to try",
    ),
    (
        "[1, 2]",
        "[1, 2]\n  cams: {search: max}",
        "m.yaml:8:9: only the axis batch can be searched; under axes, write batch: {search: max}",
    ),
    (
        "batch: [1, 2]",
        "pair: [{cams: 1, batch: {search: max}}]",
        "m.yaml:7:27: only the axis batch can be searched; under axes, write batch: {search: max}",
    ),
    (
        "[1, 2]",
        "[1, 2]\ninclude: [{backend: ddp, batch: {search: max}}]",
        "m.yaml:8:33: only the axis batch can be searched; under axes, write batch: {search: max}",
    ),
    (
        "[1, 2]",
        "{search: max}\nexclude: [{batch: 2}]",
        "m.yaml:8:12: batch is searched, so none can be excluded; give at_most along the axis",
    ),
    (
        "[1, 2]",
        "{search: max}\nthresholds: [{metric: mfu, max: 1, where: {backend: zero3, batch: fastest}}]",
        "m.yaml:8:43: no cell has backend=zero3; backend is one of zero2, ddp",
    ),
    (
        "[1, 2]",
        "{search: max}\nmeasure: {warmup_steps: 0, steps: 2}",
        f"m.yaml:8:1: a search takes at least 3 steps of every launch, and measure has 2; {SECOND_STEP}",
    ),
    (
        "[1, 2]",
        "{search: max}\noptim: {freeze_backbone_steps: 3}\nmeasure: {warmup_steps: 5, steps: 2}",
        f"m.yaml:8:9: a search needs 3 warm-up steps after the backbone is thawed, and measure has 5 in all; {FROZEN_STEP}",
    ),
    ("backend:", "backends:", "m.yaml:6:3: unknown axis 'backends'; did you mean 'backend'?"),
    ("size: tiny\n", "", "m.yaml:1:1: every cell needs size; give it at the top level or as an axis"),
    ("name: trial\n", "", "m.yaml:1:1: the file needs the key 'name'"),
    (
        "batch: [1, 2]",
        "pair: [{batch: 1, cams: 1}, {batch: 2}]",
        "m.yaml:7:31: every point of axis pair needs the same keys: batch, cams; this one lacks cams",
    ),
    (
        "batch: [1, 2]",
        "pair: [{batch: 1, cams: 1}, {batch: 2, seed: 1}]",
        "m.yaml:7:31: every point of axis pair needs the same keys: batch, cams; this one lacks cams and also has seed",
    ),
    ("batch: [1, 2]", "pair: [{}]", "m.yaml:7:10: this point of axis pair is empty"),
    (
        "batch: [1, 2]",
        "pair: [{batch: 1, backend: ddp}]",
        "m.yaml:7:3: axis pair varies backend, which axis backend varies already",
    ),
]


@pytest.mark.parametrize(("text", "line"), APPENDED, ids=[text[:40] for text, _ in APPENDED])
def test_a_wrong_line_is_reported_where_it_stands_with_the_remedy(refused, text, line):
    assert refused(GOOD + text + "\n") == [line]


@pytest.mark.parametrize(("old", "new", "line"), REPLACED, ids=[new[:40] or old[:40] for old, new, _ in REPLACED])
def test_a_wrong_value_is_reported_where_it_stands_with_the_remedy(refused, old, new, line):
    assert refused(GOOD.replace(old, new, 1)) == [line]


def test_the_good_matrix_of_these_tests_is_good(load):
    assert len(list(load(GOOD).cells())) == 4


def test_all_problems_come_at_once_from_top_to_bottom(refused):
    lines = refused(GOOD.replace("ddp", "dpd").replace("alpha", "alpa") + "polcy: 1\nseed: x\npolcy: 2\n")
    assert [line.split(" ")[0] for line in lines] == [f"m.yaml:{at}:" for at in ("2:9", "6:20", "8:1", "9:7", "10:1")]


def test_a_million_cells_are_counted_and_not_built(refused):
    axes = "".join(f"  {name}: [{', '.join(map(str, range(1, 101)))}]\n" for name in ("cams", "accumulation"))
    text = GOOD.replace("[1, 2]", f"[{', '.join(map(str, range(1, 51)))}]") + axes
    assert refused(text) == ["m.yaml:5:1: 1000000 cells, and a matrix may have 100000; shorten an axis"]


def test_aliases_that_expand_without_end_are_cut_off(refused):
    bomb = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{new}: &{new} [{','.join(['*' + old] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    (line,) = refused(bomb)
    assert line.endswith("aliases expand to more than 100000 values; write the values out")


def test_aliases_that_nest_without_end_are_cut_off(refused):
    """No text is nested deeper than 50, but 40 aliases to one another may be 40 times as deep, deeper than Python calls."""
    nested = ["[" * 45 + inner + "]" * 45 for inner in ("1", *(f"*a{number}" for number in range(40)))]
    (line,) = refused("".join(f"a{number}: &a{number} {text}\n" for number, text in enumerate(nested)))
    assert line.endswith("aliases nest deeper than 50; write the values out")


def test_a_value_that_no_policy_has_is_shown_where_it_is_set_and_not_where_cells_are_selected(refused):
    text = GOOD.replace("size: tiny\n", "thresholds: [{metric: mfu, min: 0, where: {size: full}}]\n")
    text = text.replace("policy: alpha", "policy: beta") + "  size: [tiny, full]\n"
    assert refused(text) == ["m.yaml:8:16: policy beta has no size 'full'; one of tiny"]


def test_a_value_that_a_policy_lacks_is_shown_in_the_point_of_that_policy(refused):
    """Other points have the same value, of policies that know it."""
    points = "  points:\n  - {policy: alpha, size: full}\n  - {policy: beta, size: full}\n"
    text = GOOD.replace("policy: alpha\nsize: tiny\n", "").replace("axes:\n", f"axes:\n{points}")
    assert refused(text) == ["m.yaml:6:26: policy beta has no size 'full'; one of tiny"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "m.yaml:1:1: is empty; start with 'name: ...'"),
        (b"# nothing\n", "m.yaml:1:1: is empty; start with 'name: ...'"),
        (b"- a\n", "m.yaml:1:1: is not a mapping; start with 'name: ...'"),
        (b"\x89PNG\r\n\x1a\n\xff", "m.yaml:1:1: is not UTF-8 text; a YAML file is meant"),
        (b"a: \0\n", "m.yaml:1:1: is a binary file; a YAML file is meant"),
        (b"a: 1\n---\nb: 2\n", "m.yaml:2:1: not YAML: expected a single document in the stream, but found another document"),
        (b"%YAML 1.3\n---\na: 1\n", "m.yaml:1:1: not YAML: unknown version 1.3; write %YAML 1.2, or remove the line"),
        (b"#" * 2_000_000, "m.yaml: is larger than 1 MiB; a page of YAML is meant"),
    ],
    ids=["empty", "comments", "a list", "an image", "a NUL", "two documents", "a version", "two megabytes"],
)
def test_a_file_that_is_no_matrix_is_named_for_what_it_is(refused, content, line):
    assert refused(content) == [line]


@pytest.mark.parametrize(("load", "beginning"), [(load_suppressions, "suppress:"), (load_thresholds, "thresholds:")])
def test_a_file_of_another_kind_is_told_how_it_begins(tmp_path: Path, load, beginning):
    for content, problem in (("", "is empty"), ("- a", "is not a mapping")):
        (tmp_path / "m.yaml").write_text(content)
        with pytest.raises(ConfigurationError, match=f"m.yaml:1:1: {problem}; start with '{beginning}'"):
            load(tmp_path / "m.yaml")


def test_a_path_that_is_no_file_is_named_for_what_it_is(tmp_path: Path):
    (tmp_path / "trial.yaml").write_text(GOOD)
    for path, line in (
        (tmp_path, f"{tmp_path}: is a directory; it holds {tmp_path}/trial.yaml"),
        (tmp_path / "trail.yaml", f"{tmp_path}/trail.yaml: no such file; did you mean '{tmp_path}/trial.yaml'?"),
        (tmp_path / "none" / "x.yaml", f"{tmp_path}/none/x.yaml: no such file"),
        (tmp_path / "trial.yaml" / "x", f"{tmp_path}/trial.yaml/x: cannot be read: Not a directory"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            load_matrix(path)
        assert str(caught.value) == line


def test_files_of_tools_are_not_offered_as_matrices_or_training_files(tmp_path: Path):
    """A checkout has `.pre-commit-hooks.yaml`."""
    (tmp_path / ".hooks.yaml").touch()
    for load, path, line in (
        (load_train, tmp_path, f"{tmp_path}: is a directory; name a YAML file"),
        (load_matrix, tmp_path / "hooks.yaml", f"{tmp_path}/hooks.yaml: no such file"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            load(path)
        assert str(caught.value) == line


def test_any_damage_to_a_matrix_ends_in_problems_and_never_in_a_traceback(tmp_path: Path):
    rng = random.Random(20)
    bases = [path.read_text() for path in sorted(MATRICES.glob("*.yaml"))]
    debris = [*"[]{}:'\"#|?%@~\t\n\x01é", "- ", "*a", "&a ", "!!int ", "!x ", "1e400", "null", "<<: ", "batch", "[[[[", ".nan"]
    path = tmp_path / "m.yaml"
    outcomes = {"loaded": 0, "refused": 0}
    for _ in range(300):
        text = rng.choice(bases)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(debris) + text[at + rng.choice([0, 0, 1, 3, 20]) :]
        path.write_text(text)
        problems = problems_in(path)
        assert all(problem.where.startswith(str(path)) and problem.message for problem in problems)
        outcomes["refused" if problems else "loaded"] += 1
    assert min(outcomes.values()) > 5


def problems_in(path: Path) -> tuple[Problem, ...]:
    try:
        load_matrix(path)
    except ConfigurationError as error:
        return error.problems
    return ()
