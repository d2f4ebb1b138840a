"""Reports as text, JSON and pages: what they hold, and that nothing of a program can break out of them."""

from __future__ import annotations

import base64
import json
import re
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from zlib import decompress

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.cli.main import main
from tensor_comprehensions.core.decisions import SUBJECTS
from tensor_comprehensions.core.knobs import override_knobs
from tensor_comprehensions.dispatch.random_inputs import sample_arguments
from tensor_comprehensions.explain.kernel_report import BY_HAND, SAME_BYTES, Report
from tensor_comprehensions.explain.page import MOST_LINES

EXAMPLES = sorted(Path("examples").glob("*.tc"))
SOFTMAX = Path("examples/softmax.tc").read_text()
LARGEST_PAGE = 400_000


def small_arguments(op: tc.Op) -> tuple[list[Any], dict[str, Any]]:
    sizes = {name: 3 if name in ("KH", "KW") else 34 if name in ("H", "W") else 64 for name in op.function.sizes}
    return sample_arguments(op.function, sizes)


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text of its listings and tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.shown: list[str] = []
        self.code: dict[str, str] = {"script": "", "style": ""}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag if tag in self.code else ""

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open:
            self.code[self._open] += data
        else:
            self.shown.append(data)


def check_page(report: Report) -> Page:
    """The page of a report, which loads nothing and runs its own script only."""
    text = report.html()
    page = Page(text)
    (policy,) = (a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    hashes = {k: base64.b64encode(sha256(v.encode()).digest()).decode() for k, v in page.code.items()}
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; script-src 'sha256-{hashes['script']}'"
    )
    for tag, attributes in page.elements:
        assert tag not in ("img", "link", "a", "iframe", "object", "form", "base"), tag
        assert not {"src", "href", "style", "action"} & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    assert sum(tag == "script" for tag, _ in page.elements) == 1
    assert len(text.encode()) < LARGEST_PAGE
    return page


def unpack_folds(page: Page) -> dict[str, list[Any]]:
    """The lines of the closed panes, by name."""
    folds = [a for _, a in page.elements if "data-z" in a]
    return {str(a["id"]): json.loads(decompress(base64.b64decode(str(a["data-z"])))) for a in folds}


COPIES = re.compile(r" +v?(mov|xor|push|pop|call|ret|jmp)|.*%rsp$")
"""Instructions that LLVM adds without a line: spills, copies between registers, zeros, calls, jumps between blocks and
the frame. Processors with few registers have many."""


@pytest.mark.sampled
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_pages_of_examples(path: Path) -> None:
    for op in tc.define(path.read_text()):
        arguments, initial = small_arguments(op)
        report = op.explain(*arguments, **initial)
        page = check_page(report)
        assert report.matches == SAME_BYTES
        shown, order = "".join(page.shown), {s.name: n for n, s in enumerate(report.statements)}
        folded = unpack_folds(page)
        for listing in report.listings:
            assert listing.lines
            if listing.kind in ("c", "llvm") or len(listing.lines) > MOST_LINES:
                owners = [[order[name] for name in line.statements] for line in listing.lines]
                rows = zip(listing.lines, owners, strict=True)
                assert folded[listing.kind] == [[x.text, " ".join(map(str, own)), x.loop or ""] for x, own in rows]
            else:
                assert all(line.text in shown for line in listing.lines)
        linked = {name for x in report.listings for line in x.lines for name in line.statements}
        assert linked == {s.name for s in report.statements}
        assembly = report.find_listing("asm")
        assert assembly.linked_share() > 0.7
        own = [line.loop > 0 for line in assembly.lines if line.text.startswith(" ") and not COPIES.match(line.text)]
        assert sum(own) > 0.85 * len(own)
        rows = path.read_text().split("\n")
        assert all("=" in rows[s.line - 1] or "fcrelu(" in rows[s.line - 1] for s in report.statements)
        assert {d.subject for d in report.decisions} <= set(SUBJECTS)


