"""The benchmark of whole graphs measures what it says."""

from __future__ import annotations

import pytest

from benchmarks import torch_compile


def test_ratios_are_of_equal_results(capsys: pytest.CaptureFixture[str]) -> None:
    for training in ([], ["--training"]):
        torch_compile.main(["perceptron", "--seconds", "0.01", "--without-inductor", *training])
        line = capsys.readouterr().out
        assert line.startswith("perceptron 64")
        assert float(line.split(torch_compile.EAGER)[1].split()[0]) > 0
        assert 0 <= float(line.split("share")[1]) <= 1


def test_a_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compile.torch, "compile", lambda function, **_: lambda *inputs: function(*inputs) + 1)
    with pytest.raises(ValueError, match="differs"):
        torch_compile.measure("perceptron 64", 0.01, inductor=False)
