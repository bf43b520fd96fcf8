"""Draws the method for README.md, for light and dark pages: ``python docs/diagram.py``.

Which latent an output receives is asked of ``columns_of``, which training uses as well.
"""

from html import escape
from pathlib import Path

from dlr_pretrain.models.residual import columns_of

IMAGES = Path(__file__).with_name("images")
WIDTH, HEIGHT = 900, 362
D_OUT, RANK = 9, 3  # of the layer that is drawn
SUBSCRIPTS = "₁₂₃"
THEMES = {  # ink, muted ink, A, B, residual
    "light": ("#1f2328", "#59636e", "#0969da", "#8250df", "#bc4c00"),
    "dark": ("#f0f6fc", "#9198a1", "#4493f8", "#ab7df8", "#f0883e"),
}


class Drawing:
    """An SVG to which elements are added."""

    def __init__(self, ink: str, muted: str):
        self.ink, self.muted, self.parts = ink, muted, []

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, label: str = "", size: int = 19
    ) -> None:
        shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{min(4, height / 6):g}" '
        self.parts.append(f'{shape}fill="{colour}" fill-opacity="0.16" stroke="{colour}" stroke-width="1.5"/>')
        if label:
            self.text(x + width / 2, y + height / 2, label, colour, size)

    def text(self, x: float, y: float, text: str, colour: str, size: int = 14, anchor: str = "middle") -> None:
        style = f'fill="{colour}" font-size="{size}" text-anchor="{anchor}" dominant-baseline="central"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{self.ink}" marker-end="url(#tip)"/>')

    def svg(self) -> str:
        tip = f'<path d="M0,0 L8,4 L0,8 z" fill="{self.ink}"/>'
        marker = f'<marker id="tip" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">{tip}</marker>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
        return "\n".join([head, f"<defs>{marker}</defs>", *self.parts, "</svg>\n"])


def low_rank(draw: Drawing, left: float, a: str, b: str, up: str) -> None:
    """A layer from ``left`` on: x, the thin matrix A, the latent z and the tall matrix ``up``, on a line at y = 130."""
    draw.text(left, 130, "x", draw.ink, 19)
    draw.arrow((left + 12, 130), (left + 38, 130))
    draw.box(left + 40, 108, 100, 44, a, "A")
    draw.text(left + 90, 170, "r × d_in", draw.muted, 12)
    draw.arrow((left + 142, 130), (left + 168, 130))
    draw.text(left + 180, 130, "z", draw.ink, 19)
    draw.arrow((left + 192, 130), (left + 218, 130))
    draw.box(left + 220, 70, 60, 120, b, up)


def draw(theme: str) -> str:
    """The SVG of a theme."""
    ink, muted, a, b, residual = THEMES[theme]
    made = Drawing(ink, muted)
    made.text(30, 24, "Training", ink, 17, "start")
    low_rank(made, 40, a, b, "B")
    made.text(290, 206, "d_out × r", muted, 12)
    made.arrow((322, 130), (372, 130))
    made.text(384, 130, "+", ink, 22)
    made.arrow((396, 130), (428, 130))
    made.text(440, 130, "y", ink, 19)
    latents = columns_of("contiguous", "", D_OUT, RANK, 0).tolist()  # that of each output
    made.arrow((220, 146), (220, 282), (238, 282))
    for output, latent in enumerate(latents):  # R^T z
        made.box(240, 222 + 13 * output, 60, 13, residual, f"z{SUBSCRIPTS[latent]}", 11)
    made.arrow((302, 282), (384, 282), (384, 144))
    made.text(314, 266, "× β", residual, 15, "start")
    made.text(270, 350, "β Rᵀ z: each latent, K times in a row", residual, 13)

    made.arrow((470, 130), (548, 130))
    made.text(509, 112, "fold", ink, 15)
    made.text(509, 150, "once, exact", muted, 12)

    made.text(560, 24, "Deployed: a plain low-rank layer", ink, 17, "start")
    low_rank(made, 570, a, b, "W")
    for output, latent in enumerate(latents):  # the entries of B that receive beta
        made.box(790 + 60 / RANK * latent, 70 + 120 / D_OUT * output, 60 / RANK, 120 / D_OUT, residual)
    made.arrow((852, 130), (872, 130))
    made.text(884, 130, "y", ink, 19)
    made.text(820, 206, "W = B + β Rᵀ", residual, 15)
    made.text(820, 228, "the shape of B", muted, 12)
    return made.svg()


if __name__ == "__main__":
    for theme in THEMES:
        (IMAGES / f"method-{theme}.svg").write_text(draw(theme), encoding="utf-8")
