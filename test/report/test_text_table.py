"""Tables, numbers, sizes and durations as text."""

from canopy_lab.report.table import short_number, text_table
from canopy_lab.report.units import bytes_text, seconds


def test_numbers_are_flush_right_and_words_left():
    table = text_table(["policy", "hits"], [["lru", "7.1"], ["threshold-lru", "12.25"]])
    assert table.splitlines() == [
        "policy          hits",
        "-------------  -----",
        "lru              7.1",
        "threshold-lru  12.25",
    ]


def test_a_wide_table_is_neither_wrapped_nor_cut_short():
    table = text_table(["a", "b"], [["x" * 300, "[bold]y[/bold]"], ["z", "1"]])
    assert table.splitlines()[2] == "x" * 300 + "  [bold]y[/bold]"


def test_numbers_sizes_and_durations_are_short():
    assert [short_number(number) for number in (0, 1234, 12_345, 999_999, 4_560_000)] == [
        "0",
        "1234",
        "12.3k",
        "1M",
        "4.56M",
    ]
    assert [bytes_text(number) for number in (0, 2048, 1.5 * 2**30)] == ["0 B", "2 KiB", "1.5 GiB"]
    assert [seconds(duration_s) for duration_s in (0.085, 1.234, 45, 3437, 97459, 10**6)] == ["85 ms", "1.23 s", "45 s", "57.3 min", "27.1 h", "11.6 days"]  # fmt: skip