def test_json_has_a_schema() -> None:
    report = tc.define(SOFTMAX).softmax.explain(torch.rand(64, 100))
    found = json.loads(json.dumps(report.json()))
    assert found["schema"] == 3
    assert sorted(found) == [
        "calls", "decisions", "dependences", "facts", "footprints", "listings", "matches", "name", "passes",
        "resources", "roofline", "schema", "search", "seconds", "sections", "sizes", "statements", "target",
    ]  # fmt: skip
    assert sorted(found["decisions"][0]) == ["chosen", "numbers", "others", "statements", "subject", "why"]
    assert sorted(found["listings"][0]["lines"][0]) == ["loop", "role", "statements", "text"]
    assert [x["kind"] for x in found["listings"]] == ["def", "schedule", "loops", "asm", "c", "llvm"]


def test_dependences_and_why_two_kernels_keep_them_apart() -> None:
    x = torch.rand(1, 2, 64, 16)
    op = tc.define(Path("examples/attention.tc").read_text()).attention
    report = op.explain(x, x, x, options=tc.CpuOptions(fusion="min"))
    tensor_of = {s.name: s.tensor for s in report.statements}
    found = {(tensor_of[e.source], tensor_of[e.sink]): e for e in report.edges}
    assert found["score", "largest"].kinds == ("flow",)
    assert found["score", "largest"].distances == ("0", "0", "0")
    assert found["weight", "mixed"].distances == ("0", "0", "0", "*")
    assert not found["score", "largest"].is_fused
    assert "fusion='min'" in found["score", "largest"].why
    assert found["mixed", "out"].is_fused
    text = "def count(int(N) at) -> (y) { y(i) = 0 where i in 0:8  y(at(n)) += 1 }"
    op = tc.define(text).count
    (filled, counted) = op.explain(torch.zeros(100, dtype=torch.int32)).edges
    assert (filled.source != filled.sink, "flow" in filled.kinds) == (True, True)
    assert (counted.source == counted.sink, counted.distances) == (True, ("1..99",))


def test_passes_show_what_they_change() -> None:
    report = tc.define(SOFTMAX).softmax.explain(torch.rand(64, 100))
    by_name = {p.name: p for p in report.passes}
    assert list(by_name) == ["simplify", "partition", "vectorize", "unroll", "hoist", "simplify_again"]
    loops = report.find_listing("loops").lines
    assert report.passes[-1].after == len(loops)
    changed = by_name["vectorize"].lines
    assert any(sign == "+" and "ramp(" in text for sign, text in changed)
    assert any(sign == "-" and "vector" in text for sign, text in changed)
    shown = {line.text for line in loops}
    new = [text for p in report.passes for sign, text in p.lines if sign == "+"]
    assert sum(text in shown for text in new) > len(new) // 2


def test_reports_are_the_same_in_each_run() -> None:
    op = tc.define(SOFTMAX).softmax
    x = torch.rand(64, 100)
    first, second = (op.explain(x).json() for _ in range(2))
    first.pop("seconds"), second.pop("seconds")
    assert first == second


HOSTILE = """
# </script><script>alert(1)</script> <img src=x onerror=alert(2)> "'&
def f(float(N) x) -> (y) { y(i) = x(i) + 1  # --> ]]> </pre></style>
}
"""


def test_text_of_a_program_stays_text() -> None:
    report = tc.define(HOSTILE).f.explain(torch.rand(100))
    page = check_page(report)
    shown = "".join(page.shown)
    assert "</script><script>alert(1)</script> <img src=x onerror=alert(2)> \"'&" in shown
    assert "--> ]]> </pre></style>" in shown
    bundle = report._repr_mimebundle_()
    frame = Page(bundle["text/html"])
    ((tag, attributes),) = frame.elements
    assert (tag, attributes["sandbox"]) == ("iframe", "allow-scripts")
    assert attributes["srcdoc"] == report.html()
    assert bundle["text/plain"] == str(report)


