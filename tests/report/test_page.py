"""The page of a report in a real browser, without a network; and reports as Markdown and files."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import each
from findings_samples import (
    HOSTILE,
    everything,
    findings,
    hostile_findings,
    large_findings,
    nothing,
)

import packhorse.reports.page.html as html_module
from packhorse.errors import MissingBackendError
from packhorse.reports.page import render_html, render_markdown
from packhorse.reports.page.words import printable, shorten
from packhorse.reports.report import Report
from packhorse.reports.results import Estimate

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser (Debian: apt-get install chromium)"
)
TITLES = [
    "Problems", "At a glance", "Where the bits go", "Over training", "Policy", "Against others",
    "Packed in memory", "What changed", "How this was measured",
]  # fmt: skip
WHOLE = everything(n_layers=11)
NOT_CACHED = html_module._vega.__wrapped__
PHONE, DESKTOP = (390, 844), (1440, 900)
# Every plot with its own width and that of its place, which it must not leave.
PLOTS = """[...document.querySelectorAll("[data-plot]")].map((place) => {
    const box = place.querySelector("svg")?.getBoundingClientRect() ?? { width: 0, height: 0 };
    return [box.width, box.height, place.clientWidth];
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = {"executable_path": CHROMIUM, "args": ["--no-sandbox"]}
        with playwright.chromium.launch(**options) as started:
            yield started


Opener = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opener]:
    """A function that opens HTML in a page that has no network. Whatever the page complains of, or
    asks the network for, fails the test."""
    complaints: list[str] = []
    contexts = []

    def open_page(html: str, size: tuple[int, int] = DESKTOP, **options: Any) -> Any:
        path = tmp_path / "report.html"
        path.write_text(html, "utf-8")
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, offline=True, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.route(
            re.compile("^(?!file:)"),
            lambda route: (complaints.append(route.request.url), route.abort()),
        )
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        if options.get("java_script_enabled", True):
            page.wait_for_selector("html[data-ready]", timeout=60_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def html() -> str:
    return render_html(WHOLE)


# What the page is.


@in_browser
@each("size", [PHONE, DESKTOP])
def test_all_sections_are_there_and_nothing_is_cut(opened: Opener, html: str, size) -> None:
    page = opened(html, size)
    assert page.locator("h2").all_inner_texts() == TITLES
    assert page.locator("nav a").all_inner_texts() == TITLES
    assert page.evaluate("document.documentElement.scrollWidth") == size[0]
    plots = page.evaluate(PLOTS)
    assert len(plots) > 25
    for width, height, room in plots:
        assert 100 < width <= room + 1
        assert height > 30
    for figure in page.locator("figure").all():
        assert len(figure.locator("figcaption").inner_text()) > 40
        assert figure.locator("details.numbers td").count() > 0
    labels = page.locator("[data-plot]").evaluate_all("all => all.map((each) => each.ariaLabel)")
    assert len(labels) == len(plots)
    assert min(map(len, labels)) > 20


@in_browser
def test_axe_finds_nothing(opened: Opener) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = opened(render_html(everything(n_layers=1)), PHONE, color_scheme="light")
    context = {"exclude": [["svg"]]}  # a plot's name is beside its SVG
    page.get_by_role("button", name="Switch to dark").click()
    found = Axe().run(page, context, {"runOnly": ["color-contrast"]})  # all else is the same
    assert found.violations_count == 0, found.generate_report()
    page.get_by_role("button", name="Switch to light").click()
    numbers = page.locator("#glance details, #policy details")  # all are made alike
    numbers.evaluate_all("all => all.forEach((each) => { each.open = true; })")
    found = Axe().run(page, context)
    assert found.violations_count == 0, found.generate_report()


@in_browser
def test_light_and_dark(opened: Opener) -> None:
    """The system's mode at first, then the reader's."""
    html, shades = render_html(findings(tensors=everything(n_layers=1).tensors)), []
    for mode in ("light", "dark"):
        page = opened(html, color_scheme=mode)
        for _ in range(2):
            shades.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            bars = page.locator("path[fill='var(--teal)']").first
            shades.append(bars.evaluate("e => getComputedStyle(e).fill"))
            page.get_by_role("button", name=re.compile("Switch to")).click()
    light, dark = shades[:2], shades[2:4]
    assert shades == light + dark + dark + light
    assert light[0] != dark[0]
    assert light[1] != dark[1]


@in_browser
def test_tables_are_sorted_by_click_and_by_key(opened: Opener) -> None:
    page = opened(render_html(findings(tensors=WHOLE.tensors)))
    table = page.get_by_role("region", name="All tensors")
    first = table.locator("tbody tr:first-child td:first-child")
    shown = table.get_by_role("columnheader")
    header = shown.filter(has_text="Plain")
    header.get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    assert first.inner_text() in ("model.embed_tokens.weight", "lm_head.weight")
    header.get_by_role("button").press("Enter")
    assert header.get_attribute("aria-sort") == "ascending"
    assert first.inner_text().endswith("input_layernorm.weight")
    names = shown.filter(has_text="Tensor")
    names.get_by_role("button").press("Space")
    assert header.get_attribute("aria-sort") is None
    assert names.get_attribute("aria-sort") == "ascending"
    assert first.inner_text() == "lm_head.weight"
    ordered = table.locator("tbody tr td:first-child").all_inner_texts()
    assert ordered.index("model.layers.2.mlp.down_proj.weight") < ordered.index(
        "model.layers.10.mlp.down_proj.weight"
    )


@in_browser
def test_long_tables_are_short_at_first_and_can_be_filtered(opened: Opener) -> None:
    text = render_html(large_findings(3000))  # many more than the page has
    assert len(text.encode()) < 5_000_000
    page = opened(text)
    rows = page.get_by_role("region", name="All tensors").locator("tbody tr:visible")
    box = page.locator("[data-table]", has=page.get_by_role("region", name="All tensors"))
    assert rows.count() == 100
    assert "together" in box.locator(".left").inner_text()
    box.get_by_role("searchbox").fill("experts.16.")
    assert 0 < rows.count() < 100
    box.get_by_role("searchbox").fill("")
    box.get_by_role("button", name="Show all").click()
    assert rows.count() > 500


@in_browser
def test_without_scripts_the_tables_are_there(opened: Opener, html: str) -> None:
    page = opened(html, java_script_enabled=False)
    rows = page.get_by_role("region", name="All tensors").locator("tbody tr")
    assert rows.count() == len(WHOLE.tensors)
    assert page.get_by_text("The plots need JavaScript").is_visible()


@in_browser
def test_links_lead_to_sections_in_the_frame_of_a_notebook_too(opened: Opener) -> None:
    frame = Report(findings())._repr_html_()
    page = opened(f'<!doctype html><title>A notebook</title><html data-ready="">{frame}')
    inside = page.frame_locator("iframe")
    assert inside.locator("h1").inner_text() == "a tiny llama"
    inside.get_by_role("link", name="How this was measured").click()
    assert inside.locator("section#measured").evaluate("e => e === document.activeElement")


@in_browser
def test_texts_from_files_stay_text(opened: Opener) -> None:
    whole = hostile_findings()
    page = opened(render_html(whole))
    assert page.title() == f"{printable(whole.title)}: packing report"
    assert page.locator("h1").inner_text() == shorten(whole.title)
    assert page.locator("img, iframe, object, main script, main style, main a").count() == 0
    names = page.get_by_role("region", name="All tensors").locator("tbody td:nth-child(2)")
    said = names.locator("> bdi, > details > summary").all_inner_texts()[-len(HOSTILE) :]
    assert said == [shorten(name) for name in HOSTILE]
    names.locator("summary").last.click()
    assert names.locator("details[open] > bdi").inner_text() == "<b>" * 3000
    # Tooltips put their texts in as HTML, so they must escape them.
    bar = page.locator("[data-plot]").first.locator("path[fill='var(--teal)']").first
    bar.hover()
    assert page.locator("#vg-tooltip-element.visible").count() == 1
    figure = page.locator("figure", has=page.get_by_role("heading", name="By model"))
    for bar in figure.locator("path[fill='var(--teal)']").all()[:8]:
        bar.hover()
        tooltip = page.locator("#vg-tooltip-element.visible")
        assert tooltip.locator("script, img, b, svg").count() == 0


@in_browser
def test_findings_that_are_nearly_empty(opened: Opener) -> None:
    whole = everything(n_layers=1)
    assert whole.series
    assert whole.policy
    assert whole.changes
    empty = {"shape": (0, 4), "nbytes": 0, "planes": (), "bit_entropies": (), "layer": None}
    row = replace(whole.tensors[0], **empty, levels={}, bound=Estimate(0))
    sized = replace(whole.engines[0].rows[0], pack_gb_per_s=None, unpack_gb_per_s=None)
    page = opened(render_html(findings(
        shape="series",
        sources=whole.sources[:1],
        tensors=(row,),
        exponents=(replace(whole.exponents[0], shares=()),),
        series=replace(whole.series, steps=whole.series.steps[:1], gaps=(), step_sizes=(
            replace(whole.series.step_sizes[0], median=math.inf, high=math.nan),
        )),
        policy=replace(whole.policy, rows=whole.policy.rows[:1], recommended=0),
        engines=(replace(whole.engines[0], rows=(sized,)),),
        memory=(replace(whole.memory[0], device_nbytes=None, host_nbytes=None),),
        changes=replace(whole.changes, rows=whole.changes.rows[-2:]),
    )))  # fmt: skip
    assert page.locator("h2").all_inner_texts() == TITLES[1:]


# Texts, without a browser.


def test_the_policy_lets_nothing_in(html: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert policy.startswith("default-src &#39;none&#39;; script-src &#39;sha256-")
    assert "unsafe" not in policy
    assert not re.search(
        r"\son[a-z]+=|style=\"|javascript:", re.sub(r"(?s)<script.*?</script>", "", html)
    )


def test_long_names_do_not_make_a_large_page() -> None:
    whole = large_findings(1000)
    tensors = tuple(replace(row, name=f"{'<' * 10_000}{row.name}") for row in whole.tensors)
    text = render_html(replace(whole, tensors=tensors))
    assert len(text.encode()) < 5_000_000
    assert "more, together" in text


def test_a_section_without_data_is_left_out() -> None:
    text = render_html(nothing())
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", text) == ["How this was measured"]
    assert re.findall(r"^## (.*)", render_markdown(nothing()), re.M) == ["How this was measured"]


def test_markdown_says_the_same() -> None:
    text = render_markdown(everything())
    assert re.findall(r"^## (.*)", text, re.M) == TITLES
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
    assert len(text) < 60_000


def test_markdown_keeps_names_in_their_cells() -> None:
    text = render_markdown(hostile_findings())
    assert not re.search(r"(?<!\\)<|[\x00-\x09\x0b-\x1f\u200b\u202e\u2028]", text)
    text.encode()
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


@each("shape, words", [
    ("models", "These 3 models take 2.86 GB; packed they take 1.89 GB (1.51 times smaller, ± 0."),
    ("series", "These 12 snapshots take 11.5 GB; the store takes "),
    ("pair", "The second model takes "),
])  # fmt: skip
def test_the_first_sentence(shape: str, words: str) -> None:
    text = render_markdown(everything(shape)).partition("## At a glance")[2]
    assert text.replace("**", "").replace("\N{NO-BREAK SPACE}", " ").strip().startswith(words)


@each("shape, words", [
    ("models", "At 24 checkpoints of each a day, a year takes 25.1 TB. Packing saves"),
    ("series", "At 24 checkpoints a day, a year takes 8.36 TB. Packing as differences saves"),
    ("pair", "At 24 checkpoints a day, a year takes "),
])  # fmt: skip
def test_what_a_year_saves(shape: str, words: str) -> None:
    text = render_markdown(everything(shape)).replace("\N{NO-BREAK SPACE}", " ")
    assert words in text


def test_a_model_that_gains_nothing() -> None:
    whole = everything("models")
    tensors = tuple(
        type(row)(**{**vars(row), "levels": {"default": Estimate(row.nbytes + 9)}, "planes": ()})
        for row in whole.tensors
    )
    text = render_html(findings(tensors=tensors, sources=whole.sources[:1]))
    assert "(no gain)" in text


@each("name", ["jinja2", "vl_convert"])
def test_without_a_package_the_error_names_the_extra(monkeypatch: Any, name: str) -> None:
    monkeypatch.setattr(html_module, "_vega", NOT_CACHED)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingBackendError, match=r"pip install 'packhorse\[report\]'"):
        render_html(WHOLE)


# Reports.


@each("name, start", [("r.html", "<!doctype html>"), ("r.md", "# a tiny llama"), ("r.json", "{")])
def test_reports_are_saved_whole_and_replace_nothing(tmp_path: Path, name: str, start: str) -> None:
    report = Report(findings())
    report.save(tmp_path / name)
    assert (tmp_path / name).read_text("utf-8").startswith(start)
    with pytest.raises(FileExistsError, match="already exists"):
        report.save(tmp_path / name)
    report.save(tmp_path / name, force=True)
    assert [path for path in tmp_path.iterdir() if path.suffix == Path(name).suffix] == [
        tmp_path / name
    ]


def test_json_is_the_findings() -> None:
    report = Report(everything())
    assert json.loads(json.dumps(report.to_json()))["policy"]["recommended"] == 17
    assert repr(report) == "Report('a tiny llama': 12 sources, 68 tensors, 1 problem)"
