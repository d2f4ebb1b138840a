"""What the tests of the cache share."""

from __future__ import annotations

import pytest

from tensor_comprehensions.cache import source


@pytest.fixture(autouse=True)
def package_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept once the package has been edited, and whoever runs these tests may be editing it."""
    monkeypatch.setattr(source, "_stamp", lambda: source._imported)
