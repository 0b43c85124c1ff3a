"""Chat templates in Jinja's sandbox, and a stranger's in a process of its own.

As a script it reads a template and conversations from its standard input, bounds its own memory and
time, and prints the texts. It imports nothing of lowcomm: it starts fast.
"""

import json
import re
import resource
import sys
from contextlib import suppress
from typing import Any

MEMORY_BYTES, CPU_SECONDS, LONGEST_TEXT = 512 << 20, 5, 4 << 20
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(?=\s*[-+]?%\})")
"""A tag of `transformers` around answers; ours are found by rendering the messages before them."""


def compile_template(source: str) -> Any:
    """A template as transformers sets it up, so that it gives the same text. Raises
    TemplateError."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: object) -> None:
        raise TemplateError(str(message))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = refuse
    marked = _GENERATION.sub(lambda tag: tag[1] + ("endif" if tag[2] else "if true"), source)
    return environment.from_string(marked)


def render(template: Any, messages: Any, prompt: bool, words: Any) -> str:
    """The text of a conversation; ``prompt``: with what begins an answer."""
    return template.render(messages=messages, add_generation_prompt=prompt, tools=None, **words)


def main() -> None:
    """Print the texts that the standard input asks for, or the problem with its template."""
    asked = json.load(sys.stdin)
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # it is lower already, or this system has none
            resource.setrlimit(kind, (most, most))
    try:
        template = compile_template(asked["template"])
        texts = [render(template, *talk, words=asked["words"]) for talk in asked["talks"]]
        found = {"texts": texts} if sum(map(len, texts)) <= LONGEST_TEXT else {"why": "is too long"}
    except Exception as error:  # whatever a template may raise
        found = {"why": f"refuses the messages ({error})"[:300]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
