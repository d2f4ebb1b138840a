"""Defs with gradients, for the tests of the text that is derived and of the numbers that it gives."""

from __future__ import annotations

MATMUL = "def matmul(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }"
SOFTMAX = """def softmax(float(N,D) x) -> (y) {
    m(n) max=! x(n,d)
    e(n,d) = exp(x(n,d) - m(n))
    t(n) +=! e(n,d)
    y(n,d) = e(n,d) / t(n)
}"""
LAYERNORM = """def layernorm(float(N,D) x, float(D) w, float(D) b) -> (y) {
    mean(n) +=! x(n,d)
    mean(n) = mean(n) / D
    var(n) +=! (x(n,d) - mean(n)) * (x(n,d) - mean(n))
    r(n) = rsqrt(var(n) / D + 1e-5)
    y(n,d) = (x(n,d) - mean(n)) * r(n) * w(d) + b(d)
}"""
SWIGLU = """def swiglu(float(N,D) x, float(D) g, float(H,D) U, float(H,D) V) -> (y) {
    s(n) +=! x(n,d) * x(n,d)
    z(n,d) = x(n,d) * rsqrt(s(n) / D + 1e-5) * g(d)
    u(n,h) +=! z(n,d) * U(h,d)
    v(n,h) +=! z(n,d) * V(h,d)
    y(n,h) = u(n,h) * sigmoid(u(n,h)) * v(n,h)
}"""
FCRELU = """def fcrelu(float(B,M) I, float(N,M) W, float(N) b) -> (O) {
    O(n,m) +=! I(n,k) * W(m,k)
    O(n,m) = O(n,m) + b(m)
    O(n,m) = fmax(O(n,m), 0)
}"""
CONV1D = "def conv1d(float(H) I, float(KH) W) -> (O) { O(h) +=! I(h+kh) * W(kh) }"
CONV2D = """def conv2d(float(N,C,H,W) I, float(M,C,KH,KW) F) -> (O) {
    O(n,m,h,w) +=! I(n,c,h+kh,w+kw) * F(m,c,kh,kw)
}"""
STRIDED = "def strided(float(H) I, float(KH) W) -> (O) { O(h) +=! I(2*h+kh) * W(kh) }"
MAXPOOL = """def maxpool(float(C,H,W) I) -> (O) {
    O(c,h,w) max=! I(c,2*h+kh,2*w+kw) where kh in 0:2, kw in 0:2
}"""
POOL = "def pool(float(N) a, int k, int s) -> (b) { b(i) max=! a(s*i+j) where j in 0:k }"
GATHER = "def gather(float(V,D) T, long(B) I) -> (o) { o(b,d) = T(I(b),d) }"
GEMM = """def gemm(float(M,K) A, float(K,N) B, float alpha, float beta) -> (C) {
    C(m,n) = beta * C(m,n)
    C(m,n) += alpha * A(m,k) * B(k,n)
}"""
PRODUCT = "def product(float(N,K) a) -> (b) { b(i) *=! a(i,k) + 1 }"
BLUR = "def blur(float(N) a) -> (b) { b(i) = (a(i-1) + a(i) * a(i) + a(i+1)) / 3 }"
SHIFTED = "def shifted(float(N) a) -> (b) { t(i) = a(i-1) * a(i-1)\n b(i) = exp(t(i)) * t(i) + t(i) * b(i) }"
PADDED = "def padded(float(N) a) -> (b) { b(i) = (i > 0 ? a(i-1) * a(i) : 0.0) + c where i in 0:N, c = 0.5 }"
DIAGONAL = "def diagonal(float(N,N) a) -> (b) { b(i) = a(i,i) * a(0,i) }"
GUARDED = "def guarded(float(V) a, long(N) I) -> (b) { b(i) = I(i) >= 0 ? a(I(i)) * i : 0.0 }"
CHAIN = """def chain(float(N,M) x, float y) -> (a, z) {
    t(i,j) = x(i,j) * y
    a(i) +=! t(i,j)
    t(i,j) = t(i,j) * t(i,j) + a(i)
    t(i,j) += x(i,j) * t(i,j)
    z(j) +=! t(i,j) * a(i)
    z(j) += a(i) * x(i,j)
}"""
PARTS = """def parts(float(N) x, float(M) y) -> (float(8) z) {
    z(i) = 0.0 where i in 0:8
    z(i+1) = x(i) * x(i) where i in 0:3
    z(2*i) = y(i) * z(2*i) + y(i) where i in 0:3
    z(i) = z(i) * z(i)
}"""
TRANSPOSE = "def transpose(float(N,N) a) -> (float(N,N) b) { b(i,j) = a(j,i) * 2\n b(i,j) = b(j,i) * a(i,j) }"
SCATTER = "def scatter(float(N) x, long(N) I) -> (float(5) y) { y(I(n)) +=! x(n) * x(n) }"
EXTREMA = """def extrema(float(N) x, float(N) y) -> (a, b, c) {
    a max=! x(i) * y(i)
    b min=! x(i)
    c(i) = max(x(i), y(i), a)
}"""
GOES_ON = "def goes_on(float(N,M) x) -> (p) { p(i) *= x(i,j) + 2\n p(i) max= x(i,j) }"
IDLE = """def idle(float(N,M) x, float(N) z) -> (y, p, s) {
    y(i) max=! z(i) * z(i) where exists x(i,j)
    p(i) *=! z(i) where exists x(i,j)
    s +=! z(i) where exists x(i,j)
}"""
ELSEWHERE = """def elsewhere(float(N) x, float(N,M) z) -> (s) {
    s +=! x(i) * x(i) where exists z(i,0), exists z(0,j)
    s = s * s
}"""
STRIDED2D = """def strided2d(float(N,C,H,W) I, float(M,C,KH,KW) F) -> (O) {
    O(n,m,h,w) +=! I(n,c,2*h+kh,3*w+2*kw) * F(m,c,kh,kw)
}"""
DEPTHWISE = """def depthwise(float(N,C,H,W) I, float(C,KH,KW) F, float(C) b) -> (O) {
    O(n,c,h,w) +=! I(n,c,h+kh,w+kw) * F(c,kh,kw)
    O(n,c,h,w) = relu(O(n,c,h,w) + b(c))
}"""
AVERAGED = "def averaged(float(N) a) -> (b) { b(i) +=! a(i+j) / 3 where j in 0:3 }"
ATTENTION = """def attention(float(B,Q,E) q, float(B,K,E) k, float(B,K,E) v) -> (o) {
    s(b,i,j) +=! q(b,i,e) * k(b,j,e)
    m(b,i) max=! s(b,i,j)
    p(b,i,j) = exp(s(b,i,j) - m(b,i))
    t(b,i) +=! p(b,i,j)
    o(b,i,e) +=! p(b,i,j) / t(b,i) * v(b,j,e)
}"""
