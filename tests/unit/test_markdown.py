"""Tables in Markdown: the one writer of all of them."""

from __future__ import annotations

from dlr_pretrain.util.text import table


def test_a_table():
    written = table(["name", "", "n"], [["a|b", "", "1"]], right=[2])
    assert written.splitlines() == ["| name |  | n |", "| --- | --- | ---: |", "| a\\|b |  | 1 |"]
