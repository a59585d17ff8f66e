"""Writes `charts/segue/README.md`, which `helm show readme` prints: all values with their defaults and comments.

`python -m tests.tidy.chart_readme` (or `make docs`); a test compares the page with what this would write. What a value
is for stands in values.yaml alone, above its key or behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import yaml

from tests.tidy.chart_schema import CHART

PAGE = CHART / "README.md"
VALUES = CHART / "values.yaml"
HEAD = """# Segue

Segue serves a language model with prefill and decode in pods of their own, behind OpenAI's HTTP API. It needs no
operator and no CRD, and makes nothing cluster-scoped.

```sh
helm install segue oci://registry.example.com/ai/charts/segue --version X.Y.Z --wait   # where `make publish` has put it
helm test segue --logs
```

This installs the small model of the demo on CPU and prints the commands that lead to the first token. A published chart
names its images by digest, also when another `image.registry` has copies of them. Ready-made values are in `ci/`, as
`gpu.yaml` and `production.yaml`: `helm pull --untar` brings them. Helm refuses a value that has gone in a sentence;
what became of it is in the repository's CHANGELOG.md, under *Upgrading*. Licence: Apache-2.0.

## Values

Written by `make docs` out of the comments of values.yaml; edit those. Settings of the processes (`router.config`,
`prefill.config`, `decode.config`) are in the repository's docs/reference.md.

| value | default | |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    text = VALUES.read_text(encoding="utf-8")
    return HEAD + "".join(f"{row}\n" for row in rows(text))


def rows(text: str) -> Iterator[str]:
    """A row for each value, and for each group that has a comment."""
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    for path, node, comment in _entries(root, text.splitlines(), ""):
        if _is_group(node):
            if comment:
                yield f"| **{path}** | | {_cell(comment)} |"
        else:
            default = json.dumps(yaml.safe_load(yaml.serialize(node)), ensure_ascii=False)
            yield f"| `{path}` | `{_cell(default)}` | {_cell(comment)} |"


def _entries(mapping: yaml.MappingNode, lines: list[str], above: str) -> Iterator[tuple[str, yaml.Node, str]]:
    for key, node in mapping.value:
        path = f"{above}.{key.value}".lstrip(".")
        yield path, node, _comment(key, node, lines)
        if _is_group(node):
            yield from _entries(node, lines, path)


def _is_group(node: yaml.Node) -> bool:
    """A mapping that is written line by line: its keys are values of their own."""
    return isinstance(node, yaml.MappingNode) and not node.flow_style


def _comment(key: yaml.Node, node: yaml.Node, lines: list[str]) -> str:
    """What stands above a key, as far in as the key is, and behind its value."""
    line, indent = key.start_mark.line, " " * key.start_mark.column
    above: list[str] = []
    while line > 0 and lines[line - 1].startswith(f"{indent}#"):
        line -= 1
        above.insert(0, lines[line].removeprefix(f"{indent}#").removeprefix(" --").strip())
    in_lines = isinstance(node, yaml.CollectionNode) and not node.flow_style
    end = key.end_mark if in_lines else node.end_mark
    behind = re.match(r":?\s+#\s*(.*)", lines[end.line][end.column :])
    return " ".join([*above, *([behind[1]] if behind else [])])


def _cell(text: str) -> str:
    """Outside of code a word in angle brackets would be a tag."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if number % 2 else part.replace("<", "\\<") for number, part in enumerate(parts))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
