"""Turn what Markdown does not know in vpipe's docstrings into Markdown, for the pages of the API."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:class|func|meth|attr|data|mod|exc):`(~?)([^`]+)`")


class Docstrings(Extension):
    """An extension of Griffe, which reads the docstrings."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = ROLE.sub(lambda found: f"`{found[2].rpartition('.')[2] if found[1] else found[2]}`",
                            obj.docstring.value)
            obj.docstring.value = re.sub(r"^\s*::$\n", "", text, flags=re.MULTILINE)  # a picture follows, indented
