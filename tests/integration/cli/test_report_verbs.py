"""`report`, `check`, `baseline promote` and `verify` as a user runs them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import product

import pytest

from benchbox.analysis.noise import describe_floor
from benchbox.errors import EXIT_INCONCLUSIVE, EXIT_OK, EXIT_THRESHOLD, EXIT_USAGE
from benchbox.store.noise import Noise, NoiseRun, write_noise
from benchbox.store.run import RunStore
from tests.support.commands import run_in_process as benchbox
from tests.support.example_run import CELL, MEASURE, OOM, example_record, example_run, steady_records, write_example


@pytest.fixture
def complete(tmp_path):
    store = RunStore(tmp_path / "whole")
    regression = {"metric": "step_time_s", "where": {}, "max_regression": 0.05}
    store.write_run(example_run([CELL], thresholds=[regression], measure=asdict(MEASURE) | {"launches": 5}))
    for record in steady_records(step_s=0.2):
        store.write_record(record)
    return store


def test_a_failed_cell_fails_the_check_with_one_line_and_exit_code_4(tmp_path):
    result = benchbox("check", write_example(tmp_path).path)
    assert result.returncode == EXIT_THRESHOLD
    assert result.stderr == f"error: 1 of 8 demands on {tmp_path} are not met\n"
    table = result.stdout.splitlines()
    assert table[0].split() == ["cell", "metric", "expected", "found", "verdict"]
    assert table[3].split()[-4:] == ["status", "ok", "oom", "breach"]


def test_a_run_is_compared_with_the_baseline_that_was_promoted(complete, tmp_path):
    before = benchbox("check", complete.path, cwd=tmp_path)
    assert before.returncode == EXIT_THRESHOLD
    remedy = (
        "no baseline reports/baselines/example-cpu-2-cores/example.json; promote a run you trust: benchbox baseline promote RUN"
    )
    assert f"note: {remedy}\n" in before.stdout
    assert before.stderr == f"error: missing: 1 of 2 demands on {complete.path} cannot be judged: {remedy}\n"
    verdict = json.loads(benchbox("check", complete.path, "--format", "json", cwd=tmp_path).stdout)
    assert (verdict["verdict"], [row["verdict"] for row in verdict["rows"]]) == ("missing", ["ok", "missing"])
    promoted = benchbox("baseline", "promote", complete.path, cwd=tmp_path)
    assert promoted.returncode == EXIT_OK
    assert (tmp_path / "reports/baselines/example-cpu-2-cores/example.json").is_file()
    own = benchbox("check", complete.path, cwd=tmp_path)
    assert own.returncode == EXIT_THRESHOLD
    assert "was promoted from this run" in own.stderr
    measure_again(complete, step_s=0.201)
    assert benchbox("check", complete.path, cwd=tmp_path).returncode == EXIT_OK
    measure_again(complete, step_s=0.22)
    slower = benchbox("check", complete.path, "--format", "json", cwd=tmp_path)
    assert slower.returncode == EXIT_THRESHOLD
    verdict = json.loads(slower.stdout)
    assert verdict["verdict"] == "breach"
    assert [row["verdict"] for row in verdict["rows"]] == ["ok", "breach"]
    assert verdict["rows"][1]["expected"].startswith("<= ")


def test_what_launches_do_not_settle_is_inconclusive_and_fails_on_request(complete, tmp_path):
    assert benchbox("baseline", "promote", complete.path, cwd=tmp_path).returncode == EXIT_OK
    measure_again(complete, step_s=0.209)
    complete.write_record(example_record(launch=5, step_s=0.6))
    result = benchbox("check", complete.path, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (
        EXIT_OK,
        f"inconclusive: launches do not settle 1 of 2 demands on {complete.path}\n",
    )
    assert (
        "note: backend=ddp: launches do not settle whether it is worse: a new run of more launches, or a quieter host, can"
        in result.stdout
    )
    assert benchbox("check", complete.path, "--strict", cwd=tmp_path).returncode == EXIT_INCONCLUSIVE


def measure_again(store, *, step_s):
    for record in steady_records(step_s=step_s, started="2026-01-02"):
        store.write_record(record)


def test_a_run_with_holes_is_no_baseline(tmp_path):
    result = benchbox("baseline", "promote", write_example(tmp_path / "run").path, "--out", tmp_path / "b")
    assert result.returncode == EXIT_THRESHOLD
    assert "1 of 8 cells are not ok in all 2 launches" in result.stderr
    assert not (tmp_path / "b").exists()


def test_verify_counts_satisfied_invariants_and_names_violations(complete):
    good = benchbox("verify", complete.path)
    assert good.returncode == EXIT_OK
    assert good.stdout.splitlines()[-1] == "5 records, every invariant that applies holds"
    record = example_record(launch=2)
    record["throughput"]["global_samples_per_s"] *= 8
    complete.write_record(record)
    bad = benchbox("verify", complete.path)
    assert bad.returncode == EXIT_THRESHOLD
    assert f"{CELL.cell_id} launch 2: throughput follows from the slowest rank's step times: " in bad.stdout
    assert bad.stderr == f"error: violations in 5 records of {complete.path}: 1\n"


def test_report_prints_the_table_and_where_it_wrote_and_answers_within_the_memory(complete, tmp_path):
    second = write_example(tmp_path / "other").path
    one = benchbox("report", complete.path)
    assert one.returncode == EXIT_OK
    assert one.stdout.splitlines()[-4:] == [
        str(complete.path / name) for name in ("report.html", "report.md", "table.csv", "table.parquet")
    ]
    both = benchbox("report", complete.path, second, "--out", tmp_path / "out", "--memory", "200MiB")
    assert both.returncode == EXIT_OK
    assert (tmp_path / "out" / "whole" / "report.html").is_file()
    for text in (both.stdout, *((tmp_path / "out" / "other" / name).read_text() for name in ("report.html", "report.md"))):
        assert "Fastest of 4 set-ups in 200 MiB: backend=zero2 " in text
        assert "No answer: none of 3 set-ups fits in 200 MiB." in text
    same = benchbox("report", complete.path, complete.path, "--out", tmp_path / "out")
    assert same.returncode == EXIT_USAGE


@pytest.mark.parametrize("out", ["report.txt", "report.txt/reports"])
def test_a_file_in_place_of_the_output_folder_is_one_line_and_exit_code_2(complete, tmp_path, out):
    (tmp_path / "report.txt").write_text("notes")
    result = benchbox("report", complete.path, "--out", out, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (EXIT_USAGE, "")
    assert result.stderr == f"error: --out {out}: report.txt is a file; name a folder: it gets several files\n"
    assert (tmp_path / "report.txt").read_text() == "notes"


def test_a_published_run_has_no_cells_folder_and_every_verb_reads_it_as_before(complete, tmp_path):
    published, baseline = tmp_path / "published", tmp_path / "baseline"
    assert benchbox("baseline", "promote", complete.path, "--out", baseline).returncode == EXIT_OK
    measure_again(complete, step_s=0.2)
    packed = benchbox("report", complete.path, "--out", published, "--pack")
    assert packed.returncode == EXIT_OK
    assert packed.stdout.splitlines()[-1] == str(published / "records.parquet")
    assert benchbox("report", complete.path).returncode == EXIT_OK  # verify reads the tables and ratios of both
    names = {"report.html", "report.md", "figures", "table.csv", "table.parquet", "run.json", "chain.jsonl", "records.parquet"}
    assert {path.name for path in published.iterdir()} == names
    assert benchbox("baseline", "promote", published, "--out", tmp_path / "again").returncode == EXIT_OK
    for verb in (["verify"], ["check", "--baseline", baseline], ["check", "--format", "json", "--baseline", baseline]):
        original, again = benchbox(*verb, complete.path), benchbox(*verb, published)
        assert (again.returncode, again.stdout) == (original.returncode, original.stdout) == (EXIT_OK, original.stdout)
    (published / "records.parquet").write_bytes(b"PAR1")
    for verb in ("verify", "check", "report"):
        damaged = benchbox(verb, published)
        assert damaged.returncode == EXIT_USAGE
        assert damaged.stderr.startswith(f"error: {published / 'records.parquet'}: cannot be read as Parquet")
        assert damaged.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", [("report",), ("check",), ("verify",), ("baseline", "promote")])
@pytest.mark.parametrize("defect", ["absent", "damaged"])
def test_what_cannot_be_read_is_one_line_and_exit_code_2(complete, verb, defect, tmp_path):
    path = tmp_path / "absent"
    if defect == "damaged":
        path = complete.path
        record = complete.record_path(CELL.cell_id, 1)
        record.write_text(record.read_text()[:500])
    result = benchbox(*verb, path)
    assert result.returncode == EXIT_USAGE
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_thresholds_of_a_file_replace_those_of_the_matrix(complete, tmp_path):
    """Several matrices may share it."""
    thresholds = tmp_path / "policy.yaml"
    demand = (
        "thresholds:\n  - {metric: step_time_s, max: 0.01, severity: warning}\n  - {metric: global_samples_per_s, min: 1}\n"
    )
    thresholds.write_text(demand)
    warned = benchbox("check", complete.path, "--thresholds", thresholds)
    assert warned.returncode == EXIT_OK, warned.stderr
    assert warned.stdout.splitlines()[2].endswith("warning")
    thresholds.write_text(demand.replace("warning", "error"))
    assert benchbox("check", complete.path, "--thresholds", thresholds).returncode == EXIT_THRESHOLD
    annotated = benchbox("check", complete.path, "--thresholds", thresholds, "--format", "github")
    assert annotated.stdout.startswith(f"::error file={thresholds},line=2,"), annotated.stdout
    thresholds.write_text(demand.replace("max", "maxx"))
    wrong = benchbox("check", complete.path, "--thresholds", thresholds)
    assert wrong.returncode == EXIT_USAGE
    assert f"{thresholds}:2:27: unknown key 'maxx'" in wrong.stderr


def test_thresholds_of_a_file_may_name_the_policies_and_sizes_of_the_run(tmp_path):
    """They were found by options that `check` has not."""
    cell, store = replace(CELL, policy="hf:qwen2", size="huge"), RunStore(tmp_path / "run")
    store.write_run(example_run([cell], measure=asdict(MEASURE) | {"launches": 1}))
    store.write_record(example_record(cell))
    thresholds = tmp_path / "t.yaml"
    thresholds.write_text("thresholds:\n  - {metric: step_time_s, max: 10, where: {policy: 'hf:qwen2', size: huge}}\n")
    checked = benchbox("check", store.path, "--thresholds", thresholds)
    assert checked.returncode == EXIT_OK, checked.stderr
    thresholds.write_text(thresholds.read_text().replace("hf:qwen2", "hf:qwen3"))
    assert "hf:qwen3" in benchbox("check", store.path, "--thresholds", thresholds).stderr


def test_a_summary_is_a_page_of_markdown_and_writes_nothing(tmp_path):
    store = write_example(tmp_path / "run")
    finding = {"code": "BXP101", "severity": "error", "title": "t|", "where": "w", "rank": 0, "evidence": {}, "repair": "r"}
    *_, record = (record for record in store.records() if record["status"] == "ok")
    for severity in ("error", "info"):
        record["precision"]["findings"].append(finding | {"severity": severity, "code": f"BXP-{severity}"})
    store.write_record(record)
    before = sorted(path.name for path in store.path.iterdir())
    done = benchbox("report", store.path, "--summary", "--memory", "200MiB")
    assert done.returncode == EXIT_OK, done.stderr
    assert sorted(path.name for path in store.path.iterdir()) == before
    lines = done.stdout.splitlines()
    assert lines[0] == "# example"
    assert lines[2].endswith(" 8 cells, 7 ok, 1 failed, 1 skipped.")
    assert any(line.startswith("- Fastest of 4 set-ups in 200 MiB: backend=zero2 ") for line in lines)
    assert "- No answer: none of 3 set-ups fits in 200 MiB." in lines
    assert "**Launches do not settle whether fsdp1\\_full or zero2 trains faster: 4 more of each cell could.**" in lines
    failed = lines[lines.index("### What did not run") + 2]
    assert failed.endswith("(1 of 8 cells): oom, OutOfMemoryError: tried to allocate 2.00 GiB")
    assert lines[lines.index("### Precision") + 2 :] == ["- BXP-error error: t\\|"]
    refused = benchbox("report", store.path, "--summary", "--memory", "much")
    assert (refused.returncode, refused.stdout) == (EXIT_USAGE, "")
    assert refused.stderr == "error: --memory: 'much' is not an amount of memory; write it as 80GiB, 512MiB or 1.5GB\n"


def test_a_summary_of_a_large_run_is_cut_to_a_page(tmp_path):
    cells = [replace(CELL, backend="zero2", seed=seed, batch=batch) for seed in range(9) for batch in (2, 3)]
    store = RunStore(tmp_path)
    store.write_run(example_run(cells))
    for number, cell in enumerate(cells):
        error = OOM | {"message": f"message {number}\n# of <several> *lines*"}
        store.write_record(example_record(cell, **({"status": "oom", "error": error} if cell.batch == 3 else {})))
    text = benchbox("report", tmp_path, "--summary").stdout
    assert text.count("- The only set-up of 2 that ended ok: ") == 8
    assert "\n1 more tasks: report.html has their answers.\n" in text
    lines = [line for line in text.splitlines() if ": oom, OutOfMemoryError: message " in line]
    assert len(lines) == 8
    assert all(line.endswith(" # of \\<several\\> \\*lines\\*") for line in lines)
    assert "\n1 more: report.html and table.csv have all of them.\n" in text


def test_figures_are_written_alone_and_of_several_runs_into_a_folder_of_each(complete, tmp_path):
    second = write_example(tmp_path / "other").path
    done = benchbox("report", complete.path, second, "--figures", tmp_path / "figures")
    assert done.returncode == EXIT_OK, done.stderr
    written = [*(tmp_path / "figures").rglob("*.*")]
    assert sorted(done.stdout.splitlines()) == sorted(map(str, written))
    for name, end in product(("whole", "other"), ("svg", "pdf", "png")):
        assert tmp_path / "figures" / name / f"throughput.{end}" in written
    assert not (complete.path / "report.html").exists()
    refused = benchbox("report", complete.path, "--figures", complete.path / "run.json")
    assert (refused.returncode, refused.stderr[: len("error: --figures ")]) == (EXIT_USAGE, "error: --figures ")
    namesake = write_example(tmp_path / "a" / complete.path.name).path
    refused = benchbox("report", complete.path, namesake, "--figures", tmp_path / "both")
    assert (refused.returncode, (tmp_path / "both").exists()) == (EXIT_USAGE, False)
    assert "two of these runs have the same folder name: --figures cannot hold both" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--summary", "--pack"), "with --summary no report is written: leave --pack out"),
        (("--figures", "f", "--summary", "--out", "o"), "with --figures and --summary no report is written: leave --out out"),
    ],
)
def test_options_of_a_report_that_contradict_are_refused_and_nothing_is_written(complete, tmp_path, options, message):
    before = sorted(tmp_path.rglob("*"))
    refused = benchbox("report", complete.path, *options, cwd=tmp_path)
    assert (refused.returncode, refused.stdout, refused.stderr) == (EXIT_USAGE, "", f"error: {message}\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_output_that_cannot_be_written_is_refused_before_the_work(complete, tmp_path):
    """The checkpoint that two of the verbs name does not exist: what they say is about their output."""
    file = tmp_path / "file"
    file.write_text("")
    for words, message in (
        (("validate", tmp_path, "--out", tmp_path), f"--out {tmp_path}: is a folder; name a file in it"),
        (("validate", tmp_path, "--out", file / "v.json"), f"--out {file / 'v.json'}: {file} is a file; write elsewhere"),
        (("compare", complete.path, complete.path, "--out", tmp_path), f"--out {tmp_path}: is a folder; name a file in it"),
        (("site", complete.path, "--out", file), f"--out {file}: {file} is a file; name a folder: it gets several files"),
    ):
        refused = benchbox(*words)
        assert (refused.returncode, refused.stdout, refused.stderr) == (EXIT_USAGE, "", f"error: {message}\n")


def test_a_check_names_the_noise_floor_and_what_is_within_it_is_no_breach(complete, tmp_path):
    assert benchbox("baseline", "promote", complete.path, cwd=tmp_path).returncode == EXIT_OK
    measure_again(complete, step_s=0.215)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    before = benchbox("check", complete.path, cwd=tmp_path, variables=cache)
    assert before.returncode == EXIT_THRESHOLD
    machine = "example-cpu-2-cores"
    assert f"noise floor of {machine}: not measured; `benchbox noise matrices/example.yaml` measures it\n" in before.stdout
    noise = Noise(sigma=0.05, launches=12, ratio=1.0, cell="backend=ddp", measured_at="2026-01-02", benchbox_version="1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache["XDG_CACHE_HOME"])
        write_noise(machine, "example", noise)
    after = benchbox("check", complete.path, cwd=tmp_path, variables=cache)
    assert (after.returncode, after.stderr.partition(":")[0]) == (EXIT_OK, "inconclusive"), "8% are within the floor"
    floor = f"{describe_floor(noise, 5)} (benchbox noise, 2026-01-02, backend=ddp)"
    assert f"noise floor of {machine}: {floor}\n" in after.stdout
    other = NoiseRun(started_at="2026-01-01", launches=12, mean=0.0, sigma=0.05, setup={"torch": "1.0"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache["XDG_CACHE_HOME"])
        write_noise(machine, "example", replace(noise, runs=(other,)))
        unused = benchbox("check", complete.path, cwd=tmp_path, variables=cache)
        write_noise(machine, "example", noise)
    assert unused.returncode == EXIT_THRESHOLD
    assert "not used, since it was measured otherwise: torch 2.13.0 against 1.0; `benchbox noise matrices/" in unused.stdout
    shown = json.loads(benchbox("check", complete.path, "--format", "json", cwd=tmp_path, variables=cache).stdout)
    assert shown["noise"] == asdict(noise) | {"runs": [], "other_runs": []}
    assert shown["rows"][0].keys() == {"cell_id", "cell", "metric", "expected", "found", "verdict", "note"}
    baselines = tmp_path / "reports" / "baselines"
    (baselines / machine).rename(baselines / "my-host")
    named = benchbox("check", complete.path, "--machine", "My host", cwd=tmp_path, variables=cache)
    assert f"noise floor of {machine}: {floor}\n" in named.stdout, (
        "a folder of another name holds baselines of the same machine"
    )


def test_the_noise_floor_of_another_matrix_of_the_machine_is_named_and_excuses_no_regression(complete, tmp_path):
    assert benchbox("baseline", "promote", complete.path, cwd=tmp_path).returncode == EXIT_OK
    measure_again(complete, step_s=0.32)
    noise = Noise(sigma=0.3, launches=12, ratio=1.0, cell="backend=ddp", measured_at="2026-01-02", benchbox_version="1")
    assert describe_floor(noise, 5).startswith("198.")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        for matrix in ("noisy", "another"):
            write_noise("example-cpu-2-cores", matrix, noise)
    done = benchbox("check", complete.path, cwd=tmp_path, variables={"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert done.returncode == EXIT_THRESHOLD, "60% slower, and nobody measured the noise of this matrix"
    assert (
        "noise floor of example-cpu-2-cores: not measured for this matrix (that of another, noisy is of other cells and not "
        "used); `benchbox noise matrices/example.yaml` measures it\n"
    ) in done.stdout


def test_verify_refuses_a_run_without_records_and_checks_the_figures_of_a_baseline(complete, tmp_path):
    empty = RunStore(tmp_path / "empty")
    empty.write_run(example_run([CELL]))
    refused = benchbox("verify", empty.path)
    message = f"error: {empty.path}: no records to verify; `benchbox run` measures them\n"
    assert (refused.returncode, refused.stderr) == (EXIT_USAGE, message)
    assert benchbox("baseline", "promote", complete.path, "--out", tmp_path).returncode == EXIT_OK
    path = tmp_path / "example-cpu-2-cores" / "example.json"
    held = benchbox("verify", path)
    assert (held.returncode, held.stdout.splitlines()[-1]) == (EXIT_OK, "1 cell, the figures follow from the launches")
    baseline = json.loads(path.read_text())
    baseline["cells"][CELL.cell_id]["values"]["step_time_s"]["value"] /= 2
    path.write_text(json.dumps(baseline))
    forged = benchbox("verify", path)
    assert forged.returncode == EXIT_THRESHOLD
    assert forged.stdout.startswith(f"cell {CELL.cell_id}: step_time_s is ")
    assert forged.stderr == f"error: violations in {path}: 1\n"
    del baseline["cells"][CELL.cell_id]["cell"]["batch"]
    path.write_text(json.dumps(baseline))
    damaged = benchbox("verify", path)
    assert damaged.returncode == EXIT_THRESHOLD
    assert damaged.stdout.startswith(f"cell {CELL.cell_id}: malformed (")
    refused = benchbox("verify", path, "--head", "0" * 64)
    assert (refused.returncode, refused.stderr) == (
        EXIT_USAGE,
        "error: --head is for run directories: a baseline has no chain\n",
    )


def test_a_baseline_is_made_of_one_run(complete, tmp_path):
    refused = benchbox("baseline", "promote", complete.path, complete.path, "--out", tmp_path / "b")
    assert refused.returncode == EXIT_USAGE
    assert refused.stderr.startswith("error: a baseline is made of one run; ")
    named = benchbox("baseline", "promote", complete.path, "--machine", "My Host", "--out", tmp_path / "b")
    assert named.stdout.startswith(f"{tmp_path / 'b' / 'my-host' / 'example.json'}: 1 cell; commit it")
    checked = benchbox("check", complete.path, "--baseline", tmp_path / "b")
    assert "no baseline" in checked.stderr
    checked = benchbox("check", complete.path, "--baseline", tmp_path / "b", "--machine", "My Host")
    assert "was promoted from this run" in checked.stderr


def test_a_run_of_two_versions_is_no_baseline(complete, tmp_path):
    record = complete.record(CELL.cell_id, 1)
    complete.write_record(record | {"environment": record["environment"] | {"torch": "1.0"}})
    refused = benchbox("baseline", "promote", complete.path, "--out", tmp_path / "b")
    assert refused.returncode == EXIT_THRESHOLD
    assert refused.stderr.startswith("error: launches of the run differ in torch: 1.0, 2.13.0: measure all anew")
