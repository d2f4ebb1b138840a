"""A layer with a def in data-parallel training: two processes get the gradients of the whole batch."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tensor_comprehensions as tc

LINEAR = """
def linear(float(B,I) x, float(O,I) weight, float(O) bias) -> (y) {
    y(b,o) +=! x(b,i) * weight(o,i)
    y(b,o) = y(b,o) + bias(o)
}
"""
DATA = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
PROCESSES = 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(tc.Module(LINEAR, ("weight", "bias"), sizes={"I": 6, "O": 4}), nn.Tanh())


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).square().mean().backward()
    found = [p.grad for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in found if g is not None]


def train(rank: int, folder: str) -> None:
    """What each process runs: one step of either kind on its half of the data."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=PROCESSES)
    try:
        mine = DATA.chunk(PROCESSES)[rank]
        replicated = gradients(nn.parallel.DistributedDataParallel(network()), mine)
        sharded = network()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (PROCESSES,)))
        torch.save((replicated, gradients(sharded, mine)), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_replicated_and_sharded_layers_get_the_gradients_of_the_whole_batch(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train, (str(tmp_path),), PROCESSES)
    expected = gradients(network(), DATA)
    assert len(expected) == 2
    for rank in range(PROCESSES):
        replicated, sharded = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(replicated, expected)
        torch.testing.assert_close(sharded, expected)
