"""`vitkit doctor --model`: suspicious images by the features of a model, as a page and a table."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vitkit.data.doctor import Report
from vitkit.data.sources.source import Source
from vitkit.errors import Error
from vitkit.inference.predict import load_model
from vitkit.io.cache import cache_folder
from vitkit.io.files import replace_file
from vitkit.report.doctor_page import DoctorPage, Photo
from vitkit.report.html import encoded
from vitkit.report.terminal import warn
from vitkit.runs.corrections import has_actions, write_table
from vitkit.runs.features import LIMIT, Extractor
from vitkit.runs.suspicious import Pool, Suspects, find_suspects, findings, gather, thumbnail
from vitkit.runtime.runtime import choose_runtime, data_workers

PAGE, TABLE = "index.html", "manifest.csv"
SHOWN, GROUPS, MEMBERS = 96, 32, 8  # images of a section, groups of near-duplicates and images of a group
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class ModelLook:
    """A model and the folder for what it finds."""

    place: str  # of the model
    data: str
    out: Path
    extractor: Extractor

    @classmethod
    def prepare(
        cls, place: str, data: str, out: Path | None, workers: int | None, device: str, *, quiet: bool
    ) -> "ModelLook":
        """Load the model; a wrong name and a table that somebody has edited are refused before long work."""
        out = out or Path("runs/doctor") / (Path(data).stem or "data")
        if has_actions(out / TABLE):
            raise Error(
                f"{out / TABLE} has actions, which would be lost; move it, or use another --out",
                code="file.exists",
            )
        runtime = choose_runtime(device, "fp32")
        extractor = Extractor(
            model=load_model(place, device), runtime=runtime, workers=data_workers(workers),
            cache=cache_folder() / "features", limit=LIMIT, log=warn, quiet=quiet,
        )  # fmt: skip
        return cls(place, data, out, extractor)

    def examine(self, splits: Mapping[str, Source], report: Report) -> tuple[Report, dict[str, Any]]:
        """The report with what the model finds, and further facts; writes the page and the table."""
        pool = gather(splits, self.extractor)
        suspects = find_suspects(pool, report.findings, device=self.extractor.runtime.device)
        page, table = self.out / PAGE, self.out / TABLE
        every = [*report.findings, *findings(pool, suspects, str(page), str(table))]
        every.sort(key=lambda finding: SEVERITIES.index(finding.severity))
        report = replace(report, findings=tuple(every))
        self.out.mkdir(parents=True, exist_ok=True)
        write_table(table, suspects.images.values())
        document = encoded(self.page(pool, suspects, report).render())
        replace_file(page, lambda beside: beside.write_bytes(document))
        return report, {
            "model": self.place, "page": str(page), "manifest": str(table), "notes": list(suspects.notes),
            "label_agreement": suspects.accuracy,
            "suspects": [asdict(image) for image in suspects.images.values()],
        }  # fmt: skip

    def page(self, pool: Pool, suspects: Suspects, report: Report) -> DoctorPage:
        """The page with the first images of each kind."""

        def photo(row: int) -> Photo:
            image = suspects.images.get(row) or pool.suspect(row)
            return Photo(
                thumbnail(pool, row), image.image, image.split, image.label, image.suggested,
                image.probability or 0.0,
            )  # fmt: skip

        counts = {"labels": len(suspects.labels), "groups": len(suspects.groups),
                  "outliers": len(suspects.outliers)}  # fmt: skip
        facts, share = report.to_json(), suspects.accuracy
        agreement = "" if share is None else f"Its out-of-fold answers agree with {share:.1%} of the labels."
        finetune = shlex.join(["vitkit", "finetune", self.data, "--corrections", str(self.out / TABLE)])
        return DoctorPage(
            data=self.data, model=self.place, checked=suspects.checked,
            labels=[photo(row) for row in suspects.labels[:SHOWN]],
            groups=[[photo(row) for row in group[:MEMBERS]] for group in suspects.groups[:GROUPS]],
            outliers=[photo(row) for row in suspects.outliers[:SHOWN]], counts=counts,
            findings=facts["findings"], notes=suspects.notes, agreement=agreement, table=TABLE,
            splits=[{"split": name, "images": row["images"], "classes": row["classes"]}
                    for name, row in facts["splits"].items()],
            next_commands=[finetune],
        )  # fmt: skip
