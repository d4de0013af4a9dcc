"""What is printed: text as it is, numbers to the right, sizes for people."""

import pytest

from ds41_tvm.cli.output import byte_size, console, table


def test_square_brackets_are_text(capsys):
    out = console()
    out.print("pip install 'ds41-tvm[torch]'")
    out.print(table(("a",), [("x[bold]y",)], title="t[i]"))
    printed = capsys.readouterr().out
    for text in ("ds41-tvm[torch]", "x[bold]y", "t[i]"):
        assert text in printed


def test_table_cells(capsys):
    console().print(table(("name", "ms", "note"), [("a", 1.23456, None), ("long name", 10, "n")]))
    head, _, first, second = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert first.split() == ["a", "1.235"]
    assert second.split() == ["long", "name", "10", "n"]
    # Numbers end in one column, words begin in one.
    assert first.rstrip().index("1.235") + 5 == second.index("10") + 2
    assert head.index("name") == first.index("a") == second.index("long")


def test_wide_cells_are_folded_not_cut(capsys):
    text = "x" * 400
    console().print(table(("a", "b"), [("k", text)]))
    assert capsys.readouterr().out.count("x") == 400


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (890, "890 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (3 << 40, "3.0 TiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_byte_size(count, text):
    assert byte_size(count) == text
