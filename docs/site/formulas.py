"""Formulas as MathML, which a browser draws by itself; made when the site is built, so no page asks another server.

In the Markdown a formula is a block ```math of TeX, or $`...`$ within a line, as code hosts write them.
"""

import re
from html import escape

import latex2mathml.converter

BLOCK = re.compile(r"^```math\n(.*?)\n```$", re.M | re.S)
INLINE = re.compile(r"\$`([^`\n]+)`\$")


def with_formulas(text: str) -> str:
    r"""A page of Markdown with MathML in the place of its TeX; a blank line in a block separates two formulas.

    Example: with_formulas("```math\nA = R - b\n```") begins with '<div class="formula">'
    """
    text = BLOCK.sub(lambda found: "\n".join(display(tex) for tex in found[1].split("\n\n")), text)
    # In a span, since Markdown takes a <math> at the beginning of a line for a block, which ends the paragraph.
    return INLINE.sub(lambda found: f"<span>{mathml(found[1], 'inline')}</span>", text)


def display(tex: str) -> str:
    """One formula as a block of HTML that scrolls by itself where it is wider than the page."""
    return f'<div class="formula" tabindex="0">{mathml(" ".join(tex.split()), "block")}</div>\n'


def mathml(tex: str, display: str) -> str:
    """A formula, with its TeX as the text that a screen reader without MathML reads."""
    drawn = latex2mathml.converter.convert(tex, display=display)
    return drawn.replace("<math ", f'<math alttext="{escape(tex)}" ', 1)
