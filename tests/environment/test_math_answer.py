"""Reading and comparing final numbers."""

from decimal import Decimal

import pytest

from parallm.environment.math_answer import has_final_form, last_number, marked_number, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", "18"),
        (" 1,080 ", "1080"),
        ("$2,125.50", "2125.50"),
        ("-$3", "-3"),
        ("+4", "4"),
        ("7.", "7"),
        ("7.50.", "7.5"),
        (".5", "0.5"),
    ],
)
def test_one_number_is_read_without_its_decoration(text: str, value: str) -> None:
    assert parse_number(text) == Decimal(value)


@pytest.mark.parametrize(
    "text",
    ["", "5 or 6", "5 6", "five", "5 apples", "5%", "1/2", "1e3", "nan", "inf", "--5", "\u0665", "5,", "5..", "."],
)
def test_anything_but_one_number_is_refused(text: str) -> None:
    assert parse_number(text) is None


def test_numbers_are_compared_exactly() -> None:
    assert parse_number("18.0") == parse_number("18")
    assert parse_number("0.1") != parse_number("0.10000000000000000001")
    assert parse_number("9" * 30) != parse_number("9" * 29 + "8")


def test_a_number_of_ten_thousand_digits_is_survived() -> None:
    assert marked_number("#### " + "9" * 10_000) == Decimal("9" * 10_000)


def test_the_last_marker_counts() -> None:
    assert marked_number("#### 5\n#### 6") == 6


def test_only_the_line_of_the_marker_counts() -> None:
    assert marked_number("#### 5\nor 6") == 5
    assert marked_number("####\n5") is None


@pytest.mark.parametrize("text", ["#### 5 or 6", "#### 5 #### ", "the answer is 5", "##### 5", "#### 5 = five"])
def test_a_marker_without_exactly_one_number_gives_nothing(text: str) -> None:
    assert marked_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("It is 5 or 6.", 6),
        ("so 1,200 in total", 1200),
        ("8-3", 3),
        ("it is -3.", -3),
        ("costs $4,", 4),
        ("= -$2.50", "-2.5"),
    ],
)
def test_the_last_number_of_a_text_is_found(text: str, value: int | str) -> None:
    assert last_number(text) == Decimal(value)


def test_a_text_without_digits_has_no_last_number() -> None:
    assert last_number("none at all") is None


@pytest.mark.parametrize("text", ["2 + 3 = 5\n#### 5", "#### 5", "#### 1,000\n", "x\n####5"])
def test_the_final_form_is_one_marked_number_on_the_last_line(text: str) -> None:
    assert has_final_form(text)


@pytest.mark.parametrize(
    "text", ["", "5", "#### 5\n#### 5", "#### 5\nDone.", "so #### 5", "#### five", "####", "##### 5"]
)
def test_other_endings_lack_the_final_form(text: str) -> None:
    assert not has_final_form(text)
