"""What the tests of the cache share."""

from __future__ import annotations

import pytest

from tensor_comprehensions.cache import package_digest


@pytest.fixture(autouse=True)
def package_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept once the package has been edited, and whoever runs these tests may be editing it."""
    monkeypatch.setattr(package_digest, "_stamp", lambda: package_digest._imported)
