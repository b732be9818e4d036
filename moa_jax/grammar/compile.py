"""Compiles grammars within limits of size and time.

text      what a request carries: llguidance's own format, from `json_schema` or `text_of`
Grammar   compiled for a tokenizer; each answer follows a copy of its matcher
"""

from __future__ import annotations

import functools
import importlib
import json
import threading
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

from moa_jax.config.checks import is_id
from moa_jax.errors import InputError, TemporaryError, first_line
from moa_jax.grammar.masks import Grammar
from moa_jax.grammar.trial import LARK_OR_GBNF, Trial, TrialFailed

if TYPE_CHECKING:
    from llguidance import LLTokenizer

T = TypeVar("T")
MOST_BYTES = 1 << 17  # of a grammar's text: a schema of some thousand properties
MOST_SECONDS = 5  # such a schema compiles in 0.2 s
MOST_SHOWN = 300  # characters of llguidance's errors
MOST_KEPT = 32  # grammars and errors, since clients send the same one again and again
WHITESPACE = r"[ \t\n\r]{0,20}"  # of JSON; without a limit small models never end it
# The limits that are not given are llguidance's: about 14 ms for a mask.
LIMITS = {
    "max_grammar_size": 50_000,  # symbols
    "max_lexer_states": 20_000,  # of 1 to 2 kB each, per answer
    "verbose_errors": False,  # a grammar is not repeated in its error
}


def json_schema(schema: Any, flexible: bool = True, whitespace: str | None = None) -> str:
    """The text of a grammar for JSON that is valid under a schema.

    Without `flexible` the JSON has no optional whitespace; `whitespace` is a regular expression for
    the optional whitespace. Raises InputError.
    """
    options = {"whitespace_flexible": flexible}
    if flexible or whitespace is not None:
        options["whitespace_pattern"] = WHITESPACE if whitespace is None else whitespace
    from_schema = llguidance().LLMatcher.grammar_from_json_schema
    return _checked(lambda: from_schema(schema, overrides=options))


def text_of(kind: str, value: Any) -> str:
    """The text of a grammar of a kind: "regex", "choice" (a list), or "grammar" (Lark or GBNF).

    Raises InputError.
    """
    if isinstance(value, str):
        _check_size(value)
    if kind == "grammar":  # the trial process converts GBNF, which may take minutes
        return json.dumps({"grammars": [{LARK_OR_GBNF: value}]}, ensure_ascii=False)
    from_text, value = llguidance().grammar_from, json.dumps(value) if kind == "choice" else value
    return _checked(lambda: from_text(kind, value))


def llguidance() -> Any:
    """The package, of the extra `serve`; raises InputError if it is not installed."""
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        line = f"the server lacks llguidance ({first_line(error)})"
        raise InputError(f"{line}; pip install 'moa-jax[serve]' there") from error


def _check_size(text: str) -> None:
    if (size := len(text.encode())) > MOST_BYTES:
        raise InputError(f"the grammar has {size} bytes; give at most {MOST_BYTES}")


def _checked(make: Callable[[], T]) -> T:
    """The result of llguidance; raises InputError instead of its exceptions."""
    try:
        return make()
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(first_line(error)) from error


class GrammarCompiler:
    """Compiles grammars for a tokenizer; one thread may compile."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """The tokenizer is a fast one of transformers; answers end with one of `eos_ids`."""
        self._hf_tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_ids = [token for token in eos_ids if is_id(token, vocab_size)]
        self._results: dict[str, Grammar | str] = {}  # by text, with errors; the newest is last
        self._lock = threading.Lock()

    def known(self, text: str) -> Grammar | None:
        """The grammar if it is in the cache; any thread may call this.

        Raises InputError for a grammar whose error is in the cache.
        """
        with self._lock:
            if (found := self._results.pop(text, None)) is not None:
                self._results[text] = found
        if isinstance(found, str):
            raise InputError(found)
        return found

    def compile(self, text: str) -> Grammar:
        """The compiled grammar.

        Raises InputError for an invalid grammar and for a large one, and TemporaryError if the
        trial process fails, which says nothing about the grammar.
        """
        _check_size(text)
        if found := self.known(text):
            return found
        result = self._tried(text)
        with self._lock:
            self._results[text] = result
            for oldest in list(self._results)[:-MOST_KEPT]:
                del self._results[oldest]
        if isinstance(result, str):
            raise InputError(result)
        return result

    def _tried(self, text: str) -> Grammar | str:
        """The compiled grammar, or why it does not compile."""
        tokenizer, trial = self._prepared
        try:
            error, text = trial.result_of(text, MOST_SECONDS)
        except TrialFailed as failure:
            line = f"the process that compiles grammars fails ({first_line(failure)})"
            raise TemporaryError(f"{line}; try again later") from failure
        if error:
            line = " ".join(error.replace("<non-verbose/>", "").split())[:MOST_SHOWN]
            return f"{line}; give another grammar"
        limits = llguidance().LLParserLimits(**LIMITS)
        matcher = llguidance().LLMatcher(tokenizer, text, log_level=0, limits=limits)
        return Grammar(matcher, self._vocab_size)

    @functools.cached_property
    def _prepared(self) -> tuple[LLTokenizer, Trial]:
        """The tokenizer for llguidance, which takes up to a second to make, and a trial with it."""
        if not getattr(self._hf_tokenizer, "is_fast", False):
            raise InputError("the model has no fast tokenizer; leave it out")
        if not self._eos_ids:
            raise InputError("the model has no token that ends an answer; leave it out")
        backend = copy(self._hf_tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        parts = backend.to_str(), self._vocab_size, self._eos_ids
        settings = dict(zip(("tokenizer", "vocab_size", "eos_ids"), parts, strict=True))
        make = llguidance().LLTokenizer
        made = _checked(lambda: make(*parts))  # the model may lack tokens
        return made, Trial(settings | {"limits": LIMITS})
