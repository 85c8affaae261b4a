"""The names of __global__ functions in CUDA and HIP sources.

Read from the source so that a misnamed kernel is found for every architecture, also where no compiler of it is at hand.
"""

import re
from collections.abc import Iterator
from pathlib import Path

PREFIX = "atrex_"

_COMMENT_OR_LITERAL = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_ATTRIBUTE = re.compile(r"\b__(?:launch_bounds|cluster_dims|maxnreg|block_size|attribute)__\s*\(")
_NAME = re.compile(r"([A-Za-z_][\w#]*)\s*\(")
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)\(([^)]*)\)(.*)$", re.MULTILINE)


def is_source(path: Path) -> bool:
    return path.suffix in {".cc", ".cpp", ".cu", ".cuh", ".h", ".hip", ".hpp"}


def _after_parenthesis(text: str, start: int) -> int:
    """The place after the parenthesis that closes the one before `start`."""
    depth = 1
    while depth and start < len(text):
        depth += {"(": 1, ")": -1}.get(text[start], 0)
        start += 1
    return start


def _plain(text: str) -> str:
    """The source without comments, literals, line continuations and attributes."""
    text = _COMMENT_OR_LITERAL.sub(lambda match: '""' if match[0].startswith('"') else " ", text)
    text = text.replace("\\\n", " ")
    while match := _ATTRIBUTE.search(text):
        text = text[: match.start()] + text[_after_parenthesis(text, match.end()) :]
    return text


def _names(text: str) -> Iterator[str]:
    for match in re.finditer(r"\b__global__\b", text):
        name = _NAME.search(text, match.end())
        if name:
            yield name[1]


def _macro_arguments(text: str, macro: str, index: int) -> Iterator[str]:
    """What the uses of a macro give for one of its parameters."""
    for use in re.finditer(rf"(?<!define )\b{macro}\s*\(", text):
        arguments = text[use.end() : _after_parenthesis(text, use.end()) - 1].split(",")
        yield arguments[index].strip() if index < len(arguments) else ""


def misnamed(sources: dict[str, str]) -> Iterator[str]:
    """One sentence for each kernel of a target that does not start with PREFIX.

    A macro may define kernels and take the name as a parameter; then the arguments of its uses are the names.
    """
    plain = {path: _plain(text) for path, text in sources.items()}
    for path, text in plain.items():
        for name in _names(_MACRO.sub("", text)):
            if not name.startswith(PREFIX):
                yield f"{path}: __global__ {name} does not start with {PREFIX}"
        for macro, parameters, body in _MACRO.findall(text):
            names = [parameter.strip() for parameter in parameters.split(",")]
            for name in _names(body):
                if name not in names:
                    given = [name]
                else:
                    given = [a for other in plain.values() for a in _macro_arguments(other, macro, names.index(name))]
                for kernel in given:
                    if not kernel.startswith(PREFIX):
                        yield f"{path}: __global__ {kernel}, made by {macro}, does not start with {PREFIX}"
