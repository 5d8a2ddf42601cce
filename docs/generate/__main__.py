"""Write the generated documentation: `python docs/generate [FOLDER]`, by default into docs/."""

from __future__ import annotations

import sys
from pathlib import Path

from import_graph import read_import_graph
from picture import draw_architecture
from reference import write_reference

DOCS = Path(__file__).resolve().parents[1]


def main(folder: Path) -> None:
    """Write architecture.svg and reference.md into `folder`."""
    picture = draw_architecture(read_import_graph(DOCS.parent))
    (folder / "architecture.svg").write_text(picture, encoding="utf-8")
    (folder / "reference.md").write_text(write_reference(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
