"""The plot of the report: a bar of the median latency for each case and role, with Pillow, which the job carries."""

import pathlib

_ROW, _GAP, _BAR, _MARGIN, _VALUE = 18, 10, 460, 12, 90
_COLOURS = {"baseline": "#a0a8b0", "candidate": "#2a6fb0"}


def draw(title: str, cases: list[dict], file: pathlib.Path) -> None:
    """``cases``: the results of bench.run or bench.parity."""
    from PIL import Image, ImageDraw, ImageFont

    bars = []
    for case in cases:
        found = {"baseline": case.get("baseline_ms"), "candidate": case.get("candidate_ms", case.get("median_ms"))}
        bars.append((case["case"], {role: value for role, value in found.items() if value is not None}))
    font = ImageFont.load_default(12)
    left = _MARGIN * 2 + round(max(font.getlength(name) for name, _ in bars))
    rows = sum(len(values) * _ROW + _GAP for _, values in bars)
    image = Image.new("RGB", (left + _BAR + _VALUE, rows + 3 * _ROW), "white")
    pen = ImageDraw.Draw(image)
    pen.text((_MARGIN, _MARGIN // 2), title, "black", font)
    longest = max(value for _, values in bars for value in values.values())
    top = 2 * _ROW
    for name, values in bars:
        pen.text((_MARGIN, top), name, "black", font)
        for role, value in values.items():
            end = left + max(1, round(_BAR * value / longest))
            pen.rectangle((left, top + 2, end, top + _ROW - 3), _COLOURS[role])
            pen.text((end + 4, top + 1), f"{value:.4g} ms", "black", font)
            top += _ROW
        top += _GAP
    image.save(file)
