"""Turn formulas of the documentation from LaTeX into MathML, which browsers show without a script and without a network.

A displayed formula is a fenced block of the language ``math``. One in a line is between $` and `$. GitHub shows both as well.
"""

import re

BLOCK = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"\$`([^`]+)`\$")


def convert_formulas(markdown: str) -> str:
    """Return a page with its formulas as MathML. Raises ``ValueError`` for a command that cannot be converted."""
    markdown = BLOCK.sub(lambda block: f'<div class="formula">{convert(block[1], "block")}</div>', markdown)
    return INLINE.sub(lambda formula: convert(formula[1], "inline"), markdown)


def convert(latex: str, display: str) -> str:
    """Return one formula in MathML.

    Args:
        latex: The formula, without $.
        display: ``block`` or ``inline``.

    Raises:
        ValueError: If a command is left in the text.
    """
    from latex2mathml.converter import convert as convert_latex

    mathml = convert_latex(latex.replace("{aligned}", "{align*}"), display=display)
    if "\\" in mathml:
        raise ValueError(f"formula: a command cannot be converted. Fix: use another one in {latex}")
    return str(mathml)
