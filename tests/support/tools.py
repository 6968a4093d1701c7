# SPDX-License-Identifier: Apache-2.0
"""The commands in tools/, as modules."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any

import pytest

from support.expected import ROOT

TOOLS = ROOT / "tools"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tool as a module."""
    monkeypatch.syspath_prepend(TOOLS)
    loader = SourceFileLoader(name, str(TOOLS / name))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
