"""The linter finds nothing in what the documentation tells people to write."""

from __future__ import annotations

import pytest

from elasticrun.lint.engine import lint_text
from tests.docs.documents import Block, blocks

ELASTIC = [each for each in blocks("python") if "elasticrun" in each.code]


@pytest.mark.parametrize("block", ELASTIC, ids=[block.name for block in ELASTIC])
def test_an_example_has_no_findings(block: Block) -> None:
    assert [each.message for each in lint_text(block.code).findings] == []
