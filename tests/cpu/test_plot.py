"""Charts as values, and as images if matplotlib is installed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onepass.__main__ import app
from onepass.errors import BadResults, BadSpec, PlotsNeedMatplotlib
from onepass.measure import plot as pictures
from onepass.measure.charts import BarChart, LineChart, ScatterChart, charts, footer
from onepass.measure.results import PROVIDERS, Result, Run, load, save
from onepass.measure.ticks import labeled_ticks, nice_ticks, spread_out
from tests.support.fake_bench import norms, row, rows_suite

TITLES = {"rms_norm_backward": "RMSNorm backward", "softmax": "softmax"}


def named(*runs: Run, metric: str = "gbps") -> dict[str, object]:
    return {c.name: c for c in charts(runs, metric, TITLES)}


def lines(found: object) -> LineChart:
    assert isinstance(found, LineChart)
    return found


# ---- which charts


def test_every_kind_of_chart() -> None:
    assert list(named(norms(), rows_suite())) == [
        "gbps-by-width-rms_norm_backward-bf16",
        "gbps-by-width-rms_norm-bf16",
        "by-rows-softmax-4096-bf16",
        "floor-norms",
        "floor-rows",
        "predicted",
    ]


def test_rates_by_width() -> None:
    found = lines(named(norms())["gbps-by-width-rms_norm_backward-bf16"])
    assert (found.title, found.subtitle, found.x_title) == ("RMSNorm backward", "bf16, 4,096 to 131,072 rows", "columns")
    assert found.places == (512, 1024, 2048, 4096, 5120, 8192, 16384)
    (panel,) = found.panels
    assert [line.provider for line in panel.lines] == [
        "onepass",
        "onepass-tuned",
        "eager",
        "inductor",
        "inductor-nonstrict",
        "liger",
        "quack",
    ]
    assert panel.lines[0].values[0] == pytest.approx(4500 / 1.06, rel=1e-3)
    assert panel.floor == pytest.approx([4500] * 7, rel=1e-3)


@pytest.mark.parametrize(
    ("metric", "quantity", "value", "floor"),
    [("floor", "times the floor", 1.06, 1.0), ("us", "µs", 1.06 * 2**26 * 6 / 4.5e6, 2**26 * 6 / 4.5e6)],
)
def test_other_metrics(metric: str, quantity: str, value: float, floor: float) -> None:
    (panel,) = lines(named(norms(), metric=metric)[f"{metric}-by-width-rms_norm_backward-bf16"]).panels
    assert panel.quantity == quantity
    assert (panel.lines[0].values[0], panel.floor[0]) == pytest.approx((value, floor), rel=1e-3)


def test_the_usual_size_of_a_width_is_plotted() -> None:
    usual = [row("softmax", (2**24 // n, n), {"onepass": 1.1}) for n in (1024, 2048, 4096)]
    other = row("softmax", (131072, 4096), {"onepass": 9.0})
    found = lines(named(replace(norms(), rows=(other, *usual)))["gbps-by-width-softmax-bf16"])
    assert found.panels[0].lines[0].values == pytest.approx([4500 / 1.1] * 3, rel=1e-3)


def test_time_and_rate_by_row_count() -> None:
    found = lines(named(rows_suite())["by-rows-softmax-4096-bf16"])
    assert found.title == "Softmax, 4,096 columns"
    assert found.places == (1, 16, 256, 4096, 16384, 131072)
    assert [p.quantity for p in found.panels] == ["µs", "GB/s"]


def test_a_provider_that_failed_leaves_a_gap() -> None:
    first, *rest = rows_suite().rows
    broken = replace(first, results={**first.results, "inductor": Result(error="out of memory")})
    found = lines(named(replace(rows_suite(), rows=(broken, *rest)))["by-rows-softmax-4096-bf16"])
    values = {line.provider: line.values for line in found.panels[0].lines}
    assert values["inductor"][0] is None and all(values["inductor"][1:])


def test_too_few_sizes_and_other_shapes_give_no_line() -> None:
    few = [row("softmax", (4096, n), {"onepass": 1.1}) for n in (1024, 2048)]
    heads = [row("qk_norm", (8, 2048, 32, d), {"onepass": 1.1}) for d in (64, 128, 256)]
    assert list(named(replace(norms(), rows=(*few, *heads), regret=()))) == ["floor-norms", "predicted"]


def test_bars_from_worst_to_best() -> None:
    found = named(norms())["floor-norms"]
    assert isinstance(found, BarChart)
    own = [b.values["onepass"] for b in found.bars]
    assert own == sorted(own, reverse=True) and len(own) == 15
    assert found.bars[0].label == "RMSNorm backward  4096×16384"
    assert found.bars[0].against_best_peer == pytest.approx(1.4 / 1.12, rel=1e-3)
    assert found.subtitle == "bf16; lower is better; no mark: unsupported, failed or wrong"


def test_bars_of_tiny_work_are_left_out_and_counted() -> None:
    found = named(rows_suite())["floor-rows"]
    assert isinstance(found, BarChart)
    assert len(found.bars) == 3
    assert found.subtitle.endswith("omitted: 3 with a floor under 2 µs")


def test_many_bars_take_several_charts() -> None:
    rows = tuple(row("rms_norm_backward" * 3, (8192, 1024 + i), {"onepass": 1 + i / 100}) for i in range(60))
    found = [c for c in charts([replace(norms(), rows=rows)]) if isinstance(c, BarChart)]
    assert [(c.name, len(c.bars)) for c in found] == [("floor-norms-1", 20), ("floor-norms-2", 20), ("floor-norms-3", 20)]
    assert found[0].title == "Times the floor: norms, part 1 of 3"
    assert found[0].bars[0].label == "Rms norm backwardrms norm backwardr…  8192×1083"


def test_dtypes_are_labeled_if_there_are_several() -> None:
    rows = tuple(row("softmax", (8192, 8192), {"onepass": 1.1}, dtype=d) for d in ("bf16", "f32"))
    bars = next(c for c in charts([replace(norms(), rows=rows)]) if isinstance(c, BarChart))
    assert [b.label for b in bars.bars] == ["Softmax  8192×8192  bf16", "Softmax  8192×8192  f32"]


def test_predictions() -> None:
    found = named(norms())["predicted"]
    assert isinstance(found, ScatterChart)
    assert len(found.picked) == 15 and len(found.others) == 4  # the others exclude the chosen plan and plans that could not run
    assert found.subtitle == "median error 3%; 100% of 15 within 15%"


def test_later_runs_replace_rows_of_earlier_ones() -> None:
    old, slow = norms(), row("rms_norm_backward", (131072, 512), {"onepass": 1.5})
    new = replace(old, date="2026-03-01T00:00:00", rows=(slow,))
    found = lines(named(new, old)["gbps-by-width-rms_norm_backward-bf16"])
    assert found.panels[0].lines[0].values[0] == pytest.approx(3000, rel=1e-3)
    assert footer([new, old]) == "NVIDIA H200  ·  torch 2.11.0  ·  triton 3.6.0  ·  onepass 0.1.0  ·  2026-01-31 to 2026-03-01"


def test_the_footer_names_all_versions() -> None:
    other = replace(norms(), versions={"torch": "2.13.0", "quack": "0.6.5"})
    assert "torch 2.11.0 / 2.13.0" in footer([norms(), other]) and "quack 0.6.5" in footer([norms(), other])


def test_one_card_at_a_time() -> None:
    with pytest.raises(BadSpec, match="one GPU"):
        charts([norms(), replace(norms(), card="NVIDIA A100")])


def test_unknown_metric() -> None:
    with pytest.raises(BadSpec, match="known are gbps, us, floor"):
        charts([norms()], "speed")


# ---- images


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "norms.json", tmp_path / "rows.json"]
    save(norms(), made[0])
    save(rows_suite(), made[1])
    return made


def test_without_matplotlib(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(PlotsNeedMatplotlib, match=r'pip install "onepass-torch\[plot\]"'):
        pictures.plot(files, tmp_path)


def test_every_chart_in_every_theme_and_format(files: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    written = pictures.plot(files, tmp_path / "plots" / "h200", titles=TITLES)
    assert len(written) == len(set(written)) == 6 * 2 * 2
    assert sorted(written) == sorted((tmp_path / "plots" / "h200").iterdir())
    assert all(p.read_bytes().startswith(b"\x89PNG" if p.suffix == ".png" else b"<?xml") for p in written)


def test_charts_are_reproducible_byte_for_byte(files: list[Path], tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    first = pictures.plot(files, tmp_path / "a", themes=["light"])
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "savefig.transparent": True}):
        second = pictures.plot(files, tmp_path / "b", themes=["light"])
        assert matplotlib.rcParams["font.size"] == 30
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert b"dc:date" not in b"".join(p.read_bytes() for p in first)


def test_nothing_is_clipped() -> None:
    """Every text lies within its image, however long the labels are and however many providers there are."""
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    from onepass.measure import drawing

    every = {p: 1.0 + i / 3 for i, p in enumerate(PROVIDERS)}
    sizes = (256, 512, 1536, 2048, 2304, 2880, 4096, 5120, 7168, 12288, 50257, 131072)
    rows = (*(row("softmax", (2**26 // n, n), every) for n in sizes), *(row("a_long_name" * 9, (m, 131072), every) for m in sizes))
    light = drawing.THEMES["light"]
    for chart in charts([replace(norms(), rows=rows)]):
        with drawing.settings(light):
            figure = drawing.draw(chart, light, "a version of something  ·  " * 6)
            FigureCanvasAgg(figure).draw()
            boxes = {t.get_text(): t.get_window_extent() for t in figure.findobj(Text) if t.get_text() and t.get_visible()}
        assert chart.title in boxes
        outside = [text for text, b in boxes.items() if b.x0 < 0 or b.y0 < 0 or b.x1 > figure.bbox.x1 or b.y1 > figure.bbox.y1]
        assert not outside


@pytest.mark.parametrize(
    ("wished", "found"),
    [
        ([], []),
        ([5], [5]),
        ([1, 5], [1, 5]),
        ([5, 5], [4.5, 5.5]),
        ([5.2, 5, 9.9], [5.6, 4.6, 9.9]),
        ([0, 0, 0], [0, 1, 2]),
        ([10, 10], [9, 10]),
    ],
)
def test_labels_are_spread_out(wished: list[float], found: list[float]) -> None:
    assert spread_out(wished, 1, 0, 10) == pytest.approx(found)


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.3), (0.01, 2000), (3, 4000), (0.7, 6), (40, 210)])
def test_ticks_are_few_and_round(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert 3 <= len(ticks) <= 10 and ticks == sorted(ticks)
    assert all(low <= t <= high and math.isclose(t, float(f"{t:.3g}")) for t in ticks)


def test_numbers_that_would_overlap_are_omitted() -> None:
    assert labeled_ticks((256, 512, 768, 1024, 50257, 65536), 0.6) == [256, 512, 1024, 65536]
    assert labeled_ticks((1, 2, 4, 8), 9.0) == [1, 2, 4, 8]


# ---- the command


def test_the_command(files: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    shown = CliRunner().invoke(
        app, ["plot", str(files[1]), "--out", str(tmp_path / "p"), "--theme", "dark", "--format", "svg", "--metric", "floor"]
    )
    assert shown.exit_code == 0
    names = ("by-rows-softmax-4096-bf16", "floor-rows", "predicted")
    assert shown.output.split() == [str(tmp_path / "p" / f"{n}-dark.svg") for n in names]


def test_errors_of_the_command(files: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"rows": []}))
    for arguments, error, message in (
        ([str(wrong)], BadResults, "wrong.json is not a readable result"),
        ([str(files[0]), "--theme", "blue"], BadSpec, "light, dark and both"),
        ([str(files[0]), "--format", "gif"], BadSpec, "png, svg and both"),
        ([str(files[0]), "--metric", "x"], BadSpec, "gbps"),
    ):
        shown = CliRunner().invoke(app, ["plot", *arguments, "--out", str(tmp_path / "p")])
        assert isinstance(shown.exception, error) and message in str(shown.exception)
    assert not (tmp_path / "p").exists()


def test_results_without_times(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    file = tmp_path / "empty.json"
    save(replace(norms(), rows=(), regret=()), file)
    assert load(file).rows == ()
    with pytest.raises(BadSpec, match="no row has a time"):
        pictures.plot([file], tmp_path)
