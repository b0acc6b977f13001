"""Documents say no more than there is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_a_document_names_exists():
    named = {
        found
        for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
        for found in re.findall(r"(test_\w+\.py)::(test_\w+)", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 60
    for file, name in sorted(named):
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file}::{name}"


def test_every_file_that_a_document_links_to_exists():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