def test_saved_pages(tmp_path: Path) -> None:
    report = tc.define(SOFTMAX).softmax.explain(torch.rand(8, 100))
    place = report.save(tmp_path / "new" / "page.html")
    assert place.read_text() == report.html()
    with pytest.raises(tc.ArgumentError, match="cannot be written"):
        report.save(tmp_path)
    with pytest.raises(tc.ArgumentError, match="the path is 5"):
        report.save(5)  # type: ignore[arg-type]


def test_a_kernel_that_was_put_by_hand_is_distinguished(tmp_path: Path) -> None:
    op = tc.define(SOFTMAX).softmax
    kernel = op.compile(torch.rand(8, 100))
    other = op.compile(torch.rand(8, 101))
    object.__setattr__(kernel.compiled, "code", other.compiled.code)
    assert kernel.explain().matches == BY_HAND


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_page_of_every_kernel(tmp_path: Path) -> None:
    x = torch.rand(8, 100)
    op = tc.define("def spmv(float(M,K) A: csr, float(K) x) -> (y) { y(i) +=! A(i,k) * x(k) }").spmv
    matrix = tc.as_sparse(torch.eye(50).to_sparse_csr())
    with override_knobs(explain=str(tmp_path / "pages"), cache_dir=str(tmp_path / "cache")):
        softmax = tc.define(SOFTMAX).softmax
        softmax(x), softmax(x), softmax(x[:, :99]), softmax.compile(x, target="cuda:sm_80")
        op(matrix, torch.rand(50)), op.compile(matrix, torch.rand(50), target="cuda:sm_80")
        pages = sorted((tmp_path / "pages").iterdir())
        assert [p.name.rpartition("_")[0] for p in pages] == ["softmax"] * 3 + ["spmv"] * 2
        tc.define(SOFTMAX).softmax(x)  # found in the cache: the same page again
        assert sorted((tmp_path / "pages").iterdir()) == pages
    assert all("<!DOCTYPE html>" in p.read_text() for p in pages)
    with override_knobs(explain=str(pages[0])):
        assert tc.define(SOFTMAX).softmax(torch.rand(8, 97)).shape == (8, 97)  # no folder: the call is right


def test_reports_say_whether_the_cache_had_the_kernel(tmp_path: Path) -> None:
    x = torch.rand(8, 100)
    with override_knobs(cache="readwrite", cache_dir=str(tmp_path), verify=False):
        first = dict(tc.define(SOFTMAX).softmax.explain(x).facts)["cache"]
        second = dict(tc.define(SOFTMAX).softmax.explain(x).facts)["cache"]
    assert first.startswith("compiled by this process; its key there is ")
    assert second == first.replace("compiled by this process", "found in the cache")
    with override_knobs(cache="off"):
        found = dict(tc.define(SOFTMAX).softmax.explain(x).facts)["cache"]
    assert found == "compiled by this process; the cache is off"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = tc.define(SOFTMAX).softmax.function.sizes
    sizes = ["--sizes", ",".join(f"{name}=64" for name in names)]
    assert main(["explain", "examples/softmax.tc", *sizes]) == 0
    assert "softmax" in capsys.readouterr().out
    page = tmp_path / "softmax.html"
    assert main(["explain", "examples/softmax.tc", *sizes, "-o", str(page)]) == 0
    assert "<!DOCTYPE html>" in page.read_text()
    assert main(["explain", "examples/softmax.tc", *sizes, "--json", "--target", "cuda:sm_90"]) == 0
    assert json.loads(capsys.readouterr().out.split("\n", 1)[1])["schema"] == 3
    assert main(["explain", "examples/softmax.tc", *sizes, "-o", str(tmp_path)]) == 2


