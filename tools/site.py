"""What mkdocs.yml needs besides docs/: a hook of mkdocs.

* Pages that stand elsewhere because people and tools look for them there (CONTRIBUTING.md, ...).
  Links are written as they are right in the repository, and are turned here.
* Every notebook of examples/ as a page, with its outputs; its README.md; and the scripts as files.
* `<!-- figures: prefill.md#figures -->` becomes that section of that page, so that a table stands
  in one file and can be read in two places.
"""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(ROOT.glob("examples/*.ipynb"))
SCRIPTS = sorted(ROOT.glob("examples/*.py"))
ELSEWHERE = {  # in the repository -> on the site
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changes.md",
    "src/smoe_mlx/demo/CARD.md": "demo-model.md",
    "examples/README.md": "examples.md",
    **{f"examples/{p.name}": f"examples/{p.stem}.md" for p in NOTEBOOKS},
    **{f"examples/{p.name}": f"examples/{p.name}" for p in SCRIPTS},
}
IN_REPOSITORY = {site: path for path, site in ELSEWHERE.items()}


def on_config(config):
    examples = next(x["Examples"] for x in config.nav if "Examples" in x)
    examples += [ELSEWHERE[f"examples/{p.name}"] for p in NOTEBOOKS]
    return config


def on_files(files, config):
    for path, site in ELSEWHERE.items():
        if path.endswith(".ipynb"):
            files.append(File.generated(config, site, content=notebook_page(ROOT / path)))
        elif (ROOT / path).exists():
            files.append(File.generated(config, site, abs_src_path=str(ROOT / path)))
        else:  # no examples/README.md
            names = "".join(f"* [{p.name}](examples/{p.name})\n" for p in SCRIPTS)
            files.append(File.generated(config, site, content=f"# Examples\n\n{names}"))
    return files


def on_page_markdown(markdown, page, config, files):
    here = page.file.src_uri
    markdown = re.sub(
        r"<!-- figures: (\S+)#(\S+) -->", lambda m: f"\n{section(m[1], m[2])}\n", markdown
    )
    return turn_links(markdown, IN_REPOSITORY.get(here, f"docs/{here}"), here)


def turn_links(markdown: str, path: str, site: str) -> str:
    """Links of the file `path` of the repository, as they are right on the page `site`."""

    def turn(link: re.Match) -> str:
        target, anchor = link[1], link[2] or ""
        there = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if re.match(r"[a-z]+:", target) or not (ROOT / there).exists():
            return link[0]
        there = ELSEWHERE.get(there, there.removeprefix("docs/"))
        return f"]({posixpath.relpath(there, posixpath.dirname(site) or '.')}{anchor})"

    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", turn, markdown)


def slug(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def section(name: str, anchor: str) -> str:
    """A section of a page of docs/, without its heading; headings in it go one level down."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    parts = re.split(r"^(#+) (.*)\n", text, flags=re.M)  # text, then level, title, text, ...
    at = next(i for i in range(1, len(parts), 3) if slug(parts[i + 1]) == anchor)
    out = parts[at + 2]
    for i in range(at + 3, len(parts), 3):
        if len(parts[i]) <= len(parts[at]):
            break
        out += f"#{parts[i]} {parts[i + 1]}\n{parts[i + 2]}"
    return out.strip()


def notebook_page(path: Path) -> str:
    """A notebook as Markdown, its outputs (text, PNG, SVG) with it."""
    out = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            out.append(source)
        elif source:
            out.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", "")))
            if "image/svg+xml" in data:
                out.append("".join(data["image/svg+xml"]))
            elif "image/png" in data:
                png = "".join(data["image/png"]).replace("\n", "")
                out.append(f"![](data:image/png;base64,{png})")
            elif text.strip():
                out.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(out) + "\n"
