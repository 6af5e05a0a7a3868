"""Text and tables in LaTeX."""

from collections.abc import Sequence

# Letters and signs that are commands of LaTeX's mathematics.
GREEK = (
    "alpha", "beta", "gamma", "delta", "varepsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi", "pi",
    "rho", "sigma", "varsigma", "tau", "upsilon", "varphi", "chi", "psi", "omega",
    "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega",
)  # fmt: skip
COMMANDS = {
    **dict(zip("αβγδεζηθικλμνξπρσςτυφχψωΓΔΘΛΞΠΣΥΦΨΩ", GREEK, strict=True)),
    **{"±": "pm", "\u00d7": "times", "·": "cdot", "≤": "le", "≥": "ge", "≠": "ne", "≈": "approx", "→": "to", "∞": "infty"},
}
_TEX = str.maketrans({
    **{mark: f"\\{mark}" for mark in "&%$#_{}"}, "\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}",
    **{sign: f"${sign}$" for sign in "<>|"}, "\u2212": "$-$",
    **{sign: f"$\\{name}$" for sign, name in COMMANDS.items()},
})  # fmt: skip


def escape_tex(cell: str) -> str:
    """Return a text with LaTeX's special characters as letters."""
    return cell.translate(_TEX)


def float_tex(kind: str, title: str, align: str, heads: Sequence[str], body: Sequence[str]) -> str:
    """Return a float in LaTeX whose table is made smaller if it is wider than the column.

    Args:
        kind: ``table`` for one column, ``table*`` for the page.
        title: The caption.
        align: The letters of the columns, such as ``lrr``.
        heads: Lines above the rule, in LaTeX.
        body: Lines below it.
    """
    return "\n".join([
        rf"\begin{{{kind}}}", r"\centering\footnotesize", rf"\caption{{{escape_tex(title)}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%", rf"\begin{{tabular}}{{{align}}}",
        r"\toprule", *heads, r"\midrule", *body, r"\bottomrule", r"\end{tabular}}", rf"\end{{{kind}}}", "",
    ])  # fmt: skip
