"""Units at the end of an answer: what was measured, apart from how much.

Invariant: only words that leave the number as it is are units. "5 dozen", "3 halves" and "5 or so" end in none, and of
"5 million dollars" only the dollars are one.
"""

from __future__ import annotations

import re

_ALIASES = """
mm millimeter millimetre | cm centimeter centimetre | m meter metre | km kilometer kilometre | nm nanometer
in inch inche | ft foot feet | yd yard | mi mile | acre | ha hectare | dm decimeter | unit
mg milligram | g gram gm | kg kilogram kilo | lb pound lbs | oz ounce | t ton tonne | mol mole
ms millisecond | s sec second | min minute | h hr hour | d day | wk week | mo month | yr year | am | pm
l liter litre | ml milliliter millilitre | gal gallon | qt quart | pt pint | mi/h mph | km/h kmh kph kmph | m/s mps
usd dollar buck | eur euro | gbp | cent ¢ penny pennie | rs rupee | deg degree | rad radian | degc celsius
degf fahrenheit | j joule | n newton | w watt | v volt | hz hertz | k kelvin | pa pascal | db decibel
"""
UNITS = {
    alias: names.split()[0]
    for line in _ALIASES.strip().split("\n")
    for names in line.split("|")
    for alias in names.split()
}
UNITS |= {"inches": "in", "feet": "ft", "degrees": "deg"}

_CHANGES_THE_NUMBER = frozenset(
    """
    and or not no is isn are was were be maybe perhaps possibly about approximately roughly almost nearly around
    over under above below least most than more less fewer if when unless only either neither nor but plus minus
    times divided by multiplied mod modulo percent root squared cubed square cube factorial choose power to from
    of half halve halves third thirds fourth fourths quarter quarters fifth fifths sixth sixths seventh sevenths
    eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths millionth millionths pi
    e i x y z dozen dozens score hundred hundreds thousand thousands million millions billion billions trillion
    trillions negative positive infinity double triple sin cos tan ln log exp sqrt this his its has does always
    otherwise base for where with wrong false incorrect between
    """.split()
)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_CURRENCY = {r"\usd": "usd", "$": "usd", "€": "eur", "£": "gbp", "₹": "rs"}

_CURRENCY_SIGN = re.compile(r"(-?)\s*(\\usd(?![A-Za-z])|[$€£₹])\s*(.+)", re.DOTALL)
_DEGREES = re.compile(r"(.+?)\s*\^\\circ\s*(?:\\text\s*\{\s*([CF])\s*\}|([CF]))?", re.DOTALL)
_WRAPPED = re.compile(r"(.+?)\s*((?:\\text\s*\{[^{}]*\}(?:\^\{-?\d\})?[\s/]*(?:\\cdot\s*)?)+)", re.DOTALL)
_BARE = re.compile(r"(-?[\d.,/:]*\d|-?\\frac\{\d+\}\{\d+\})(\s*)([A-Za-z¢][A-Za-z ./]*(?:\^\{[23]\})?)")


def split_unit(text: str) -> tuple[str, str | None]:
    """(what is left, unit in one spelling or None) of one canonical value; "5 million dollars" is 5·10^6 and `usd`."""
    if currency := _CURRENCY_SIGN.fullmatch(text):
        body, unit = split_unit(currency[1] + currency[3])
        return body, unit or _CURRENCY[currency[2]]
    degrees = _DEGREES.fullmatch(text)
    if degrees and r"\circ" not in degrees[1] and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", degrees[1]):
        scale = degrees[2] or degrees[3] or ""
        return degrees[1], f"deg{scale.lower()}"
    if wrapped := _WRAPPED.fullmatch(text):
        unit_text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", wrapped[2]).replace(r"\cdot", "·")
        known = True
    elif wrapped := _BARE.fullmatch(text):
        unit_text, known = wrapped[3], False
    else:
        return text, None
    scale, unit = _unit(unit_text, known, spaced=known or bool(wrapped[2]))
    if scale is None:
        return text, None
    body = wrapped[1].strip()
    return (rf"({body})\cdot 10^{{{scale}}}" if scale else body), unit


def _unit(text: str, wrapped: bool, spaced: bool) -> tuple[int | None, str | None]:
    """(power of ten, unit), or (None, None) if the words are no unit. Unwrapped words must be known or plural."""
    words = re.sub(r"(?<=[A-Za-z])\.(?=\s|$|[A-Za-z])", "", text.lower()).split()
    scale = _SCALES[words.pop(0)] if words and words[0] in _SCALES else 0
    if not words:
        return (scale, None) if scale else (None, None)
    power = ""
    if words[0] in {"square", "sq", "cubic", "cu"} and len(words) > 1:
        power = "^2" if words.pop(0).startswith("sq") else "^3"
    elif words[-1] in {"squared", "cubed"} and len(words) > 1:
        power = "^2" if words.pop() == "squared" else "^3"
    joined = re.sub(r"\s*(?:/|\bper\b)\s*", "/", " ".join(words))
    if caret := re.search(r"\s*\^\{(-?\d)\}$", joined):
        joined, power = joined[: caret.start()], f"^{caret[1]}"
    names = []
    for part in joined.split("/"):
        if not re.fullmatch(r"[a-zµ¢Ω· ]{1,30}", part) or len(part.split()) > 3:
            return None, None
        if any(word in _CHANGES_THE_NUMBER for word in part.split()):
            return None, None
        singular = UNITS.get(part) or UNITS.get(part.removesuffix("s"))
        if singular is None:
            if not wrapped and not (part.endswith("s") and len(part) > 3):
                return None, None
            singular = part.removesuffix("s")
        elif not wrapped and len(part) == 1 and not spaced:  # 12m is twelve times m
            return None, None
        names.append(singular)
    unit = "/".join(names)
    return scale, UNITS.get(unit, unit) + power
