"""The page of all claims is made of the tables of studies, and invents nothing."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from refusals import refused
from small_study import tiny_plan
from test_cli import run

from vitkit.report.claim_figure import draw_curve, draw_interval
from vitkit.studies.claims import HOLDS, INCONCLUSIVE, NOT_TESTED, evaluate_claim
from vitkit.studies.claims_index import paper_value, read_results, read_table, write_index
from vitkit.studies.folder import claim_folder
from vitkit.studies.scale import STUDIES
from vitkit.studies.study import Claim

DOCS = Path(__file__).parent.parent / "docs" / "research" / "studies"
CLAIMS = sum(len(study.claims) for study in STUDIES.values())


def write_table(path, shift):
    """Three seeds of two heads, a point apart."""
    rows = [
        {"trial": f"head={head},rate=same,seed={seed}", "head": head, "rate": "same", "seed": seed,
         "steps": 10, "top1": 0.5, "fewshot_mean": 0.5 + 0.001 * seed + (head == "token") * shift,
         "parameters": 1_000_000, "train_images": 1000, "pretrain_exaFLOPs": 1e-6,
         "device": "CPU", "precision": "fp32"}
        for head in ("token", "gap") for seed in range(3)
    ]  # fmt: skip
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_the_published_page_is_what_the_published_tables_give(tmp_path):
    """`vitkit study index docs/research/studies --to docs/research/studies` writes it, with its figures."""
    shutil.copytree(DOCS, tmp_path / "studies")
    summary = write_index([tmp_path / "studies"], tmp_path / "studies")
    assert (tmp_path / "studies" / "index.md").read_text() == (DOCS / "index.md").read_text()
    names = {path.name for path in (tmp_path / "studies" / "figures").iterdir()}
    assert names == {path.name for path in (DOCS / "figures").iterdir()}
    tested = [claim for claim in summary["claims"] if claim["outcome"] != NOT_TESTED]
    assert len(summary["claims"]) == CLAIMS and len(tested) == len(names)
    for claim in tested:
        power = claim["outcome"] == INCONCLUSIVE
        assert (claim["power"] is not None) == power and bool(claim["needed"]) == power


def test_the_page_of_a_folder_has_its_verdict_its_figure_and_the_papers_value(tmp_path, capsys):
    write_table(tmp_path / "heads.csv", 0.01)
    assert run("study", "index", tmp_path, "--to", tmp_path / "page", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    outcomes = {claim["claim"]: claim["outcome"] for claim in summary["claims"]}
    first, second, third = (claim.text for claim in STUDIES["heads"].claims)
    assert outcomes[first] == HOLDS
    assert outcomes[second] == outcomes[third] == NOT_TESTED  # no other rate was run
    assert len(outcomes) == CLAIMS and list(outcomes.values()).count(NOT_TESTED) == CLAIMS - 1
    text = Path(summary["page"]).read_text()
    assert re.findall(r"figures/[\w-]+\.svg", text) == ["figures/heads-claim-1.svg"]
    assert (tmp_path / "page" / "figures" / "heads-claim-1.svg").read_text().startswith("<?xml")
    assert "+2.82 points (Table 8)" in text and "[table](../heads.csv)" in text
    assert "6 trials, 3 seeds; 1 million parameters; 10 steps" in text

    write_table(tmp_path / "heads.csv", 0.0)  # the seeds of both heads are equal: the claim is not above
    write_index([tmp_path], tmp_path / "page")
    stale = tmp_path / "page" / "figures" / "positions-claim-1.svg"
    stale.write_text("of an earlier page")
    write_index([tmp_path], tmp_path / "page")
    assert not stale.exists()


def test_a_study_folder_is_read_by_its_plan(tmp_path):
    claim_folder(tmp_path, tiny_plan(broken=False))
    write_table(tmp_path / "table.csv", 0.01)
    (result,) = read_results(tmp_path)
    assert (result.study.name, result.scale, result.report) == ("heads", "mini", tmp_path / "page.html")
    (claim, *_) = STUDIES["heads"].claims
    assert evaluate_claim(claim, result.rows, "fewshot_mean").difference == pytest.approx(0.01)


def test_what_is_no_result_is_refused(tmp_path):
    with refused("study.unknown", str(tmp_path), "plan.json"):
        write_index([tmp_path], tmp_path / "page")
    write_table(tmp_path / "heads.csv", 0.01)
    (tmp_path / "again").mkdir()
    shutil.copy(tmp_path / "heads.csv", tmp_path / "again")
    with refused("study.value", "heads", "again"):
        write_index([tmp_path, tmp_path / "again"], tmp_path / "page")
    for content in (b"", b"a,b\n1,2\n", b"trial,seed\n\xff\xfe\n"):
        (tmp_path / "heads.csv").write_bytes(content)
        with refused("study.corrupt", "heads.csv"):
            read_results(tmp_path)


def test_cells_are_numbers_text_or_nothing(tmp_path):
    (tmp_path / "t.csv").write_text("trial,seed,top1,share,set\na,0,0.5,3%,\n")
    assert read_table(tmp_path / "t.csv") == [
        {"trial": "a", "seed": 0, "top1": 0.5, "share": "3%", "set": None}
    ]


def test_the_papers_value_has_its_unit_and_its_place():
    def claim(**values):
        return Claim(text="", left={}, right={}, **values)

    assert paper_value(claim(printed=(-0.09,), source="Table 8")) == "-0.09 points (Table 8)"
    assert paper_value(claim(printed=(2.0, 4.0), measure="compute", source="Fig. 5")) == (
        "2 to 4 times the compute (Fig. 5)"
    )
    assert paper_value(claim(source="Fig. 9")) == "Fig. 9" and paper_value(claim()) == "–"


def test_the_small_figures_show_what_was_measured():
    figure = draw_interval(1.2, (-0.4, 2.8), limits=(-1.0, 1.0), printed=(2.5,))
    (axis,) = figure.axes
    low, high = axis.get_xlim()
    assert low < -1.0 and high > 2.8
    dot, *_ = axis.containers[0]
    assert dot.get_xdata() == [1.2] and list(axis.lines[-1].get_xdata()) == [2.5]
    (band,) = axis.patches
    assert (band.get_x(), band.get_x() + band.get_width()) == (-1.0, 1.0)
    (axis,) = draw_curve([(10, -1, -2, 0), (100, 1, 0, 2)], x_label="images", printed=(30.0,)).axes
    assert axis.get_xscale() == "log" and [text.get_text() for text in axis.get_xticklabels()] == [
        "10",
        "100",
    ]
    (ratio,) = draw_interval(1.0, (0.0, 2.0), limits=(0.0, float("inf")), ratio=True).axes
    assert ratio.xaxis.get_major_formatter()(1.0) == "2x" and not ratio.patches