def test_measured_reports_have_a_roofline() -> None:
    op = tc.define("def mm(float(M,K) A, float(K,N) B) -> (C) { C(i,j) +=! A(i,k) * B(k,j) }").mm
    report = op.explain(torch.rand(128, 128), torch.rand(128, 128), measure=True)
    found = report.roofline
    assert found is not None
    assert found.flops == 2 * 128**3
    assert found.bytes == 3 * 4 * 128**2
    assert found.seconds is not None
    assert 0 < found.seconds < 10
    rates = [rate for _, rate in found.rates]
    assert [name for name, _ in found.rates] == ["L1", "L2", "L3", "memory"][-len(rates) :] or len(rates) > 1
    assert "operations per byte" in str(report)
    check_page(report)


def test_measured_reports_of_a_kernel_for_any_number_of_rows_count_the_rows_of_the_call() -> None:
    op = tc.define("def f(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }", dynamic={"M"}).f
    report = op.explain(torch.rand(200, 30), torch.rand(30, 16), measure=True)
    assert report.roofline is not None
    assert report.roofline.flops == 2 * 200 * 30 * 16
    assert report.roofline.bytes == 4 * (200 * 30 + 30 * 16 + 200 * 16)
    check_page(report)


def test_rooflines_without_operations_are_numbers() -> None:
    """A logarithmic axis has no zero. The limit of such a call is what memory moves."""
    op = tc.define("def transpose(float(M,N) x) -> (y) { y(j,i) = x(i,j) }").transpose
    report = op.explain(torch.rand(200, 300), measure=True)
    found = report.roofline
    assert found is not None
    assert found.seconds is not None
    assert found.flops == 0
    assert found.share == found.bytes / found.rates[-1][1] / found.seconds > 0
    assert "0 operations, 480 kB: 0.0 operations per byte" in report.html()
    assert 'class="roof"' not in report.html()
    check_page(report)


def test_only_kernels_for_dense_operands_on_cpus_are_measured() -> None:
    x = torch.rand(64, 64)
    with pytest.raises(tc.ArgumentError, match="CPUs and dense operands"):
        tc.define(SOFTMAX).softmax.explain(x, target="cuda:sm_80", measure=True)


def test_gpu_reports_show_the_launch() -> None:
    x = torch.rand(512, 512)
    op = tc.define("def mm(float(M,K) A, float(K,N) B) -> (C) { C(i,j) +=! A(i,k) * B(k,j) }").mm
    report = op.explain(x, x, target="cuda:sm_80")
    kernel = op.compile(x, x, target="cuda:sm_80")
    assert report.find_listing("cuda").text.strip() == kernel.source("cuda").strip()
    assert any(line.statements for line in report.find_listing("cuda").lines)
    launch = next(s for s in report.sections if s.title.startswith("kernel"))
    assert "threads" in launch.text[0]
    assert "blocks on a processor at once" in launch.text[1]
    assert report.about("mapping", "C")
    check_page(report)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_reports_show_formats_and_loops() -> None:
    op = tc.define("def spmv(float(M,K) A: csr, float(K) x) -> (y) { y(i) +=! A(i,k) * x(k) }").spmv
    matrix = tc.as_sparse(torch.eye(50).to_sparse_csr())
    report = op.explain(matrix, torch.rand(50))
    assert report.matches == SAME_BYTES
    assert "what A(i,k) stores" in report.find_listing("schedule").text
    assert report.find_listing("asm").linked_share() > 0.7
    stores = [line for line in report.find_listing("loops").lines if " = " in line.text and "y" in line.text]
    assert any(line.statements for line in stores)
    check_page(report)


def test_a_kernel_for_any_number_of_rows() -> None:
    """The report is on the code of all blocks, and not on that of a single row."""
    op = tc.define("def f(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }", dynamic={"M"}).f
    report = op.explain(torch.rand(20, 30), torch.rand(30, 16))
    assert report.matches == SAME_BYTES
    assert "in blocks of this and fewer rows" in str(report)
    tiles = [d.chosen for d in report.decisions if d.subject == "tiles"]
    assert len(tiles) > 1
    assert "m 1 of 1" in tiles[-1]
