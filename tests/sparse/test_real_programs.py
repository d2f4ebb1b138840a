"""Programs as people write them: layers of graph networks, solvers, factorizations, shortest paths; on small data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta", "ignore:Sparse invariant checks")
OPS = tc.define("""
def gcn(double(N,N) A: csr, double(N,F) X, double(F,G) W) -> (Y) {
    H(i,g) +=! X(i,f) * W(f,g)
    Y(i,g) +=! A(i,j) * H(j,g)
    Y(i,g) = max(Y(i,g), 0)
}
def gat(double(N,N) M: csr, double(N,H,F) X, double(N,H) u, double(N,H) v) -> (Y) {
    s(i,h,j) = max(u(i,h) + v(j,h), (u(i,h) + v(j,h)) / 5) where exists M(i,j)
    m(i,h) max=! s(i,h,j) where exists M(i,j)
    e(i,h,j) = exp(s(i,h,j) - m(i,h)) where exists M(i,j)
    z(i,h) +=! e(i,h,j)
    Y(i,h,f) +=! e(i,h,j) * X(j,h,f)
    Y(i,h,f) = Y(i,h,f) / z(i,h)
}
def spmv(double(N,M) A: csr, double(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }
def residual(double(N,M) A: csr, double(M) x, double(N) b) -> (r) { r(i) = b(i)  r(i) += -(A(i,j) * x(j)) }
def jacobi(double(N,N) A: csr, double(N) x, double(N) b) -> (y) {
    r(i) = b(i)
    r(i) += -(A(i,j) * x(j))
    y(i) = x(i) + 2.0 / 3 * r(i) / A(i,i)
}
def galerkin(double(N,M) P: csr, double(N,N) A: csr) -> (double(M,M) C: csr) { C(p,q) +=! P(i,p) * A(i,j) * P(j,q) }
def restrict_to(double(N,M) P: csr, double(N) r) -> (c) { c(p) +=! P(i,p) * r(i) }
def rank(double(N,N) A: csr, double(N) x) -> (y) {
    degree(j) +=! A(j,i)
    share(j) = degree(j) > 0 ? x(j) / degree(j) : 0.0
    lost +=! degree(j) > 0 ? 0.0 : x(j)
    y(i) +=! A(j,i) * share(j)
    y(i) = 0.15 / N + 0.85 * (y(i) + lost / N)
}
def bags(double(B,V) I: du, double(V,D) W) -> (Y) { Y(b,d) +=! I(b,v) * W(v,d) }
def normal(double(N,M) A: csr, double(M,R) V) -> (G, b) {
    G(i,r,q) +=! V(j,r) * V(j,q) where exists A(i,j)
    b(i,r) +=! A(i,j) * V(j,r)
}
def mttkrp(double(I,J,K) B: csf, double(J,R) C, double(K,R) D) -> (A) { A(i,r) +=! B(i,j,k) * C(j,r) * D(k,r) }
def triangles(double(N,N) A: csr) -> (t) { t +=! A(i,j) * A(j,k) * A(i,k) }
def shorter(double(N,N) A: csr, double(N,N) B: csr) -> (C: csr) {
    C(i,j) min=! A(i,k) + B(k,j) where exists A(i,k), exists B(k,j)
}
""")


@pytest.fixture
def graph() -> Tensor:
    """A directed graph of 40 nodes, where each node but the last two has an edge."""
    g = torch.Generator().manual_seed(0)
    weights = torch.rand(40, 40, generator=g, dtype=torch.float64) + 0.1
    edges = torch.rand(40, 40, generator=g) < 0.08
    edges[torch.arange(38), torch.arange(1, 39)] = True
    edges[38:] = False
    return torch.where(edges, weights, 0.0)


def uniform(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5


def csr(x: Tensor) -> tc.SparseTensor:
    return tc.as_sparse(x, "csr")


def laplacian(n: int) -> Tensor:
    """Of a square grid with n x n points."""
    line = 2 * torch.eye(n, dtype=torch.float64) - torch.diag(torch.ones(n - 1), 1) - torch.diag(torch.ones(n - 1), -1)
    one = torch.eye(n, dtype=torch.float64)
    return torch.kron(line, one) + torch.kron(one, line)


def test_a_graph_convolution(graph: Tensor) -> None:
    x, w = uniform(40, 12), uniform(12, 7)
    torch.testing.assert_close(OPS.gcn(csr(graph), x, w), torch.relu(graph @ (x @ w)))


def test_a_layer_of_graph_attention_with_heads(graph: Tensor) -> None:
    x, u, v = (t.requires_grad_() for t in (uniform(40, 3, 8), uniform(40, 3, seed=2), uniform(40, 3, seed=3)))
    m = csr(graph + torch.eye(40, dtype=torch.float64))
    scores = torch.nn.functional.leaky_relu(u[:, None] + v[None], 0.2)
    weights = scores.masked_fill(m.to_dense()[:, :, None] == 0, -torch.inf).softmax(1)
    expected, found = torch.einsum("ijh,jhf->ihf", weights, x), OPS.gat(m, x, u, v)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(y.sin().sum(), (x, u, v)) for y in (found, expected))
    torch.testing.assert_close(ours, theirs)


def test_page_rank(graph: Tensor) -> None:
    n, a, x = 40, csr((graph != 0).double()), torch.full((40,), 1 / 40, dtype=torch.float64)
    for _ in range(60):
        x = OPS.rank(a, x)
    links = (graph != 0).double()
    steps = torch.where(links.sum(1, keepdim=True) > 0, links / links.sum(1, keepdim=True).clamp(min=1), 1 / n)
    matrix = 0.15 / n + 0.85 * steps.T
    eigenvalues, vectors = torch.linalg.eig(matrix)
    first = vectors[:, eigenvalues.abs().argmax()].real
    torch.testing.assert_close(x, first / first.sum(), rtol=1e-4, atol=1e-6)


def test_conjugate_gradients() -> None:
    a, b = csr(laplacian(8)), uniform(64)
    x, r = torch.zeros_like(b), OPS.residual(a, torch.zeros_like(b), b)
    p = r
    for _ in range(40):
        q = OPS.spmv(a, p)
        step = r @ r / (p @ q)
        x, after = x + step * p, r - step * q
        p, r = after + (after @ after) / (r @ r) * p, after
    torch.testing.assert_close(x, torch.linalg.solve(laplacian(8), b))


def test_a_cycle_of_multigrid() -> None:
    """Two grids: three cycles reduce the error as the same cycles with dense matrices do."""
    fine, b = laplacian(9), uniform(81)
    line = torch.zeros(9, 4, dtype=torch.float64)
    for p in range(4):
        line[2 * p : 2 * p + 3, p] = torch.tensor([0.5, 1.0, 0.5], dtype=torch.float64)
    prolongation = torch.kron(line, line)
    a, p = csr(fine), csr(prolongation)
    coarse = OPS.galerkin(p, a)
    torch.testing.assert_close(coarse.to_dense(), prolongation.T @ fine @ prolongation)
    x = dense = torch.zeros_like(b)
    for _ in range(3):
        x = OPS.jacobi(a, OPS.jacobi(a, x, b), b)
        correction = torch.linalg.solve(coarse.to_dense(), OPS.restrict_to(p, OPS.residual(a, x, b)))
        x = x + OPS.spmv(p, correction)
        for _ in range(2):
            dense = dense + 2 / 3 * (b - fine @ dense) / fine.diagonal()
        small = torch.linalg.solve(prolongation.T @ fine @ prolongation, prolongation.T @ (b - fine @ dense))
        dense = dense + prolongation @ small
    torch.testing.assert_close(x, dense)
    exact = torch.linalg.solve(fine, b)
    assert (x - exact).norm() < 0.05 * exact.norm()


def test_embedding_bags() -> None:
    """Words come several times in a bag; one bag is empty."""
    words = torch.tensor([3, 3, 8, 0, 1, 1, 1, 9])
    offsets = torch.tensor([0, 3, 3, 4])
    pos = torch.cat((offsets, torch.tensor([8])))
    weights, table = uniform(8, seed=4), uniform(10, 16)
    bags = tc.SparseTensor.from_arrays("du", (4, 10), [None, (pos, words)], weights)
    expected = torch.nn.functional.embedding_bag(words, table, offsets, mode="sum", per_sample_weights=weights)
    torch.testing.assert_close(OPS.bags(bags, table), expected)


def test_half_a_step_of_alternating_least_squares(graph: Tensor) -> None:
    v = uniform(40, 5)
    g, b = OPS.normal(csr(graph), v)
    ridge = 0.1 * torch.eye(5, dtype=torch.float64)
    found = torch.linalg.solve(g + ridge, b)
    for user in range(40):
        seen = graph[user] != 0
        rows = torch.cat((v[seen], 0.1**0.5 * torch.eye(5, dtype=torch.float64)))
        rated = torch.cat((graph[user, seen], torch.zeros(5, dtype=torch.float64)))
        torch.testing.assert_close(found[user], torch.linalg.lstsq(rows, rated[:, None]).solution[:, 0])


def test_a_step_of_a_cp_decomposition() -> None:
    """The factor that is left out comes back from a tensor of rank 2 whose other factors are known."""
    a, c, d = uniform(7, 2, seed=5), uniform(6, 2, seed=6), uniform(5, 2, seed=7)
    c[2], d[:3] = 0, 0
    tensor = torch.einsum("ir,jr,kr->ijk", a, c, d)
    product = OPS.mttkrp(tc.as_sparse(tensor, "csf"), c, d)
    torch.testing.assert_close(torch.linalg.solve((c.T @ c) * (d.T @ d), product.T).T, a)


def test_triangles(graph: Tensor) -> None:
    links = ((graph + graph.T) != 0).double().fill_diagonal_(0)
    found = OPS.triangles(csr(links.triu()))
    count = sum(
        bool(links[i, j] and links[j, k] and links[i, k]) for i in range(40) for j in range(i) for k in range(j)
    )
    assert found == count > 0


def test_shortest_paths(graph: Tensor) -> None:
    """Squares of the distances over minimum and sum, as by Floyd and Warshall."""
    paths = csr(graph.clone().fill_diagonal_(1e-300))  # a stored place for each node itself
    for _ in range(6):
        paths = OPS.shorter(paths, paths)
    expected = torch.where(graph != 0, graph, torch.inf).fill_diagonal_(0)
    for k in range(40):
        expected = torch.minimum(expected, expected[:, k, None] + expected[k])
    found = torch.full((40, 40), torch.inf, dtype=torch.float64)
    found[tuple(paths.coordinates())] = paths.values
    torch.testing.assert_close(found, expected)
    assert paths.nnz == int(expected.isfinite().sum())
