"""Run every script of the corpus alone and under the audit: `make audit-corpus`.

Prints a table, and writes it as JSON and Markdown into `build/audit-corpus`. Exit code 1 when a verdict is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from fnmatch import fnmatchcase

from tests.audit_corpus.environments import BUILD, build_deepspeed_extension, corpus_environment
from tests.audit_corpus.execution import execute
from tests.audit_corpus.table import CASES
from tests.audit_corpus.tables import describe_totals, write_tables
from tests.audit_corpus.verdicts import Verdict, compare

RESULTS = BUILD / "results"
AUDIT = (sys.executable, "-m", "benchbox.cli.app", "audit-precision", "--format", "json", "--")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make audit-corpus", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="a case, or a pattern such as 'lightning*'")
    parser.add_argument("--resume", action="store_true", help="keep the results of cases that were run before")
    options = parser.parse_args()
    patterns = options.only or ["*"]
    selected = [case for case in CASES if any(fnmatchcase(case.name, pattern) for pattern in patterns)]
    if not selected:
        parser.error(f"no case matches {', '.join(patterns)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for case in selected:
        result = RESULTS / f"{case.name}.json"
        if options.resume and result.exists():
            continue
        corpus_environment(case.environment).build()
        if "deepspeed" in case.name:
            build_deepspeed_extension(case.environment)
        alone = execute(case, case.command)
        audited = execute(case, [*AUDIT, *case.command])
        repeated = execute(case, case.command) if audited.checksums != alone.checksums else None
        verdict = compare(case, alone, audited, repeated)
        result.write_text(json.dumps(verdict.to_dict(), indent=1))
        print(f"{case.name}: {verdict.verdict}{'' if verdict.right else ' (wrong)'}", flush=True)
    known = {case.name: RESULTS / f"{case.name}.json" for case in CASES}
    verdicts = [Verdict.from_dict(json.loads(path.read_text())) for path in known.values() if path.exists()]
    print(write_tables(verdicts, BUILD))
    print(describe_totals(verdicts))
    names = {case.name for case in selected}
    return int(any(not verdict.right for verdict in verdicts if verdict.name in names))


if __name__ == "__main__":
    sys.exit(main())
