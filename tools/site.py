"""A hook of MkDocs: turns links from docs/ to files outside of docs/ into links to generated pages of the site."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

OUTSIDE = (
    "benchmarks/RESULTS.md",
    "benchmarks/RESULTS-DATA.md",
    "benchmarks/RESULTS-MEMORY.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)


def on_files(files: Files, config: Any) -> Files:
    root = Path(config["config_file_path"]).parent
    for name in OUTSIDE:
        text = (root / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=re.sub(r"\]\(docs/", "](", text)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"\]\((?:\.\./)+((?:benchmarks/)?[A-Z-]+\.md)", r"](\1", markdown)
