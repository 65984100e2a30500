"""Formulas of the pages as MathML, which browsers draw themselves: no script, no network.

It knows the part of TeX that the pages use; an unknown command is an error, so that none is dropped in silence.
"""

import html
import re

SYMBOLS = {
    "alpha": "α", "approx": "≈", "bigcup": "⋃", "bmod": "\xa0mod\xa0", "cap": "∩", "cdot": "·", "cos": "cos",
    "cup": "∪", "delta": "δ", "dots": "…", "ell": "ℓ", "exp": "exp", "ge": "≥", "in": "∈", "infty": "∞",
    "lceil": "⌈", "ldots": "…", "le": "≤", "leftarrow": "←", "lfloor": "⌊", "log": "log", "lVert": "‖",
    "max": "max", "mid": "|", "min": "min", "nabla": "∇", "ne": "≠", "notin": "∉", "partial": "∂",
    "prime": "′", "prod": "∏", "propto": "∝", "rceil": "⌉", "rfloor": "⌋", "rVert": "‖", "sqrt": "√",
    "subset": "⊂", "sum": "∑", "times": "×", "to": "→", "top": "⊤", "sigma": "σ",
}  # fmt: skip
SPACES = {"quad": "1em", "qquad": "2em", ",": "0.17em", ";": "0.28em", " ": "0.25em", "!": "-0.17em"}
ACCENTS = {"bar": "¯", "tilde": "~", "hat": "^"}
SIZES = ("left", "right", "big", "Big", "bigl", "bigr", "Bigl", "Bigr", "textstyle", "displaystyle")
FUNCTIONS = ("cos", "exp", "log")
STRETCHED = ("sum", "prod", "bigcup", "max", "min")
_WORDS = re.compile(r"\\(?:text|mathrm|operatorname)\{([^{}]*)\}")
_TOKEN = re.compile(rf"{_WORDS.pattern}|\\(?:[a-zA-Z]+|.)|[0-9]+(?:\.[0-9]+)?|\S")


def mathml(formula: str, is_block: bool = False) -> str:
    """A formula in TeX, without its dollars, as a `<math>` element."""
    body, number = _without_tag(formula)
    content = "".join(_Reader(body).sequence())
    if number:
        row = f"<mtr><mtd>{content}</mtd><mtd>({number})</mtd></mtr>"
        content = f'<mtable class="numbered" displaystyle="true">{row}</mtable>'
    block = ' display="block"' if is_block else ""
    return f"<math{block}>{content}</math>"


def _without_tag(formula: str) -> tuple[str, str]:
    found = re.search(r"\\tag\{([^}]*)\}", formula)
    return (formula.replace(found[0], ""), found[1]) if found else (formula, "")


class _Reader:
    """Reads tokens from left to right; each method returns elements of MathML."""

    def __init__(self, formula: str) -> None:
        self.tokens = [match[0] for match in _TOKEN.finditer(formula)]
        self.source = formula
        self.place = 0

    def sequence(self, end: str = "") -> list[str]:
        parts: list[str] = []
        while self.place < len(self.tokens):
            if self.tokens[self.place] == end:
                self.place += 1
                return parts
            parts.append(self._scripted())
        if end:
            raise ValueError(f"`{self.source}` must close every brace")
        return parts

    def _scripted(self) -> str:
        """One thing with what is below and above it; a space after the name of a function."""
        command = self.tokens[self.place].removeprefix("\\")
        base = self._one()
        if command in FUNCTIONS and self._next() not in ("(", "_", "^", ""):
            return f'{base}<mspace width="0.17em"/>'
        below = above = ""
        while self._next() in ("_", "^"):
            mark = self.tokens[self.place]
            self.place += 1
            script = self._one()
            below, above = (script, above) if mark == "_" else (below, script)
        kind = ("munder", "mover") if command in STRETCHED else ("msub", "msup")
        if below and above:
            name = "munderover" if kind[0] == "munder" else "msubsup"
            return f"<{name}>{base}{below}{above}</{name}>"
        if below:
            return f"<{kind[0]}>{base}{below}</{kind[0]}>"
        return f"<{kind[1]}>{base}{above}</{kind[1]}>" if above else base

    def _next(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def _one(self) -> str:
        """A symbol, a number, a group in braces, or a command with its arguments."""
        token = self._next()
        if not token:
            raise ValueError(f"`{self.source}` must not end with a script or command")
        self.place += 1
        if token == "{":
            return _row(self.sequence("}"))
        words = _WORDS.fullmatch(token)
        if words:
            plain = re.sub("^ | $", "\N{NO-BREAK SPACE}", words[1])  # plain spaces at the ends are dropped
            return f"<mtext>{html.escape(plain)}</mtext>"
        if token.startswith("\\"):
            return self._command(token[1:])
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        if token.isalpha():
            return f"<mi>{token}</mi>"
        token = {"-": "−", "'": "′", "*": "∗", "~": " "}.get(token, token)
        return f'<mo stretchy="false">{html.escape(token)}</mo>'

    def _command(self, name: str) -> str:
        if name in ACCENTS:
            return f'<mover accent="true">{self._one()}<mo>{ACCENTS[name]}</mo></mover>'
        if name in ("frac", "tfrac"):
            return f"<mfrac>{self._one()}{self._one()}</mfrac>"
        if name == "sqrt":
            return f"<msqrt>{self._one()}</msqrt>"
        if name in SIZES:
            return "" if name.endswith("style") else self._delimiter()
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}"/>'
        if name in ("{", "}", "|", "_", "%"):
            return f'<mo stretchy="false">{"‖" if name == "|" else name}</mo>'
        if name not in SYMBOLS:
            raise ValueError(f"`{self.source}` must use commands that docs/formulas.py knows; got \\{name}")
        tag = "mi" if SYMBOLS[name].strip().isalpha() and name not in STRETCHED else "mo"
        return f"<{tag}>{SYMBOLS[name]}</{tag}>"

    def _delimiter(self) -> str:
        """What follows `left` or `right`: it grows with what it holds."""
        token = self._next()
        self.place += 1
        if token == ".":
            return ""
        symbol = (
            SYMBOLS[token[1:]]
            if token.startswith("\\") and token[1:] in SYMBOLS
            else token.removeprefix("\\")
        )
        return f'<mo stretchy="true">{html.escape(symbol)}</mo>'


def _row(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"<mrow>{''.join(parts)}</mrow>"
