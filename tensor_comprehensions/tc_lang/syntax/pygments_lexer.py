"""A Pygments lexer for the language, for highlighting in the documentation, in rich and in IPython.

Pygments finds it by the entry point `pygments.lexers`, under the name `tc` and for files `*.tc`.
"""

from __future__ import annotations

from pygments.lexer import RegexLexer, bygroups, words
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Punctuation, Whitespace

from ...core.dtypes import ALIASES, DTYPES
from ...core.math_functions import FUNCTIONS
from ..builtins import CONSTANTS, SPECIAL

_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]*"
_FUNCTIONS = (*SPECIAL, *FUNCTIONS, *(f"{name}f" for name in FUNCTIONS))


class TcLexer(RegexLexer):
    """Tokens of a TC program. `in`, `min` and `max` are keywords only where the grammar expects them."""

    name = "Tensor Comprehensions"
    url = "https://arxiv.org/abs/1802.04730"
    aliases = ("tc",)
    filenames = ("*.tc",)

    tokens = {  # noqa: RUF012  (Pygments' metaclass reads and replaces it)
        "root": [
            (r"\s+", Whitespace),
            (r"#[^\n]*", Comment.Single),
            (rf"(def)(\s+)({_IDENTIFIER})", bygroups(Keyword.Declaration, Whitespace, Name.Function)),
            (words((*DTYPES, *ALIASES), prefix=r"\b", suffix=r"\b"), Keyword.Type),
            (r"(?:min|max)=!?(?!=)", Operator),
            (r"where\b|exists(?=\s+[A-Za-z_])", Keyword),
            (rf"({_IDENTIFIER})(\s+)(in)\b(?=\s)", bygroups(Name, Whitespace, Keyword)),
            (words(tuple(CONSTANTS), prefix=r"\b", suffix=r"\b"), Keyword.Constant),
            (words(_FUNCTIONS, prefix=r"\b", suffix=r"\b(?=\s*\()"), Name.Builtin),
            (_IDENTIFIER, Name),
            (r"0[xX][0-9a-fA-F]+", Number.Hex),
            (r"(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+", Number.Float),
            (r"[0-9]+", Number.Integer),
            (r"->|→", Punctuation),
            (r"<=>|<=|>=|==|!=|&&|\|\||[+*]=!?|[-+*/%<>=!?]", Operator),
            (r"[(){},:.;]", Punctuation),
            (r".", Error),
        ]
    }
