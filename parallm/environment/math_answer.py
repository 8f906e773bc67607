"""The final number of an answer text, as an exact decimal. Words, units, fractions and formulas are not understood."""

import re
from decimal import Decimal

MARKER = re.compile(r"(?<!#)####(?!#)")
NUMBER = re.compile(r"(?P<sign>[+-]?)\$?(?P<digits>[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)\.?")
# a minus after a digit, letter or bracket subtracts: the last number of "8-3" is 3
NUMBER_IN_TEXT = re.compile(r"(?:(?<![0-9A-Za-z)\]])-)?\$?(?:[0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|\.[0-9]+)")


def parse_number(text: str) -> Decimal | None:
    """Return the value if `text` is one number and nothing else; commas, `$` and a final period are ignored."""
    match = NUMBER.fullmatch(text.strip())
    # Decimal, because int() refuses more than 4,300 digits and a sampled text may hold more
    return None if match is None else Decimal(match["sign"] + match["digits"].replace(",", ""))


def marked_number(text: str) -> Decimal | None:
    """Return the number after the last `####`; None unless the rest of that line is exactly one number."""
    markers = list(MARKER.finditer(text))
    return parse_number(text[markers[-1].end() :].partition("\n")[0]) if markers else None


def last_number(text: str) -> Decimal | None:
    numbers = NUMBER_IN_TEXT.findall(text)
    return parse_number(numbers[-1]) if numbers else None


def has_final_form(text: str) -> bool:
    """True if `text` ends with a line `#### number` and holds no other `####`."""
    markers = list(MARKER.finditer(text))
    if len(markers) != 1:
        return False
    last_line = text.rstrip().rpartition("\n")[2]
    return MARKER.match(last_line) is not None and parse_number(last_line[4:]) is not None
