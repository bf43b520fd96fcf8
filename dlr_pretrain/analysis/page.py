"""A report as Markdown and as one page of HTML that needs no server and no network: its images are inside."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from dlr_pretrain.analysis.figures import Picture
from dlr_pretrain.analysis.tables import Table
from dlr_pretrain.util.files import write_durably


@dataclass(frozen=True)
class Code:
    """Code, or commands, under a title."""

    title: str
    text: str


@dataclass(frozen=True)
class Page:
    """What a report says, in order. ``remarks`` are what a reader must know first."""

    title: str
    remarks: Sequence[str]
    parts: Sequence[Table | Picture | Code]

    def write(self, folder: Path, figures: Path, name: str = "report") -> None:
        """Write ``report.md`` and ``<name>.html`` into ``folder``; pictures are in ``figures``, in or below it."""
        template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
        body = "\n".join(self._html(part, figures) for part in self.parts)
        items = "".join(f"<li>{html.escape(remark)}</li>" for remark in self.remarks)
        whole = template.substitute(title=html.escape(self.title), remarks=items, body=body)
        write_durably(folder / f"{name}.html", whole)
        listed = "\n".join(f"* {remark}" for remark in self.remarks)
        sections = [f"# {self.title}", listed, *(self._markdown(part, figures, folder) for part in self.parts)]
        write_durably(folder / "report.md", "\n\n".join(section.strip() for section in sections if section) + "\n")

    @staticmethod
    def _markdown(part: Table | Picture | Code, figures: Path, folder: Path) -> str:
        if isinstance(part, Table):
            return part.markdown()
        if isinstance(part, Picture):
            return f"![{part.name}]({(figures / part.name).relative_to(folder)}.png)\n\n{part.caption}"
        return f"## {part.title}\n\n```\n{part.text}\n```"

    @staticmethod
    def _html(part: Table | Picture | Code, figures: Path) -> str:
        if isinstance(part, Table):
            notes = "".join(f"<li>{html.escape(note)}</li>" for note in part.notes)
            title = f'<h2 id="{part.name}">{html.escape(part.title)}</h2>'
            return f"{title}<div class=scroll>{part.html()}</div><ul>{notes}</ul>"
        if isinstance(part, Picture):
            image = base64.b64encode((figures / f"{part.name}.svg").read_bytes()).decode()
            caption = f"<figcaption>{html.escape(part.caption)}</figcaption>"
            return f'<figure id="{part.name}"><img alt="" src="data:image/svg+xml;base64,{image}">{caption}</figure>'
        return f"<h2>{html.escape(part.title)}</h2><pre>{html.escape(part.text)}</pre>"
